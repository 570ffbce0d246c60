"""Which rows the experts compute: the choices of all tokens in the order of their experts, each expert's from a tile on."""

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of a tile of every product; an expert's rows are padded to a multiple of it, so that no tile has two experts.
TILE = 128


class Route(NamedTuple):
    """T tokens with K choices each are S choices; P rows hold them and the padding, P known without asking the device.

    choice [P]: the choice, token * K + k, whose row this is, or S. place [S]: the row of a choice, or -1 where it is no
    expert's of ours. expert [P / TILE]: the expert of a tile. tiles [1]: how many tiles there are; what comes behind is
    never looked at. first, rows [E]: where the rows of an expert begin, and how many there are with the padding.
    """

    choice: Tensor
    place: Tensor
    expert: Tensor
    tiles: Tensor
    first: Tensor
    rows: Tensor


def route(index: Tensor, experts: int) -> Route:
    """Sort the choices in `index` [T, K] by expert, on their device and without waiting for it. All is int32."""
    flat = index.reshape(-1)
    size, device = flat.shape[0], flat.device
    by_expert, order = flat.sort(stable=True)
    bounds = torch.searchsorted(by_expert, torch.arange(experts + 1, device=device, dtype=flat.dtype))
    begin, counts = bounds[:-1], bounds.diff()
    rows = (counts + TILE - 1) // TILE * TILE
    last = rows.cumsum(0)
    first = last - rows

    total = (size + experts * (TILE - 1)) // TILE * TILE + TILE
    ours = by_expert < experts
    owner = by_expert.clamp(max=experts - 1).long()
    # Choices that are not ours go to the last tile, which no expert can reach.
    row = torch.where(ours, first[owner] + torch.arange(size, device=device) - begin[owner], total - 1)
    choice = torch.full((total,), size, device=device, dtype=torch.int32)
    choice.scatter_(0, row, torch.where(ours, order, size).int())
    place = torch.empty(size, device=device, dtype=torch.int32)
    place.scatter_(0, order, torch.where(ours, row, -1).int())
    tile = torch.arange(0, total, TILE, device=device)
    expert = torch.searchsorted(last, tile, right=True).clamp(max=experts - 1)
    return Route(choice, place, expert.int(), (last[-1:] // TILE).int(), first.int(), rows.int())
