"""glu: the gated activation between the projections of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
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


def geglu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, elementwise, gelu in its tanh form; gate and up have one shape, [..., I].

        gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))

    The exact gelu, by the error function, differs by up to 5e-4: it is another variant.

    Source: transformers 5.24.0, models/gemma2, Gemma2MLP.forward, with hidden_activation="gelu_pytorch_tanh"; the same
    in gemma and gemma3.
    """
    return gelu_tanh(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.gelu(x, approximate="tanh")


def swiglu_clamped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up, elementwise, with both clamped first; gate and up have one shape, [..., I].

        y = silu(min(gate, limit)) * max(-limit, min(up, limit))

    The gate has no lower bound. Where a value is clamped its gradient is zero; on the limit itself it passes. A limit
    that the dtype cannot hold is rounded to it. `limit` is a number greater than zero: anything else is refused with
    a ValueError. step3p7's Step3p7MLP clamps after the activation, minimax_m3_vl and gpt_oss add one to `up` and scale
    within the sigmoid, so those are not this variant.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4MLP.forward, with hidden_act="silu"; the same in
    glm5_next.
    """
    import torch

    if not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(f"glu/swiglu_clamped: limit must be a number greater than zero, got {limit!r}")
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    for name, gate, up in _pairs(Draw(device, dtype, seed)):
        yield Sample(name, (leaf(gate), leaf(up)))


def clamped_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    # Limits are such as every dtype holds.
    draw = Draw(device, dtype, seed)
    for name, gate, up in _pairs(draw):
        yield Sample(name, (leaf(gate), leaf(up), 1.5))
    yield Sample("deepseek's limit", (leaf(draw.normal(6, 32, scale=10)), leaf(draw.normal(6, 32, scale=10)), 10.0))
    yield Sample("nothing clamped", (leaf(draw.normal(6, 32)), leaf(draw.normal(6, 32)), 64.0))
    # Some values are the limit itself, whose gradient a strict comparison would drop. They are rounded to whole ones.
    gate, up = (draw.normal(9, 32, scale=2).round() for _ in range(2))
    yield Sample("on the limit", (leaf(gate), leaf(up), 2.0))


def _pairs(draw: Draw) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "three dimensions", draw.normal(2, 5, 48, scale=2), draw.normal(2, 5, 48)
    yield "odd sizes", draw.normal(3, 1025, scale=2), draw.normal(3, 1025)
    yield "one element", draw.normal(1, 1), draw.normal(1, 1)
    # The two halves of one merged projection, as Phi3 and fused gate_up layers give them.
    gate, up = draw.normal(6, 34).chunk(2, dim=-1)
    yield "halves of one tensor", gate, up
    yield "strided", strided(draw.normal(4, 16)), strided(draw.normal(4, 16))
    yield "transposed", draw.normal(16, 5).t(), draw.normal(5, 16)
    yield "expanded", draw.normal(1, 16).expand(5, 16), draw.normal(5, 1).expand(5, 16)
    yield "saturated", draw.normal(4, 16, scale=30), draw.normal(4, 16)
    # Beyond what exp holds in float32.
    yield "far out", draw.normal(4, 16).sign() * 120, draw.normal(4, 16)
    yield "no rows", draw.normal(0, 16), draw.normal(0, 16)


def problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, intermediate: int) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    return Sample("problem", (leaf(draw.normal(tokens, intermediate)), leaf(draw.normal(tokens, intermediate))))


def clamped_problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, intermediate: int
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    # Wide enough that the limit is met.
    gate, up = (draw.normal(tokens, intermediate, scale=5) for _ in range(2))
    return Sample("problem", (leaf(gate), leaf(up), 10.0))


_LARGE = {"tokens": 2**20 + 3, "intermediate": 2049}

# Forward rounds the activation and the product, backward the product, the derivative of the activation and the result.
# That derivative multiplies by gate what cancels, 1 - sigmoid(gate) or 1 - tanh(..) ** 2: up to 100 roundings in
# float32, as a sum of 1025 terms has.
_TOLERANCES = tolerances(roundings=4, terms=1025)


def refused_clamped(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield Sample("a limit of zero", (draw.normal(3, 8), draw.normal(3, 8), 0.0))


CONTRACTS = (
    OpContract(
        op="glu",
        variant="swiglu",
        summary="silu(gate) * up",
        reference=glu,
        samples=samples,
        tolerances=_TOLERANCES,
        aliases=("swiglu_mlp/standard",),
        activation="torch.nn.functional:silu",
        rows={"gate": 0, "up": 0},
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-8b": {"tokens": 16384, "intermediate": 12288},
                "llama3-8b": {"tokens": 8192, "intermediate": 14336},
                "deepseek-v3 dense": {"tokens": 8192, "intermediate": 18432},
                "qwen3-30b-a3b experts": {"tokens": 8192 * 8, "intermediate": 768},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="glu",
        variant="geglu_tanh",
        summary="gelu(gate) * up, gelu in its tanh form",
        reference=geglu_tanh,
        samples=samples,
        tolerances=_TOLERANCES,
        activation="opslot.ops.glu:gelu_tanh",
        rows={"gate": 0, "up": 0},
        workload=Workload(
            problem=problem,
            shapes={
                "gemma2-2b": {"tokens": 16384, "intermediate": 9216},
                "gemma2-9b": {"tokens": 8192, "intermediate": 14336},
                "gemma3-27b": {"tokens": 8192, "intermediate": 21504},
            },
            large=_LARGE,
        ),
    ),
    OpContract(
        op="glu",
        variant="swiglu_clamped",
        summary="silu(min(gate, limit)) * clamp(up, -limit, limit)",
        reference=swiglu_clamped,
        samples=clamped_samples,
        refused=refused_clamped,
        tolerances=_TOLERANCES,
        activation="torch.nn.functional:silu",
        rows={"gate": 0, "up": 0},
        workload=Workload(
            problem=clamped_problem,
            shapes={
                "deepseek-v4-flash shared expert": {"tokens": 16384, "intermediate": 2048},
                "glm-5.3-flash dense": {"tokens": 16384, "intermediate": 12288},
            },
            large=_LARGE,
        ),
    ),
)
