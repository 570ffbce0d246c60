"""Which rows the experts compute: the choices of all tokens by expert, each expert's from a tile on."""

import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ._kernels import routing

# Choices that one program counts and places: each is compared with all others of its chunk.
_CHUNK = 512
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


class Route(NamedTuple):
    """T tokens with K choices each are S choices; P rows hold them and the padding, P known without asking the device.

    An expert's rows are padded to a multiple of a tile, so that no tile has two experts. All is int32.

    choice [P]: the choice, token * K + k, whose row this is, or S. place [S]: the row of a choice, or -1 where it is no
    expert's of ours. expert [P / tile]: the expert of a tile. tiles [1]: how many tiles there are; what comes behind is
    never looked at. first, size [E]: where the rows of an expert begin, and how many there are without the padding.
    """

    choice: Tensor
    place: Tensor
    expert: Tensor
    tiles: Tensor
    first: Tensor
    size: Tensor


def rows_of(choices: int, experts: int, tile: int) -> int:
    """P: room for any routing, and one tile that no expert can reach."""
    return (choices + experts * (tile - 1)) // tile * tile + tile


def route(index: Tensor, experts: int, tile: int) -> Route:
    """Sort the choices in `index` [T, K] by expert, on their device and without waiting for it.

    Choices of one expert stay in their order, so the same routing gives the same bits. What is neither an expert nor
    index E adds nothing, as the latter.
    """
    index = index.contiguous()
    choices = index.numel()
    chunks, lanes = triton.cdiv(choices, _CHUNK), triton.next_power_of_2(experts + 1)
    total = rows_of(choices, experts, tile)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, device=index.device, dtype=torch.int32)

    counts = integers(chunks, lanes)
    made = Route(*map(integers, (total, choices, total // tile, 1, experts, experts)))
    routing.count[(chunks,)](index, counts, choices, experts, BS=_CHUNK, BO=32, EB=lanes, num_warps=8)
    routing.layout[(1,)](
        counts,
        made.first,
        made.size,
        made.tiles,
        chunks,
        experts,
        TILE=tile,
        BC=max(1, 8192 // lanes),
        EB=lanes,
        num_warps=8,
    )
    routing.place[(chunks + total // tile,)](
        index,
        counts,
        made.first,
        made.size,
        made.choice,
        made.place,
        made.expert,
        choices,
        experts,
        chunks,
        TILE=tile,
        BS=_CHUNK,
        BO=32,
        EB=lanes,
        num_warps=8,
    )
    return made


def is_checking() -> bool:
    """Whether OPSLOT_CHECK_ROUTING asks for `check`, which waits for the device. Raises `ValueError` for nonsense."""
    value = os.environ.get("OPSLOT_CHECK_ROUTING", "")
    if value.lower() not in _SWITCH:
        raise ValueError(f"OPSLOT_CHECK_ROUTING={value!r}: write 1 or true to check, 0, false or leave it out")
    return _SWITCH[value.lower()]


def check(index: Tensor, experts: int) -> None:
    """Raise `ValueError` for an index that is neither an expert nor `experts`, naming the first."""
    if index.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("OPSLOT_CHECK_ROUTING reads indices, which a CUDA graph cannot while it is captured: unset it")
    index = index.long()
    wrong = ((index < 0) | (index > experts)).nonzero()
    if len(wrong):
        token, choice = wrong[0].tolist()
        raise ValueError(
            f"moe_experts: top_k_index[{token}, {choice}] is {int(index[token, choice])}, which is neither an expert, "
            f"0 to {experts - 1}, nor {experts} for one of another rank ({len(wrong)} of {index.numel()} are not); "
            "without OPSLOT_CHECK_ROUTING it adds nothing"
        )
