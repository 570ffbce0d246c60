"""rms_norm/standard: the RMSNorm of Llama, Qwen2, Qwen3, Mistral, DeepSeek V3 and most others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension, in Llama's order of casts.

        y = weight * (x32 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)

    x is [..., H], any leading shape, zero rows too; weight is [H]. The normalised x is rounded to its own dtype before
    the weight multiplies it, so float32 weights with half x give float32, as type promotion says.

    Source: transformers 5.24.0, models/qwen3_moe, Qwen3MoeRMSNorm.forward.
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(variance + eps)
    return weight * x32.to(x.dtype)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)
    weight = leaf(1 + draw.normal(64, scale=0.3))
    yield Sample("three dimensions", (leaf(draw.normal(2, 9, 64)), weight, 1e-6))
    yield Sample("per head", (leaf(draw.normal(2, 5, 3, 32)), leaf(1 + draw.normal(32, scale=0.3)), 1e-6))
    # A transposed view of [B, heads, S, D], as q_norm after a transpose would see it.
    yield Sample("transposed", (leaf(draw.normal(2, 3, 5, 64).transpose(1, 2)), weight, 1e-6))
    yield Sample("odd sizes", (leaf(draw.normal(3, 1025)), leaf(draw.normal(1025)), 1e-5))
    yield Sample("many rows", (leaf(draw.normal(1025, 3)), leaf(draw.normal(3)), 1e-5))
    # eps decides: with a tiny one a row of length 1 is a sign, whose gradient is nothing but rounding.
    yield Sample("row length 1", (leaf(draw.normal(1, 1)), leaf(draw.normal(1)), 0.5))
    yield Sample("one row", (leaf(draw.normal(64)), weight, 1e-6))
    yield Sample("strided", (leaf(strided(draw.normal(7, 64))), leaf(strided(draw.normal(64))), 1e-6))
    yield Sample("expanded", (leaf(draw.normal(1, 64).expand(6, 64)), leaf(draw.normal(1).expand(64)), 1e-6))
    yield Sample("tiny and huge rows", (leaf(draw.normal(4, 64) * _row_scales(draw)), weight, 1e-6))
    yield Sample("float32 weight", (leaf(draw.normal(6, 64)), leaf(draw.normal(64, dtype=wide)), 1e-6))
    yield Sample("no rows", (leaf(draw.normal(0, 64)), weight, 1e-6))


def _row_scales(draw: Draw) -> torch.Tensor:
    import torch

    return torch.tensor([[1e-2], [1.0], [30.0], [1e3]], dtype=draw.dtype, device=draw.device)


def problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    return Sample("problem", (leaf(draw.normal(tokens, hidden)), leaf(1 + draw.normal(hidden, scale=0.3)), 1e-6))


CONTRACT = OpContract(
    op="rms_norm",
    variant="standard",
    summary="weight * (x / rms(x)), rounded to x's dtype before the weight multiplies it",
    reference=rms_norm,
    samples=samples,
    # Forward rounds the normalised x and the product, backward dy * weight and the result; the sums over a row and,
    # for the weight, over the rows are kept in float32.
    tolerances=tolerances(roundings=4, terms=1025),
    rows={"x": 0},
    workload=Workload(
        problem=problem,
        shapes={
            "qwen3-30b-a3b": {"tokens": 16384, "hidden": 2048},
            "llama3-8b": {"tokens": 8192, "hidden": 4096},
            "query heads": {"tokens": 16384 * 32, "hidden": 128},
        },
        large={"tokens": 2**20 + 3, "hidden": 2049},
    ),
)
