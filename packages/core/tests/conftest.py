from collections.abc import Callable

import pytest
import torch
from opslot import Backend, KernelSpec, OpContract, OpSlot, Priority, Registry, Requires, Sample, Tolerance
from opslot._device import CORE_KINDS


def scale(x: torch.Tensor, weight: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """x * weight * factor"""
    return x * weight * factor


def scale_fast(x: torch.Tensor, weight: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * (weight * factor)


def samples(device: str, dtype: torch.dtype, seed: int) -> list[Sample]:
    return [Sample("ones", (torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)))]


def contract(op: str = "scale", variant: str = "standard", **fields: object) -> OpContract:
    return OpContract(
        op=op,
        variant=variant,
        summary="scales",
        reference=scale,
        samples=samples,
        tolerances={"float32": Tolerance(1e-6, 1e-6)},
        **fields,
    )


def kernel(name: str = "fast", op: str = "scale", **fields: object) -> KernelSpec:
    return KernelSpec(**{"op": op, "name": name, "target": scale_fast, "priority": Priority.PORTABLE, **fields})


@pytest.fixture
def make_contract() -> Callable[..., OpContract]:
    return contract


@pytest.fixture
def make_kernel() -> Callable[..., KernelSpec]:
    return kernel


@pytest.fixture
def known() -> Registry:
    """Two variants of one op; kernels that are usable, need CUDA, are chosen only by name, or take bfloat16 alone."""
    registry = Registry()
    core = Backend(
        api=1,
        contracts=(
            contract(aliases=("rescale/standard",), fields=("scaling",), prefix="fused_", activation=torch.nn.ReLU()),
            contract(variant="other"),
        ),
        device_kinds=CORE_KINDS,
    )
    registry.add(core, "opslot", "1.0")
    kernels = (
        kernel("fast", aliases=("fast_kernel",)),
        kernel("cuda", requires=Requires(devices=("cuda",), archs=("sm_90..",)), priority=Priority.NATIVE),
        kernel("slow", priority=Priority.BY_NAME),
        kernel("half", dtypes=("bfloat16",), priority=Priority.TUNED),
    )
    registry.add(Backend(api=1, kernels=kernels), "acme", "2.0")
    return registry


class Scale(torch.nn.Module):
    scale_op = OpSlot("scale", "standard", activation="act")

    def __init__(self, act: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.act = act or torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.scale_op.kernel
        if kernel is not None:
            return kernel(x, self.weight)
        return scale(x, self.weight)


@pytest.fixture
def scale_class() -> type[torch.nn.Module]:
    return Scale
