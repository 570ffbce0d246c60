"""Sequences packed into one: where each begins and ends."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def segments(op: str, cu_seqlens: torch.Tensor, batch: int, tokens: int) -> list[tuple[int, int]]:
    """Start and end of every sequence, some of which may be empty. Raises where they do not cover all tokens."""
    if batch != 1:
        raise ValueError(
            f"{op}: packed sequences lie in a batch of 1, got cu_seqlens and a batch of {batch}; flatten the batch, or "
            "leave cu_seqlens out"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"{op}: cu_seqlens must be [N + 1] integers, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(f"{op}: cu_seqlens must begin with 0, never fall and end with {tokens} tokens, got {ends}")
    return list(pairwise(ends))
