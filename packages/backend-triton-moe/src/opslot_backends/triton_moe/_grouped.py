"""Launches of the kernels of the experts, over the rows of a route."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _tiling
from ._kernels import experts as kernels
from ._route import Route
from ._tiling import Blocks

# Rows of tiles that share the weights of a column in the cache.
_GROUP = 8


class Maths(NamedTuple):
    """active = (up + offset) * gate * sigmoid(alpha * gate), clamped by `limit`.

    `paired` as gpt-oss stores its weights: [E, H, 2I] with gate and up in alternating columns, and [E, I, H]. Others
    have [E, 2I, H] and [E, H, I].
    """

    alpha: float
    limit: float
    offset: float
    paired: bool


class Routed(NamedTuple):
    """The rows that are computed, and how many: `weights` are the routing weights [T, K], `tile` the rows of a tile."""

    route: Route
    weights: Tensor
    tile: int

    @property
    def choices(self) -> int:
        return self.weights.shape[1]

    @property
    def rows(self) -> int:
        """Of an expert, on average."""
        return max(1, self.weights.numel() // self.route.first.shape[0])


def up(
    x: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    routed: Routed,
    maths: Maths,
    *,
    keep: bool,
    defined: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """The first product [P, 2I], or one tile of it where it is not kept, and what the second one is given [P, I].

    The first is zero behind the last tile where it must be `defined`, as what an operator returns.
    """
    route, rows = routed.route, routed.route.choice.shape[0]
    experts, width, inner = gate_up.shape[0], x.shape[1], gate_up.numel() // gate_up.shape[0] // x.shape[1] // 2
    hidden = x.new_empty(rows if keep else routed.tile, 2 * inner)
    active = x.new_empty(rows, inner)
    if defined:  # at most a tile an expert and one more are not written
        hidden[-(experts + 1) * routed.tile :].zero_()
    blocks = blocks or _tiling.blocks("up_paired" if maths.paired else "up", x, routed.tile, routed.rows, inner, width)
    if maths.paired:
        weight = _tiles(gate_up, 1, blocks.depth, 2 * blocks.columns)
        kept = _tiles(hidden, routed.tile, blocks.columns)
    else:
        weight = _tiles(gate_up.view(experts, 2, inner, width), 1, 2, blocks.columns, blocks.depth)
        kept = _tiles(hidden.view(-1, 2, inner), routed.tile, 1, blocks.columns // 2)
    kernels.up[(_tiling.programs(x, blocks),)](
        x,
        weight,
        bias,
        kept,
        _tiles(active, routed.tile, blocks.columns // 2),
        route.choice,
        routed.weights,
        route.expert,
        route.tiles,
        maths.alpha,
        maths.limit,
        maths.offset,
        routed.weights.numel(),
        width,
        inner,
        K=routed.choices,
        BM=routed.tile,
        BN=blocks.columns,
        BK=blocks.depth,
        GROUP=_GROUP,
        PRECISION=_tiling.precision(x),
        PAIRED=maths.paired,
        KEEP=keep,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return hidden, active


def product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    transposed: bool,
    blocks: Blocks | None = None,
) -> Tensor:
    """[P, D] -> [P, N]: each row by the matrix of its expert, which is [N, D] where `transposed`, else [D, N]."""
    route, size = routed.route, weight.shape[1] if transposed else weight.shape[2]
    out = rows.new_empty(rows.shape[0], size)
    blocks = blocks or _tiling.blocks("product", rows, routed.tile, routed.rows, size, rows.shape[1])
    part = (blocks.columns, blocks.depth) if transposed else (blocks.depth, blocks.columns)
    kernels.product[(_tiling.programs(rows, blocks),)](
        _tiles(rows, routed.tile, blocks.depth),
        _tiles(weight, 1, *part),
        bias,
        _tiles(out, routed.tile, blocks.columns // 2),
        route.choice,
        routed.weights,
        route.expert,
        route.tiles,
        routed.weights.numel(),
        size,
        rows.shape[1],
        BM=routed.tile,
        BN=blocks.columns,
        BK=blocks.depth,
        GROUP=_GROUP,
        PRECISION=_tiling.precision(rows),
        TRANSPOSED=transposed,
        BIASED=bias is not None,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def weight_gradient(left: Tensor, right: Tensor, routed: Routed, *, blocks: Blocks | None = None) -> Tensor:
    """[P, M] and [P, N] -> [E, M, N]: left.T @ right over the rows of each expert."""
    first, size = routed.route.first, routed.route.size
    out = left.new_empty(first.shape[0], left.shape[1], right.shape[1])
    blocks = blocks or _tiling.blocks("weight_gradient", left, routed.tile, routed.rows, right.shape[1], left.shape[1])
    kernels.weight_gradient[(_tiling.programs(left, blocks),)](
        _tiles(left, blocks.depth, blocks.rows),
        _tiles(right, blocks.depth, blocks.columns),
        _tiles(out, 1, blocks.rows, blocks.columns // 2),
        first,
        size,
        *out.shape,
        BM=blocks.rows,
        BN=blocks.columns,
        BK=blocks.depth,
        PRECISION=_tiling.precision(left),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def activation_gradient(
    grad: Tensor, hidden: Tensor, d_hidden: Tensor, d_weights: Tensor, routed: Routed, maths: Maths
) -> Tensor:
    """Write the gradients of `hidden` and the routing weights; return what the second product was given."""
    active, route = torch.empty_like(grad), routed.route
    kernels.activation_gradient[(grad.shape[0] // 8,)](
        grad,
        hidden,
        d_hidden,
        active,
        d_weights,
        route.choice,
        routed.weights,
        route.tiles,
        maths.alpha,
        maths.limit,
        maths.offset,
        routed.weights.numel(),
        grad.shape[1],
        TILE=routed.tile,
        PAD=_tiling.padding(routed.tile),
        BR=8,
        BI=256,
        PAIRED=maths.paired,
    )
    return active


def dispatch(x: Tensor, routed: Routed, bias: Tensor | None = None, along: Tensor | None = None) -> Tensor:
    """[T, W] -> [P, W]: the token of each row. `along` [S] gets each row's product with the bias of its expert."""
    route, (tokens, width) = routed.route, x.shape
    out = x.new_empty(route.choice.shape[0], width)
    kernels.dispatch[(tokens + route.expert.shape[0],)](
        x,
        out,
        bias,
        along,
        route.choice,
        route.place,
        route.expert,
        route.tiles,
        tokens,
        routed.weights.numel(),
        width,
        K=routed.choices,
        TILE=routed.tile,
        PAD=_tiling.padding(routed.tile),
        BR=8,
        BW=min(2048, triton.next_power_of_2(width)),
        BIASED=bias is not None,
    )
    return out


def combine(rows: Tensor, routed: Routed) -> Tensor:
    """[P, W] -> [T, W]: the sum of the rows of each token."""
    tokens, width = routed.weights.shape[0], rows.shape[1]
    out = rows.new_empty(tokens, width)
    block = min(2048, triton.next_power_of_2(width))
    kernels.combine[(tokens, triton.cdiv(width, block))](
        rows, routed.route.place, out, width, K=routed.choices, BW=block
    )
    return out


def bias_gradient(rows: Tensor, routed: Routed, *, weighted: bool) -> Tensor:
    """[P, W] -> [E, W]: the sum of the rows of each expert, times their routing weights where `weighted`."""
    route, width = routed.route, rows.shape[1]
    out = rows.new_empty(route.first.shape[0], width)
    kernels.bias_gradient[(out.shape[0], triton.cdiv(width, 128))](
        rows,
        out,
        route.choice,
        routed.weights,
        route.first,
        route.size,
        routed.weights.numel(),
        width,
        BR=16,
        BW=128,
        WEIGHTED=weighted,
    )
    return out


def _tiles(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))
