"""A kernel to judge: what it stands for, what it claims, where it runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .._contract import OpContract, Sample
from .._discovery import registry
from .._errors import KernelUnavailable
from .._kernel import KernelSpec
from .._target import check_kernel, load_target
from ._case import Case
from ._process import assert_process_unchanged

if TYPE_CHECKING:
    import torch

Kernel = Callable[..., Any]

# What a kernel may raise for what it does not support and did not claim. Anything else is a fault.
REFUSALS = (KernelUnavailable, NotImplementedError, RuntimeError, TypeError, ValueError)
# Samples of each contract that every check beyond the plain ones runs: the first are the ordinary ones.
FEW = 3


@dataclass(frozen=True)
class Subject:
    """One kernel for one contract, on one device in one dtype. `spec` holds its claims.

    `only` are the names of the samples to judge by, all when empty.
    """

    contract: OpContract
    name: str
    kernel: Kernel
    spec: KernelSpec
    device: torch.device
    dtype: torch.dtype
    only: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        op: str,
        variant: str,
        kernel: Kernel | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        only: Iterable[str] = (),
    ) -> Subject:
        """`kernel` is a function, which claims nothing but a backward, or the name of a registered kernel.

        Raises `OpslotError`s when there is no such kernel or it cannot run here, `ValueError` for a dtype that the
        contract has no tolerance for and for a sample that it does not have.
        """
        import torch

        known = registry()
        contract = known.contract(op, variant)
        if dtype not in contract.tolerances:
            valid = ", ".join(sorted(contract.tolerances))
            raise ValueError(f"{contract} has tolerances for {valid}, not for {dtype!r}")
        name = kernel if isinstance(kernel, str) else getattr(kernel, "__qualname__", repr(kernel))
        offer = known.choose(op, variant, name, known.describe(device)).offer if isinstance(kernel, str) else None
        if offer is not None:
            function, spec = known.load(offer), offer.spec
        else:
            function = contract.load_reference() if isinstance(kernel, str) else kernel
            check_kernel(function, contract.signature(), f"kernel {name} for {contract}")
            spec = KernelSpec(op=contract.op, variant=contract.variant, name="function", target=function)
        subject = cls(contract, name, function, spec, torch.device(device), getattr(torch, dtype))
        names = [sample.name for sample in subject.samples(0)] if only else []
        if unknown := sorted(set(only) - set(names)):
            raise ValueError(f"{contract} has no sample {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
        return replace(subject, only=frozenset(only))

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def samples(self, seed: int, dtype: torch.dtype | None = None) -> Iterator[Sample]:
        make = load_target(self.contract.samples, f"the samples of {self.contract}")
        found: Iterator[Sample] = make(self.device, dtype or self.dtype, seed)
        return (sample for sample in found if not self.only or sample.name in self.only)

    def refused(self, seed: int) -> Iterator[Sample]:
        """Arguments that the contract does not allow."""
        if self.contract.refused is not None:
            make = load_target(self.contract.refused, f"the refused samples of {self.contract}")
            yield from make(self.device, self.dtype, seed)

    def case(self, sample: Sample, seed: int) -> Case:
        where = (
            f"{self.contract}, kernel {self.name}, sample {sample.name!r} "
            f"({self.dtype_name} on {self.device}, seed {seed})"
        )
        return Case(
            contract=self.contract,
            reference=self.contract.load_reference(),
            kernel=self.kernel,
            sample=sample,
            tolerance=self.contract.tolerances[self.dtype_name],
            differentiable=self.spec.backward,
            where=where,
            seed=seed + zlib.crc32(sample.name.encode()) % 1000,
        )

    def cases(self, seed: int) -> Iterator[Case]:
        """One for each sample that the kernel takes. Raises `AssertionError` when it takes none, or changes one.

        A kernel may have limits beyond its spec, which it states by raising `KernelUnavailable`: nothing else will do.
        """
        taken, refusals = 0, []
        for sample in self.samples(seed):
            case = self.case(sample, seed)
            _ = case.before, case.exact, case.eager
            with case.noted():
                try:
                    with assert_process_unchanged(case):
                        # With gradients asked for, which a kernel may refuse of some arguments and not of others.
                        run = case.run()
                except KernelUnavailable as refusal:
                    refusals.append(f"{sample.name!r}: {refusal}")
                    continue
                # A first call of its shape, in which kernels tune, allocate and keep: it counts as any other.
                case.assert_outputs(run)
                case.assert_unchanged("forward")
            del run
            taken += 1
            yield case
        if not taken:
            why = f"the kernel refuses all: {'; '.join(refusals)}" if refusals else "the contract has no samples"
            raise AssertionError(f"{self.contract}, kernel {self.name} ({self.dtype_name}): nothing to judge by: {why}")
