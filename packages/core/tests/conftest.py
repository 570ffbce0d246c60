import importlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opslot import Backend, KernelSpec, OpContract, OpSlot, Priority, Registry, Requires, Sample, Tolerance
from opslot._device import CORE_KINDS
from packaging.version import Version


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
    given = {"op": op, "name": name, "target": scale_fast, "deterministic": True, "priority": Priority.PORTABLE}
    return KernelSpec(**{**given, **fields})


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


class Site:
    """A folder of distributions as an installer leaves them, seen by fresh interpreters besides what is installed."""

    HEAD = """
        from opslot import *
        def reference(x): return x
        def samples(device, dtype, seed): return ()
        def contract(op): return OpContract(op=op, variant="standard", summary="", reference=reference,
                                            samples=samples, tolerances={})
        def kernel(op, name): return KernelSpec(op=op, name=name, target=reference, priority=Priority.PORTABLE)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir(exist_ok=True)

    def offering(self, contracts: str = "", kernels: str = "") -> str:
        """The source of a backend, given what stands in its two tuples."""
        return textwrap.dedent(self.HEAD) + f"BACKEND = Backend(api=1, contracts=({contracts}), kernels=({kernels}))\n"

    def add(
        self,
        distribution: str,
        source: str,
        *,
        entry: str = "",
        module: str = "",
        version: str = "1.0",
        folder: str = "",
        metadata: str = "",
    ) -> Path:
        """Write a distribution whose backend is `entry`, by default its own name; returns its metadata folder."""
        module = module or distribution.replace("-", "_")
        file = self.path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        info = self.path / (folder or f"{distribution.replace('-', '_')}-{version}.dist-info")
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{metadata}"
        (info / "METADATA").write_text(text, encoding="utf-8")
        if "License-File:" in metadata:
            (info / "licenses").mkdir()
            (info / "licenses" / re.search("License-File: (.*)", metadata)[1]).write_text("as is")
        (info / "entry_points.txt").write_text(f"[opslot.backends]\n{entry or distribution} = {module}:BACKEND\n")
        (info / "RECORD").write_text(f"{file.relative_to(self.path).as_posix()},,\n{info.name}/RECORD,,\n")
        return info

    def python(self, *arguments: str, code: int = 0, **environment: str) -> str:
        """What a fresh interpreter prints, both streams; it must exit with `code`."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OPSLOT_")}
        paths = os.pathsep.join(filter(None, [str(self.path), environment.pop("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture
def modeling() -> Callable[[str], ModuleType]:
    """The module of a model's classes in transformers, by the model's name."""
    transformers = pytest.importorskip("transformers", reason="the core does not depend on transformers")
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip(
            f"the contracts are those of transformers 5.24, {transformers.__version__} may compute another thing"
        )
    return lambda model: importlib.import_module(f"transformers.models.{model}.modeling_{model}")


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Equal bits in outputs, and in every gradient for one random incoming gradient."""

    def bits(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        assert mine.dtype == theirs.dtype, what
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")

    def check(ours: Any, theirs: Any, inputs: Sequence[torch.Tensor]) -> None:
        ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (ours, theirs))
        for number, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            bits(mine, yours, f"output {number}")
        incoming = [torch.randn_like(output) for output in ours]
        gradients = (torch.autograd.grad(outputs, inputs, incoming) for outputs in (ours, theirs))
        for number, (mine, yours) in enumerate(zip(*gradients, strict=True)):
            bits(mine, yours, f"the gradient of input {number}")

    return check


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")
