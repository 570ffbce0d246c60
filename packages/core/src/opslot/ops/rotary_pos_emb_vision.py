"""rotary_pos_emb_vision/full: rotary position embedding of image patches, computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def rotary_pos_emb_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (x[i], x[i + D/2]) of every head of q and k in float32, and round once.

        out = (x32 * cos32 + cat(-x32[..., D/2:], x32[..., :D/2]) * sin32).to(x.dtype)

    q and k are [S, heads, D], or [B, S, heads, D], and cos and sin [S, D], or [B, S, D]; D is even. The outputs have
    the dtypes of q and k whatever the tables' is. cos and sin are tables: a kernel may refuse ones that require a
    gradient, never drop it.

    Source: transformers 5.24.0, models/qwen3_vl, apply_rotary_pos_emb_vision; the same in qwen2_vl, qwen2_5_vl,
    qwen3_5 and glm4v.
    """
    import torch

    cos, sin = _float32(cos).unsqueeze(-2), _float32(sin).unsqueeze(-2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        x32, half = _float32(x), x.shape[-1] // 2
        turned = torch.cat((-x32[..., half:], x32[..., :half]), dim=-1)
        return (x32 * cos + turned * sin).to(x.dtype)

    return rotate(q), rotate(k)


def _float32(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)

    def tables(*shape: int, dtype: torch.dtype = wide) -> tuple[torch.Tensor, torch.Tensor]:
        angle = draw.normal(*shape[:-1], shape[-1] // 2, scale=3.0, dtype=torch.float64)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return leaf(draw.normal(*shape)), leaf(draw.normal(*shape))

    # As vision attention makes them: one projection for q, k and v, taken apart.
    q, k, _ = draw.normal(9, 3, 4, 16).permute(1, 0, 2, 3).unbind(0)
    yield Sample("parts of one projection", (leaf(q), leaf(k), *tables(9, 16)))
    yield Sample("contiguous", (*pair(7, 2, 80), *tables(7, 80)))
    yield Sample("tables in the dtype", (*pair(7, 2, 16), *tables(7, 16, dtype=dtype)))
    yield Sample("batched", (*pair(2, 5, 3, 8), *tables(2, 5, 8)))
    yield Sample("pairs of 1", (*pair(3, 1, 2), *tables(3, 2)))
    yield Sample("odd sizes", (*pair(1025, 3, 6), *tables(1025, 6)))
    yield Sample("one patch", (*pair(1, 4, 16), *tables(1, 16)))
    apart = (strided(draw.normal(6, 2, 8)) for _ in range(2))
    yield Sample("strided", (*map(leaf, apart), *(strided(table) for table in tables(6, 8))))
    q, k = draw.normal(6, 1, 8).expand(6, 3, 8), draw.normal(1, 3, 8).expand(6, 3, 8)
    yield Sample("expanded", (leaf(q), leaf(k), *tables(6, 8)))
    # Nothing says that both halves of a table agree.
    free = draw.normal(5, 8, dtype=wide), draw.normal(5, 8, dtype=wide)
    yield Sample("tables of any numbers", (*pair(5, 2, 8), *free))
    # Which a kernel may refuse: angles are seldom learnt.
    yield Sample("learnt tables", (*pair(5, 2, 8), *map(leaf, tables(5, 8))))
    yield Sample("no patches", (*pair(0, 2, 8), *tables(0, 8)))


def problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, patches: int, heads: int, dim: int) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    q, k, _ = draw.normal(patches, 3, heads, dim).permute(1, 0, 2, 3).unbind(0)
    angle = draw.normal(patches, dim, scale=3.0, dtype=torch.promote_types(dtype, torch.float32))
    return Sample("problem", (leaf(q), leaf(k), angle.cos(), angle.sin()))


CONTRACTS = (
    OpContract(
        op="rotary_pos_emb_vision",
        variant="full",
        summary="rotary position embedding over the whole head, halves split, computed in float32",
        reference=rotary_pos_emb_vision,
        samples=samples,
        # Results are rounded once, from float32, in which they take two products and a sum.
        tolerances=tolerances(roundings=1, terms=2),
        aliases=("apply_rotary_pos_emb_vision/full",),
        rows={"q": 0, "k": 0, "cos": 0, "sin": 0},
        workload=Workload(
            problem=problem,
            shapes={
                "qwen2.5-vl-7b": {"patches": 16384, "heads": 16, "dim": 80},
                "qwen3-vl-8b": {"patches": 16384, "heads": 16, "dim": 72},
            },
            large={"patches": 2**20 + 3, "heads": 32, "dim": 64},
        ),
    ),
)
