"""One kernel on one sample: what it gave, and how that differs from the contract's reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from .._contract import OpContract, Sample, Tolerance
from .._target import _Note
from ._layouts import LAYOUTS

if TYPE_CHECKING:
    import torch

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """What one call gave: its outputs, and by name the tensors that were passed and those to differentiate."""

    outputs: tuple[Any, ...]
    passed: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]

    def gradients(self, incoming: Sequence[torch.Tensor | None], **options: Any) -> dict[str, torch.Tensor | None]:
        """By name, for one incoming gradient an output; None leaves that output out."""
        import torch

        pairs = [(o, g) for o, g in zip(self.outputs, incoming, strict=True) if g is not None and o.requires_grad]
        options = {"retain_graph": True, "allow_unused": True, **options}
        outputs, given = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        found = torch.autograd.grad(outputs, list(self.leaves.values()), given, **options)
        return dict(zip(self.leaves, found, strict=True))


@dataclass(frozen=True)
class Case:
    """`differentiable` is whether the kernel claims a backward; `where` names the case in errors."""

    contract: OpContract
    reference: Kernel
    kernel: Kernel
    sample: Sample
    tolerance: Tolerance
    differentiable: bool
    where: str
    seed: int

    def noted(self) -> AbstractContextManager[None]:
        """Whatever is raised inside says in a note which case it was."""
        return _Note(f"while checking {self.where}")

    @cached_property
    def given(self) -> dict[str, torch.Tensor]:
        return named(self._arguments())

    @cached_property
    def before(self) -> dict[str, torch.Tensor]:
        """The memory behind the arguments, to be taken before the kernel sees them."""
        return {name: bytes_of(tensor) for name, tensor in self.given.items()}

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.given.items() if tensor.requires_grad)

    @cached_property
    def exact(self) -> Run:
        """The reference in float64 on the CPU."""
        return self.run(self.reference, convert=exactly)

    @cached_property
    def eager(self) -> Run:
        """The reference as a model would run it, in the dtype and on the device of the sample."""
        return self.run(self.reference)

    @property
    def has_gradients(self) -> bool:
        """Whether there is a gradient to speak of: the reference gives one, and the kernel claims one."""
        return self.differentiable and any(is_tensor(o) and o.requires_grad for o in self.eager.outputs)

    def run(
        self,
        function: Kernel | None = None,
        leaves: Iterable[str] | None = None,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Run:
        """Call the kernel, or `function`, with fresh tensors over the sample's own memory.

        Of these `leaves` require a gradient: by default those of the sample, none for a kernel without a backward.
        """
        wanted = self.leaves if function is not None or self.differentiable else ()
        wanted = wanted if leaves is None else tuple(leaves)
        fresh: dict[int, torch.Tensor] = {}
        for name, tensor in self.given.items():
            plain = tensor.detach() if convert is None else convert(tensor.detach())
            fresh[id(tensor)] = plain.requires_grad_(name in wanted)
        return self.call(function or self.kernel, fresh, wanted)

    def call(self, function: Kernel, tensors: Mapping[int, torch.Tensor], leaves: Iterable[str]) -> Run:
        """`function` with `tensors` in the place of the sample's own, which the keys are the ids of."""
        result = function(*replace(self.sample.args, tensors), **replace(dict(self.sample.kwargs), tensors))
        passed = {name: tensors[id(tensor)] for name, tensor in self.given.items()}
        outputs = result if isinstance(result, tuple) else (result,)
        return Run(outputs, passed, {name: passed[name] for name in leaves})

    def without_gradients(self, function: Kernel | None = None) -> Run:
        import torch

        with torch.no_grad():
            return self.run(function, leaves=())

    def incoming(self, outputs: Sequence[Any]) -> Iterator[tuple[str, list[torch.Tensor | None]]]:
        """Incoming gradients in every layout, then for each of several outputs alone."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)

        def random(like: torch.Tensor, *shape: int) -> torch.Tensor:
            # Never constant, or a kernel that reads one element of it for all would pass; and away from zero, so that a
            # scalar's is always large enough to see an error by.
            sign = torch.randint(2, shape, generator=generator) * 2 - 1
            return ((0.5 + torch.rand(shape, generator=generator)) * sign).to(like)

        wanted = [o if is_tensor(o) and o.is_floating_point() else None for o in outputs]
        dense = [None if o is None else random(o, *o.shape) for o in wanted]
        yield "random", dense
        for name in ("strided", "transposed", "offset"):
            yield name, [None if g is None else LAYOUTS[name](g) for g in dense]
        yield "expanded from a scalar", [None if o is None else random(o).expand(o.shape) for o in wanted]
        if sum(gradient is not None for gradient in dense) > 1:
            for place, gradient in enumerate(dense):
                if gradient is not None:
                    yield f"of output {place} alone", [gradient if i == place else None for i in range(len(dense))]

    def expected(self, incoming: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """The gradients of the reference in float64. Those of the last `incoming` are kept."""
        if not self._expected or self._expected[-1][0] is not incoming:
            found = self.exact.gradients([None if g is None else exactly(g) for g in incoming])
            self._expected[:] = [(incoming, found)]
        return self._expected[-1][1]

    @cached_property
    def _expected(self) -> list[tuple[Sequence[torch.Tensor | None], dict[str, torch.Tensor | None]]]:
        return []

    def assert_unchanged(self, by: str) -> None:
        import torch

        for name, tensor in self.given.items():
            if not torch.equal(bytes_of(tensor), self.before[name]):
                self.fail(f"the argument {name} was changed by {by}")

    def assert_outputs(self, run: Run, when: str = "", *, eager: Run | None = None) -> None:
        """Number, kinds, shapes, dtypes and values of the outputs, and that they are memory of their own."""
        eager, exact = eager or self.eager, self.exact
        if len(run.outputs) != len(eager.outputs):
            self.fail(f"{len(run.outputs)} outputs{when}, the reference has {len(eager.outputs)}")
        for number, (got, like, value) in enumerate(zip(run.outputs, eager.outputs, exact.outputs, strict=True)):
            what = f"output {number}{when}"
            if not is_tensor(like):
                if type(got) is not type(like) or got != like:
                    self.fail(f"{what} is {got!r}, the reference gives {like!r}")
                continue
            if not is_tensor(got):
                self.fail(f"{what} is a {type(got).__name__}, the reference gives a tensor")
            asked = self.differentiable or not eager.leaves
            for attribute in ("dtype", "shape", "device", *(("requires_grad",) if asked else ())):
                mine, theirs = getattr(got, attribute), getattr(like, attribute)
                if mine != theirs:
                    self.fail(f"{what} has {attribute} {mine}, the reference gives {theirs}")
            for name, tensor in run.passed.items():
                if got.numel() and got.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    self.fail(f"{what} shares memory with the argument {name}")
            self.compare(what, got, value)

    def assert_gradients(
        self, run: Run, incoming: Sequence[torch.Tensor | None], when: str, *, retain_graph: bool = True
    ) -> None:
        import torch

        expected = self.expected(incoming)
        theirs: Mapping[str, torch.Tensor | None] = {}
        before = [None if gradient is None else bytes_of(gradient) for gradient in incoming]
        for name, got in run.gradients(incoming, retain_graph=retain_graph).items():
            what, value = f"the gradient of {name} ({when})", expected[name]
            if got is None or value is None:
                # torch materialises the gradient of an output that got none: zeros say the same as nothing.
                if got is not value and not (got is not None and not bool(got.any())):
                    self.fail(f"{what} is {_presence(got)}, that of the reference is {_presence(value)}")
                continue
            if got.dtype != run.leaves[name].dtype:
                self.fail(f"{what} has dtype {got.dtype}, its tensor {run.leaves[name].dtype}")
            if self.within(got, value):
                continue
            # Where everything cancels, as between equal rows, rounding remains: then eager's own is the measure.
            theirs = theirs or self.eager.gradients(incoming)
            rounding = theirs[name]
            assert rounding is not None
            allowed = float(error_of(rounding, value)[0].max()) if value.numel() else 0.0
            self.compare(what, got, value, allowed=2 * allowed if math.isfinite(allowed) else 0.0)
        for gradient, old in zip(incoming, before, strict=True):
            if gradient is not None and old is not None and not torch.equal(bytes_of(gradient), old):
                self.fail(f"the incoming gradient was changed ({when})")

    def within(self, got: torch.Tensor, exact: torch.Tensor, factor: float = 1.0) -> bool:
        """Whether the error is within `factor` times the contract's tolerance."""
        if got.shape != exact.shape:
            return False
        error, largest = error_of(got, exact)
        return bool((error <= factor * (self.tolerance.atol + self.tolerance.rtol * largest)).all())

    def compare(self, what: str, got: torch.Tensor, exact: torch.Tensor, allowed: float = 0.0) -> None:
        """Within the contract's tolerance, or an error of `allowed` where that is more."""
        import torch

        if got.shape != exact.shape:
            self.fail(f"{what} has shape {tuple(got.shape)}, the reference gives {tuple(exact.shape)}")
        if not exact.is_floating_point():
            if not torch.equal(got.cpu(), exact):
                self.fail(f"{what} differs from the reference")
            return
        error, largest = error_of(got, exact)
        limit = max(self.tolerance.atol + self.tolerance.rtol * largest, allowed)
        wrong = ~(error <= limit)  # so that NaN counts as wrong
        if wrong.any():
            worst = float(error.nan_to_num(nan=float("inf")).max())
            why = f"{self.tolerance.atol:.3g} + {self.tolerance.rtol:.3g} * {largest:.3g}"
            why = why if limit != allowed else "what eager's own error allows"
            self.fail(
                f"{what} is wrong at {int(wrong.sum())} of {wrong.numel()} elements: max error {worst:.3g}, tolerance "
                f"{limit:.3g} = {why}"
            )

    def fail(self, problem: str) -> NoReturn:
        raise AssertionError(f"{self.where}: {problem}")

    def _arguments(self) -> Mapping[str, Any]:
        return self.contract.signature().bind(*self.sample.args, **self.sample.kwargs).arguments


def assert_random_gradients(case: Case, run: Run, when: str = "", *, retain_graph: bool = True) -> None:
    """All gradients of the run, for a random incoming one."""
    if case.has_gradients:
        _, incoming = next(case.incoming(case.eager.outputs))
        case.assert_gradients(run, incoming, when or "incoming gradient random", retain_graph=retain_graph)


def error_of(got: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Element by element in float64, zero where both are NaN or the same infinity; and the largest exact value."""
    import torch

    value, exact = got.detach().cpu().double(), exact.detach()
    same = (value == exact) | (value.isnan() & exact.isnan())
    finite = exact[exact.isfinite()]
    return torch.where(same, 0.0, (value - exact).abs()), float(finite.abs().max()) if finite.numel() else 0.0


def _presence(gradient: torch.Tensor | None) -> str:
    return "missing" if gradient is None else "there"


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def exactly(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in float64 when it is of a floating type: not every device has float64."""
    import torch

    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the memory behind the tensor: gaps between strided elements count, and NaN equals itself."""
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage()).clone()


def same(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether both have the same bits, NaN being the same as NaN."""
    import torch

    a, b = (tensor.contiguous() for tensor in pair)
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=1.0), b.nan_to_num(nan=1.0))


def named(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested arguments, by name: `weight`, `gate_logits[1]`."""
    if is_tensor(value):
        return {name: value}
    if isinstance(value, Mapping):
        return {key: tensor for label, item in value.items() for key, tensor in named(item, label).items()}
    if isinstance(value, (tuple, list)):
        parts = [named(item, f"{name}[{number}]") for number, item in enumerate(value)]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {}


def replace(value: Any, fresh: Mapping[int, torch.Tensor]) -> Any:
    if is_tensor(value):
        return fresh[id(value)]
    if isinstance(value, dict):
        return {key: replace(item, fresh) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(replace(item, fresh) for item in value)
    return value
