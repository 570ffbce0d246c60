"""The conformance kit as pytest tests, and as one call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeGuard
from unittest import SkipTest

from .._discovery import registry
from .._distributions import normal
from .._errors import UnknownKernel
from .._kernel import EAGER, KernelSpec
from .._registry import Offer
from ._checks import CHECKS
from ._subject import Subject

Kernel = Callable[..., Any]

# What `check` does unless told otherwise: seconds, where all of them take a minute.
QUICK = ("values", "arguments", "gradients", "frozen", "no_grad", "twice")
# What takes 100 GB is done when it is named.
ALL = tuple(name for name in CHECKS if name != "large")
# float64 is what the reference is run in; kernels are for these.
_DTYPES = ("float32", "bfloat16", "float16")


def check(
    op: str,
    variant: str,
    kernel: Kernel | str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    checks: Sequence[str] = QUICK,
    samples: Sequence[str] = (),
) -> None:
    """Raise `AssertionError` unless `kernel` does what the contract of `op/variant` says, on every sample of it.

    `kernel` is a function or the name of a registered kernel. Outputs and all gradients, for random incoming gradients
    in several layouts, must be within the contract's tolerance of the reference run in float64 on the CPU. Outputs must
    have the dtype and shape that the reference gives for the same inputs, and must not share memory with an input.
    Arguments and incoming gradients must come out bit for bit as they went in. Gradients must exist exactly where they
    are asked for, also when other inputs are frozen, and a second backward must give the same again.

    `checks` are names of `opslot.testing.CHECKS`, whose docstrings say what each asks for, `samples` names of the
    contract's samples, all when empty: Triton's interpreter takes minutes for a thousand rows. Raises `ValueError` for
    others, and whatever the kernel raises, with a note of the sample that made it.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ValueError(f"unknown checks {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    for name in checks:
        CHECKS[name](Subject.of(op, variant, kernel, device=device, dtype=dtype, only=samples), seed)


class KernelSuite:
    """Every check of the kit as a test, for the kernels of a backend or for one function.

        from opslot.testing import KernelSuite

        class TestAcme(KernelSuite):
            backend = "acme"

    `backend`: the backend's or its distribution's name: all its kernels. Or `op`, `variant` and `kernel`: a registered
    name or a function. `devices` are those to run on; one that is not there, or that a kernel's spec excludes, is
    skipped with the reason. `dtypes`, empty: those of the kernel's spec, by default float32, bfloat16 and float16.
    `checks`: all of `opslot.testing.CHECKS` but "large", which takes most of a GPU's memory. `seconds` is the
    time limit of one check.
    """

    backend: ClassVar[str] = ""
    op: ClassVar[str] = ""
    variant: ClassVar[str] = "standard"
    kernel: ClassVar[Kernel | str | None] = None
    devices: ClassVar[Sequence[Any]] = ("cpu",)
    dtypes: ClassVar[Sequence[str]] = ()
    checks: ClassVar[Sequence[str]] = ALL
    seconds: ClassVar[float] = 300
    seed: ClassVar[int] = 0

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "conformance" not in metafunc.fixturenames:
            return
        found = [
            (op, variant, kernel, dtype, name)
            for op, variant, kernel, spec in self._kernels()
            for dtype in self.dtypes or dtypes_of(op, variant, spec)
            for name in self.checks
        ]
        ids = [f"{op}/{variant}:{_name(kernel)}-{dtype}-{name}" for op, variant, kernel, dtype, name in found]
        metafunc.parametrize("conformance", found, ids=ids)
        metafunc.parametrize("device", self.devices)

    def test_kernel(self, conformance: tuple[str, str, Kernel | str, str, str], device: str) -> None:
        op, variant, kernel, dtype, name = conformance
        known = registry()
        unmet: tuple[str, ...] = (absent(device),) if absent(device) else ()
        if not unmet and _is_offered(kernel):
            unmet = known.offer(op, variant, kernel).spec.unmet(known.describe(device))
        if unmet:  # unittest's, which pytest takes as its own
            raise SkipTest(f"{_name(kernel)} on {device}: {'; '.join(unmet)}")
        with time_limit(self.seconds, f"check {name!r} of {op}/{variant}:{_name(kernel)}"):
            check(op, variant, kernel, device=device, dtype=dtype, seed=self.seed, checks=(name,))

    def _kernels(self) -> Iterator[tuple[str, str, Kernel | str, KernelSpec | None]]:
        if self.backend:
            for offer in offers_of(self.backend):
                yield offer.spec.op, offer.spec.variant, offer.selector, offer.spec
            return
        kernel = vars(type(self)).get("kernel", type(self).kernel)  # a plain function would become a method
        kernel = kernel.__func__ if isinstance(kernel, staticmethod) else kernel
        if not self.op or kernel is None:
            raise ValueError(f"{type(self).__name__}: set backend, or op and kernel")
        spec = registry().offer(self.op, self.variant, kernel).spec if _is_offered(kernel) else None
        yield self.op, self.variant, kernel, spec


def offers_of(name: str) -> list[Offer]:
    """Every kernel of the backend, or of the distribution, called `name`. Raises `UnknownKernel` when it has none."""
    known = registry()
    owners = {r.distribution for r in known.records if normal(name) in (normal(r.name), normal(r.distribution))}
    offers = [offer for contract in known.contracts() for offer in known.offers(*contract.key)]
    found = [offer for offer in offers if offer.distribution in owners]
    if not found:
        raise UnknownKernel(f"no kernel of a backend {name!r}{known.missing()}")
    return found


def dtypes_of(op: str, variant: str, spec: KernelSpec | None) -> tuple[str, ...]:
    wanted = (spec.dtypes if spec is not None else ()) or _DTYPES
    return tuple(dtype for dtype in wanted if dtype in registry().contract(op, variant).tolerances)


def absent(device: str) -> str:
    """Why there is no such device; empty when there is."""
    import torch

    from .._device import is_present

    return "" if is_present(torch.device(device)) else "there is no such device"


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise `TimeoutError` after `seconds`, where signals allow: in the main thread, not inside a library's call."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"{what} takes more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_offered(kernel: Kernel | str) -> TypeGuard[str]:
    return isinstance(kernel, str) and kernel != EAGER


def _name(kernel: Kernel | str) -> str:
    return kernel if isinstance(kernel, str) else getattr(kernel, "__qualname__", type(kernel).__name__)
