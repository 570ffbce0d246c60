"""glu/swiglu: the gated activation between the projections of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise; gate and up have one shape, [..., I].

    The projections stay in the model, so adapters and quantised layers keep working. `glu/swiglu` applies SiLU and
    nothing else: a model with another activation has another variant.

    Source: transformers 5.24.0, models/qwen3_moe, Qwen3MoeMLP.forward, with hidden_act="silu".
    """
    import torch

    return torch.nn.functional.silu(gate) * up


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield Sample("three dimensions", (leaf(draw.normal(2, 5, 48, scale=2)), leaf(draw.normal(2, 5, 48))))
    yield Sample("odd sizes", (leaf(draw.normal(3, 1025, scale=2)), leaf(draw.normal(3, 1025))))
    yield Sample("one element", (leaf(draw.normal(1, 1)), leaf(draw.normal(1, 1))))
    # The two halves of one merged projection, as Phi3 and fused gate_up layers give them.
    gate, up = draw.normal(6, 34).chunk(2, dim=-1)
    yield Sample("halves of one tensor", (leaf(gate), leaf(up)))
    yield Sample("strided", (leaf(strided(draw.normal(4, 16))), leaf(strided(draw.normal(4, 16)))))
    yield Sample("transposed", (leaf(draw.normal(16, 5).t()), leaf(draw.normal(5, 16))))
    yield Sample("expanded", (leaf(draw.normal(1, 16).expand(5, 16)), leaf(draw.normal(5, 1).expand(5, 16))))
    yield Sample("saturated", (leaf(draw.normal(4, 16, scale=30)), leaf(draw.normal(4, 16))))
    yield Sample("no rows", (leaf(draw.normal(0, 16)), leaf(draw.normal(0, 16))))


CONTRACT = OpContract(
    op="glu",
    variant="swiglu",
    summary="silu(gate) * up",
    reference=glu,
    samples=samples,
    # Forward rounds silu and the product, backward the product, the derivative of silu and the result. That derivative
    # multiplies 1 - sigmoid(gate), which cancels, by gate: up to 100 roundings in float32, as a sum of 1025 terms has.
    tolerances=tolerances(roundings=4, terms=1025),
    aliases=("swiglu_mlp/standard",),
    activation="torch.nn.functional:silu",
)
