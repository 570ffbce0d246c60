"""rotary_pos_emb/full: rotary position embedding over the whole head, halves split (NeoX style)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (x[i], x[i + D/2]) of every head of q and k by the angles in cos and sin.

        out = x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin

    q is [B, heads, S, D] and k [B, kv_heads, S, D] with unsqueeze_dim=1, or [B, S, heads, D] with unsqueeze_dim=2.
    cos and sin are [B, S, D], or [1, S, D] for every sequence alike, and may hold different values in their two
    halves. D is even. cos and sin are tables: a kernel may refuse ones that require a gradient, never drop it.

    Source: transformers 5.24.0, models/qwen3_moe, apply_rotary_pos_emb.
    """
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    import torch

    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def tables(
        batch: int, length: int, dim: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = draw.normal(batch, length, dim // 2, scale=3.0, dtype=torch.float64).repeat(1, 1, 2)
        return angle.cos().to(dtype or draw.dtype), angle.sin().to(dtype or draw.dtype)

    def heads(batch: int, length: int, count: int, dim: int) -> torch.Tensor:
        # As attention makes them: projected to [B, S, heads, D], then transposed.
        return draw.normal(batch, length, count, dim).transpose(1, 2)

    yield Sample("grouped heads", (leaf(heads(2, 7, 4, 16)), leaf(heads(2, 7, 2, 16)), *tables(2, 7, 16)))
    yield Sample("one table for all", (leaf(heads(3, 5, 2, 8)), leaf(heads(3, 5, 2, 8)), *tables(1, 5, 8)))
    yield Sample("expanded tables", (leaf(heads(3, 5, 2, 8)), leaf(heads(3, 5, 1, 8)), *_expanded(3, *tables(1, 5, 8))))
    yield Sample(
        "heads after sequence",
        (leaf(draw.normal(2, 7, 4, 16)), leaf(draw.normal(2, 7, 2, 16)), *tables(2, 7, 16)),
        {"unsqueeze_dim": 2},
    )
    yield Sample("contiguous", (leaf(draw.normal(2, 3, 9, 32)), leaf(draw.normal(2, 1, 9, 32)), *tables(2, 9, 32)))
    yield Sample("pairs of 1", (leaf(heads(1, 3, 1, 2)), leaf(heads(1, 3, 1, 2)), *tables(1, 3, 2)))
    yield Sample("odd sizes", (leaf(heads(1, 1025, 1, 6)), leaf(heads(1, 1025, 3, 6)), *tables(1, 1025, 6)))
    yield Sample(
        "strided",
        (
            leaf(strided(draw.normal(2, 2, 4, 8))),
            leaf(strided(draw.normal(2, 1, 4, 8))),
            *(strided(table) for table in tables(2, 4, 8)),
        ),
    )
    # Nothing says that both halves of a table agree.
    yield Sample(
        "halves differ",
        (leaf(heads(2, 4, 2, 8)), leaf(heads(2, 4, 2, 8)), draw.normal(2, 4, 8), draw.normal(2, 4, 8)),
    )
    yield Sample(
        "float32 tables",
        (leaf(heads(2, 4, 2, 8)), leaf(heads(2, 4, 1, 8)), *tables(2, 4, 8, torch.promote_types(dtype, torch.float32))),
    )
    yield Sample("no tokens", (leaf(heads(2, 0, 2, 8)), leaf(heads(2, 0, 1, 8)), *tables(2, 0, 8)))


def _expanded(batch: int, *tables: torch.Tensor) -> list[torch.Tensor]:
    return [table.expand(batch, -1, -1) for table in tables]


CONTRACT = OpContract(
    op="rotary_pos_emb",
    variant="full",
    summary="rotary position embedding over the whole head, halves split",
    reference=rotary_pos_emb,
    samples=samples,
    # Two products and their sum, and the rounding of a gradient that passes through both.
    tolerances=tolerances(roundings=4, terms=2),
    aliases=("apply_rotary_pos_emb/full",),
)
