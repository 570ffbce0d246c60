"""rms_norm_gated: root mean square normalisation of what a gate then lets through, as linear attention ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """Normalise x over the last dimension, then multiply by the weight, then by the activated gate.

        normal = (x32 / sqrt(mean(x32 ** 2) + eps)).to(x.dtype)
        y = (weight * normal * act(gate32)).to(x.dtype)

    x and gate are [..., H], any leading shape, zero rows too; weight is [H]. The gate does not enter the mean: layers
    that gate first (Mamba2 and what follows it) compute another function. The product with the weight is rounded as
    type promotion says, the one with the gate is float32. `activation` is "silu" (or "swish", the same) or "sigmoid";
    others are refused with a ValueError.

    Source: transformers 5.24.0, models/qwen3_next, Qwen3NextRMSNormGated.forward; the same in qwen3_5, olmo_hybrid and
    qwen4_exp.
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(variance + eps)
    weighted = weight * x32.to(x.dtype)
    return (weighted * _activated(gate, activation)).to(x.dtype)


def rms_norm_gated_fp32_weight(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """Normalise x over the last dimension, then multiply by the weight, then by the activated gate, rounding once.

        y = (weight32 * x32 / sqrt(mean(x32 ** 2) + eps) * act(gate32)).to(x.dtype)

    Shapes, and what `activation` may be, are those of `rms_norm_gated/standard`.

    Source: transformers 5.24.0, models/kimi_linear, KimiLinearRMSNormGated.forward; the same in bailing_hybrid and
    glm5_next (all with "sigmoid") and lara_mini ("silu").
    """
    import torch

    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = x32.pow(2).mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(variance + eps)
    weighted = weight.to(torch.promote_types(weight.dtype, torch.float32)) * x32
    return (weighted * _activated(gate, activation)).to(x.dtype)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    import torch

    gate32 = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation in ("silu", "swish"):
        return torch.nn.functional.silu(gate32)
    if activation == "sigmoid":
        return torch.sigmoid(gate32)
    raise ValueError(f"rms_norm_gated: activation must be silu, swish (the same) or sigmoid, got {activation!r}")


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)
    weight = leaf(1 + draw.normal(64, scale=0.3))

    def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return leaf(draw.normal(*shape)), leaf(draw.normal(*shape, scale=2))

    yield Sample("heads as rows", (*rows(14, 64), weight, 1e-6, "silu"))
    yield Sample("four dimensions", (*rows(2, 5, 3, 64), weight, 1e-6, "swish"))
    yield Sample("sigmoid", (*rows(2, 7, 64), weight, 1e-6, "sigmoid"))
    yield Sample("odd sizes", (*rows(3, 1025), leaf(draw.normal(1025)), 1e-5, "silu"))
    yield Sample("many rows", (*rows(1025, 3), leaf(draw.normal(3)), 1e-5, "sigmoid"))
    # eps decides: with a tiny one a row of length 1 is a sign, whose gradient is nothing but rounding.
    yield Sample("row length 1", (*rows(1, 1), leaf(draw.normal(1)), 0.5, "silu"))
    yield Sample("one row", (*rows(64), weight, 1e-6, "silu"))
    # x from a transpose, and the gate as a slice of a wider projection.
    x, wider = draw.normal(2, 3, 5, 64).transpose(1, 2), draw.normal(2, 5, 3, 128)
    yield Sample("transposed x, sliced gate", (leaf(x), leaf(wider[..., 64:]), weight, 1e-6, "silu"))
    x, gate, narrow = strided(draw.normal(7, 64)), strided(draw.normal(7, 64)), strided(draw.normal(64))
    yield Sample("strided", (leaf(x), leaf(gate), leaf(narrow), 1e-6, "silu"))
    x, gate, narrow = draw.normal(1, 64).expand(6, 64), draw.normal(6, 1).expand(6, 64), draw.normal(1).expand(64)
    yield Sample("expanded", (leaf(x), leaf(gate), leaf(narrow), 1e-6, "silu"))
    yield Sample("saturated gate", (leaf(draw.normal(4, 64)), leaf(draw.normal(4, 64, scale=30)), weight, 1e-6, "silu"))
    yield Sample("float32 weight", (*rows(6, 64), leaf(draw.normal(64, dtype=wide)), 1e-6, "silu"))
    x, gate = draw.normal(6, 64), draw.normal(6, 64, dtype=wide)
    yield Sample("float32 gate", (leaf(x), leaf(gate), weight, 1e-6, "silu"))
    yield Sample("no rows", (*rows(0, 64), weight, 1e-6, "silu"))


def problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    return _problem(Draw(device, dtype, seed, in_place=True), tokens, hidden, "silu")


def sigmoid_problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    return _problem(Draw(device, dtype, seed, in_place=True), tokens, hidden, "sigmoid")


def _problem(draw: Draw, tokens: int, hidden: int, activation: str) -> Sample:
    x, gate, weight = draw.normal(tokens, hidden), draw.normal(tokens, hidden), 1 + draw.normal(hidden, scale=0.3)
    return Sample("problem", (leaf(x), leaf(gate), leaf(weight), 1e-6, activation))


_LARGE = {"tokens": 2**20 + 3, "hidden": 2049}


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield Sample("another activation", (draw.normal(3, 8), draw.normal(3, 8), draw.normal(8), 1e-6, "gelu"))


CONTRACTS = (
    OpContract(
        op="rms_norm_gated",
        variant="standard",
        summary="weight * (x / rms(x)), rounded to x's dtype before the weight multiplies it, times act(gate)",
        reference=rms_norm_gated,
        samples=samples,
        refused=refused,
        # The weight's gradient sees most: the normalised x is rounded, what comes back through the gate, their product
        # and the sum. The fifth is for the product with the weight, by which the gate's gradient is multiplied. silu's
        # derivative cancels as in glu/swiglu, within what a sum of 1025 terms may lose.
        tolerances=tolerances(roundings=5, terms=1025),
        rows={"x": 0, "gate": 0},
        workload=Workload(
            problem=problem,
            # Every value head of every token is a row.
            shapes={"qwen3-next-80b-a3b": {"tokens": 16384 * 32, "hidden": 128}},
            large=_LARGE,
        ),
    ),
    OpContract(
        op="rms_norm_gated",
        variant="fp32_weight",
        summary="weight * x / rms(x) * act(gate), rounded to x's dtype at the end",
        reference=rms_norm_gated_fp32_weight,
        samples=samples,
        refused=refused,
        # y and the three gradients are rounded once, from float32.
        tolerances=tolerances(roundings=1, terms=1025),
        rows={"x": 0, "gate": 0},
        workload=Workload(
            problem=sigmoid_problem,
            shapes={"kimi-linear-48b-a3b": {"tokens": 16384 * 32, "hidden": 128}},
            large=_LARGE,
        ),
    ),
)
