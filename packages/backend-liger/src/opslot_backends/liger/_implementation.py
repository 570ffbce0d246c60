"""Which of Liger's implementations runs: Triton, or what LIGER_KERNEL_IMPL put in its place when Liger was imported."""

from collections.abc import Callable
from typing import Any

from opslot import KernelUnavailable

# A replacement lives in liger_kernel.ops.NAME.ops or liger_kernel.ops.backends._NAME.ops; Triton's in liger_kernel.ops.
_TRITON = "triton"


def implementation(function: Callable[..., Any]) -> str:
    """The implementation that a function of `liger_kernel.ops` comes from: "triton", "cutedsl", "cutile", "ascend"."""
    places = function.__module__.removeprefix("liger_kernel.ops.").split(".")
    if "ops" not in places:
        return _TRITON
    return places[places.index("ops") - 1].removeprefix("_")


def require(function: Callable[..., Any], op: str, verified: tuple[str, ...]) -> str:
    """The implementation of `function`, refused unless it is one that this package was verified with for `op`."""
    found = implementation(function)
    if found not in verified:
        raise KernelUnavailable(
            f"{op}: LIGER_KERNEL_IMPL chose liger's {found!r} implementation, and opslot-backend-liger is verified "
            f"with {' and '.join(verified)} for this op. Unset LIGER_KERNEL_IMPL before liger is imported, or choose "
            f"{op.partition('/')[0]}: eager"
        )
    return found
