"""rms_norm: root mean square normalisation, in the five orders of weight and casts that models use."""

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


def rms_norm_fp32_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension, multiplied by the weight before anything is rounded.

        y = (weight * x32 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)

    x is [..., H], any leading shape, zero rows too; weight is [H]. The output has x's dtype whatever the weight's is.

    Source: transformers 5.24.0, models/gpt_oss, GptOssRMSNorm.forward; the same in deepseek_v4, olmo2, olmo3, helium.
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(variance + eps)
    return (weight * x32).to(x.dtype)


def rms_norm_zero_centered(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension, whose weight is stored as its distance from one.

        y = ((1 + weight32) * x32 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)

    x is [..., H], any leading shape, zero rows too; weight is [H]. One is added in float32: in bfloat16 a weight of
    2 ** -9 or 15.8125 would lose its last bits. The output has x's dtype whatever the weight's is. muse_spark's
    MuseSparkTextCenteredRMSNorm adds one in the weight's own dtype, so it is not this variant.

    Source: transformers 5.24.0, models/qwen3_5, Qwen3_5RMSNorm.forward; the same in qwen3_next, gemma, gemma2, gemma3.
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(variance + eps)
    return (x32 * (1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32)))).to(x.dtype)


def rms_norm_unweighted(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension without a weight, whose factor is rounded first.

        y = x * (1 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)

    x is [..., H], any leading shape, zero rows too. The factor of a row is rounded to x's dtype, and the product again.
    hy_v4's HYV4UnweightedRMSNorm returns the factor alone, so it is not this variant.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4UnweightedRMSNorm.forward; the same in glm5_next.
    """
    import torch

    variance = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps).to(x.dtype)


def rms_norm_unweighted_fp32(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension without a weight, rounded once.

        y = (x32 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)

    x is [..., H], any leading shape, zero rows too.

    Source: transformers 5.24.0, models/nanochat, NanoChatRMSNorm.forward; the same in llama4 (Llama4TextL2Norm),
    hrm_text, falcon_mamba (FalconMambaWeightlessRMSNorm).
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    return (x32 * torch.rsqrt(variance + eps)).to(x.dtype)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    return _weighted(Draw(device, dtype, seed), centre=1)


def zero_centered_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield from _weighted(draw, centre=0)
    # Only these tell where one was added: around 1 a bfloat16 weight has bits that 1 + weight has no room for.
    yield Sample("weights near 0", (leaf(draw.normal(5, 64)), leaf(draw.normal(64, scale=2**-8)), 1e-6))
    yield Sample("weights near 15", (leaf(draw.normal(5, 64)), leaf(15 + draw.normal(64, scale=0.3)), 1e-6))


def _weighted(draw: Draw, *, centre: int) -> Iterator[Sample]:
    import torch

    wide = torch.promote_types(draw.dtype, torch.float32)
    weight = leaf(centre + draw.normal(64, scale=0.3))
    yield Sample("three dimensions", (leaf(draw.normal(2, 9, 64)), weight, 1e-6))
    yield Sample("per head", (leaf(draw.normal(2, 5, 3, 32)), leaf(centre + draw.normal(32, scale=0.3)), 1e-6))
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
    yield Sample("an eps that counts", (leaf(draw.normal(5, 64, scale=0.1)), weight, 0.05))
    yield Sample("a row of zeros", (leaf(_with_zeros(draw.normal(3, 64))), weight, 1e-6))
    yield Sample("long rows", (leaf(draw.normal(2, 2049)), leaf(draw.normal(2049)), 1e-6))
    yield Sample("no rows", (leaf(draw.normal(0, 64)), weight, 1e-6))


def unweighted_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield Sample("per head", (leaf(draw.normal(2, 5, 3, 32)), 1e-6))
    yield Sample("transposed", (leaf(draw.normal(2, 3, 5, 64).transpose(1, 2)), 1e-6))
    yield Sample("odd sizes", (leaf(draw.normal(3, 1025)), 1e-5))
    yield Sample("many rows", (leaf(draw.normal(1025, 3)), 1e-5))
    # eps decides here too: the gradient is the difference of two terms, dy * factor * eps / (x ** 2 + eps).
    yield Sample("row length 1", (leaf(draw.normal(1, 1)), 16.0))
    yield Sample("one row", (leaf(draw.normal(64)), 1e-6))
    yield Sample("strided", (leaf(strided(draw.normal(7, 64))), 1e-6))
    yield Sample("expanded", (leaf(draw.normal(1, 64).expand(6, 64)), 1e-6))
    yield Sample("tiny and huge rows", (leaf(draw.normal(4, 64) * _row_scales(draw)), 1e-6))
    yield Sample("an eps that counts", (leaf(draw.normal(5, 64, scale=0.1)), 0.05))
    yield Sample("a row of zeros", (leaf(_with_zeros(draw.normal(3, 64))), 1e-6))
    yield Sample("long rows", (leaf(draw.normal(2, 2049)), 1e-6))
    yield Sample("no rows", (leaf(draw.normal(0, 64)), 1e-6))


def _with_zeros(rows: torch.Tensor) -> torch.Tensor:
    rows[1] = 0
    return rows


def _row_scales(draw: Draw) -> torch.Tensor:
    import torch

    return torch.tensor([[1e-2], [1.0], [30.0], [1e3]], dtype=draw.dtype, device=draw.device)


def problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    return Sample("problem", (leaf(draw.normal(tokens, hidden)), leaf(1 + draw.normal(hidden, scale=0.3)), 1e-6))


def zero_centered_problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    return Sample("problem", (leaf(draw.normal(tokens, hidden)), leaf(draw.normal(hidden, scale=0.3)), 1e-6))


def unweighted_problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int
) -> Sample:
    return Sample("problem", (leaf(Draw(device, dtype, seed, in_place=True).normal(tokens, hidden)), 1e-6))


_LARGE = {"tokens": 2**20 + 3, "hidden": 2049}

CONTRACTS = (
    OpContract(
        op="rms_norm",
        variant="standard",
        summary="weight * (x / rms(x)), rounded to x's dtype before the weight multiplies it",
        reference=rms_norm,
        samples=samples,
        # Forward rounds the normalised x and the product, backward dy * weight and the result; the sums over a row
        # and, for the weight, over the rows are kept in float32.
        tolerances=tolerances(roundings=4, terms=2049),
        rows={"x": 0},
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-30b-a3b": {"tokens": 16384, "hidden": 2048},
                "llama3-8b": {"tokens": 8192, "hidden": 4096},
                "query heads": {"tokens": 16384 * 32, "hidden": 128},
                "wide": {"tokens": 16384, "hidden": 4096},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="rms_norm",
        variant="fp32_weight",
        summary="weight * x / rms(x), rounded to x's dtype at the end",
        reference=rms_norm_fp32_weight,
        samples=samples,
        # Only results are rounded to the dtype: y, and the two gradients, all from float32.
        tolerances=tolerances(roundings=1, terms=2049),
        rows={"x": 0},
        workload=Workload(
            problem=problem,
            shapes={
                "gpt-oss-120b": {"tokens": 16384, "hidden": 2880},
                "deepseek-v4-flash": {"tokens": 16384, "hidden": 4096},
                "olmo2-7b": {"tokens": 8192, "hidden": 4096},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="rms_norm",
        variant="zero_centered",
        summary="(1 + weight) * x / rms(x), rounded to x's dtype at the end",
        reference=rms_norm_zero_centered,
        samples=zero_centered_samples,
        # As for fp32_weight.
        tolerances=tolerances(roundings=1, terms=2049),
        aliases=("rms_norm/qwen3_5",),
        rows={"x": 0},
        workload=Workload(
            problem=zero_centered_problem,
            shapes={
                "qwen3-next-80b-a3b": {"tokens": 16384, "hidden": 2048},
                "gemma3-27b": {"tokens": 8192, "hidden": 5376},
                "query heads": {"tokens": 16384 * 16, "hidden": 256},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="rms_norm",
        variant="unweighted",
        summary="x / rms(x) without a weight, the factor rounded to x's dtype before it multiplies x",
        reference=rms_norm_unweighted,
        samples=unweighted_samples,
        # Forward rounds the factor and the product. Backward multiplies dy by the rounded factor and rounds again; the
        # factor's own gradient sums rounded products and is rounded, what it adds to x's gradient too, and so is the
        # sum of both.
        tolerances=tolerances(roundings=6, terms=2049),
        rows={"x": 0},
        workload=Workload(
            problem=unweighted_problem,
            shapes={
                "deepseek-v4-flash query heads": {"tokens": 8192 * 64, "hidden": 512},
                "deepseek-v4-flash streams": {"tokens": 8192, "hidden": 4 * 4096},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="rms_norm",
        variant="unweighted_fp32",
        summary="x / rms(x) without a weight, rounded to x's dtype at the end",
        reference=rms_norm_unweighted_fp32,
        samples=unweighted_samples,
        # y and its gradient are rounded once, from float32.
        tolerances=tolerances(roundings=1, terms=2049),
        rows={"x": 0},
        workload=Workload(
            problem=unweighted_problem,
            shapes={"llama4-scout query heads": {"tokens": 16384 * 40, "hidden": 128}},
            large=_LARGE,
        ),
    ),
)
