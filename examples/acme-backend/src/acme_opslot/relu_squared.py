"""The contract of relu_squared/standard: an op that opslot does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from opslot import OpContract, Sample, Tolerance

if TYPE_CHECKING:
    import torch


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2, elementwise, in the dtype of x [...] (Primer, arXiv:2109.08668)."""
    import torch

    return torch.relu(x).square()


def samples(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    yield Sample("matrix", (normal(5, 33).requires_grad_(),))
    yield Sample("transposed", (normal(33, 5).T.requires_grad_(),))
    yield Sample("empty", (normal(0, 7).requires_grad_(),))


RELU_SQUARED = OpContract(
    op="relu_squared",
    variant="standard",
    summary="relu(x)^2",
    reference=relu_squared,
    samples=samples,
    # One multiplication, rounded once; its gradient is two. Twice the unit roundoff of each dtype.
    tolerances={
        "float64": Tolerance(rtol=2.3e-16 * 2, atol=0),
        "float32": Tolerance(rtol=1.2e-7 * 2, atol=0),
        "bfloat16": Tolerance(rtol=7.9e-3 * 2, atol=0),
    },
)
