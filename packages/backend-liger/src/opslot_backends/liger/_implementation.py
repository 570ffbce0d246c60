"""Which of Liger's implementations runs: Triton, or what LIGER_KERNEL_IMPL put in its place when Liger was imported."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from liger_kernel import ops

# A replacement lives in liger_kernel.ops.NAME.ops or liger_kernel.ops.backends._NAME.ops; Triton's in liger_kernel.ops.
TRITON = "triton"


def implementation(function: Callable[..., Any]) -> str:
    """The implementation that a function of `liger_kernel.ops` comes from: "triton", "cutedsl", "cutile", "ascend"."""
    places = function.__module__.removeprefix("liger_kernel.ops.").split(".")
    if "ops" not in places:
        return TRITON
    return places[places.index("ops") - 1].removeprefix("_")


def chosen(op: str, module: str, names: tuple[str, ...], also: tuple[str, ...] = ()) -> tuple[str, tuple[Any, ...]]:
    """The implementation for `op`, and its functions: what LIGER_KERNEL_IMPL chose, when that is among `also`.

    `module` has Triton's, which are taken in the place of an implementation that was not verified. Liger does likewise
    where an implementation lacks an op; this one warns, and a binding's report names what runs.
    """
    found = tuple(getattr(ops, name) for name in names)
    name = implementation(found[0])
    if name in (TRITON, *also):
        return name, found
    warnings.warn(
        f"{op}: LIGER_KERNEL_IMPL chose liger's {name!r} implementation, which opslot-backend-liger was not verified "
        f"with for this op: it runs liger's Triton kernels",
        stacklevel=2,
    )
    triton = importlib.import_module(module)
    return TRITON, tuple(getattr(triton, name) for name in names)
