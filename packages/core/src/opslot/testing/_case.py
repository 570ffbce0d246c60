"""One kernel against one contract: values, gradients and manners, on every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._contract import OpContract, Sample, Tolerance
from .._discovery import registry
from .._target import _Note, check_kernel, load_target

if TYPE_CHECKING:
    import torch

Kernel = Callable[..., Any]


def check(
    op: str, variant: str, kernel: Kernel | str, *, device: str = "cpu", dtype: str = "float32", seed: int = 0
) -> None:
    """Raise `AssertionError` unless `kernel` does what the contract of `op/variant` says, on every sample of it.

    `kernel` is a function or the name of a registered kernel. Outputs and all gradients, for random incoming gradients
    in several layouts, must be within the contract's tolerance of the reference run in float64 on the CPU. Outputs must
    have the dtype and shape that the reference gives for the same inputs, and must not share memory with an input.
    Arguments and incoming gradients must come out bit for bit as they went in. Gradients must exist exactly where they
    are asked for, also when other inputs are frozen, and a second backward must give the same again.
    """
    import torch

    known = registry()
    contract = known.contract(op, variant)
    reference = contract.load_reference()
    if isinstance(kernel, str):
        name, function = kernel, known.resolve(op, variant, kernel, known.describe(device))
        function = reference if function is None else function
    else:
        name, function = getattr(kernel, "__qualname__", repr(kernel)), kernel
        check_kernel(kernel, contract.signature(), f"kernel {name} for {contract}")
    if dtype not in contract.tolerances:
        raise ValueError(f"{contract} has tolerances for {', '.join(sorted(contract.tolerances))}, not for {dtype!r}")
    samples = load_target(contract.samples, f"the samples of {contract}")
    for number, sample in enumerate(samples(torch.device(device), getattr(torch, dtype), seed)):
        where = f"{contract}, kernel {name}, sample {sample.name!r} ({dtype} on {device}, seed {seed})"
        with _Note(f"while checking {where}"):
            _Case(contract, reference, function, sample, contract.tolerances[dtype], where, seed + number).check()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that a kernel takes without initialising it holds NaN (or the largest integer).

    So a kernel that reads what it never wrote gives NaN instead of the zeros that fresh memory mostly holds. This is
    torch's `fill_uninitialized_memory`, which works in deterministic mode only: operations may take their deterministic
    paths inside, and those without one warn. Memory that a vendor's library allocates past torch stays as it is.
    """
    import torch

    # mypy does not see that torch makes this module a property holder.
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@dataclass(frozen=True)
class _Run:
    """What one call gave: its outputs, and by name the tensors that were passed and those to differentiate."""

    outputs: tuple[Any, ...]
    passed: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]

    def gradients(self, incoming: list[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """By name, for one incoming gradient an output (None where that is no tensor)."""
        import torch

        pairs = [(o, g) for o, g in zip(self.outputs, incoming, strict=True) if g is not None and o.requires_grad]
        outputs, given = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        found = torch.autograd.grad(outputs, list(self.leaves.values()), given, retain_graph=True, allow_unused=True)
        return dict(zip(self.leaves, found, strict=True))


@dataclass(frozen=True)
class _Case:
    contract: OpContract
    reference: Kernel
    kernel: Kernel
    sample: Sample
    tolerance: Tolerance
    where: str
    seed: int

    def check(self) -> None:
        import torch

        given = _named(self._arguments())
        before = {name: _bytes(tensor) for name, tensor in given.items()}
        leaves = [name for name, tensor in given.items() if tensor.requires_grad]

        exact = self._run(self.reference, leaves, _exactly)
        eager = self._run(self.reference, leaves)
        run = self._run(self.kernel, leaves)
        self._check_unchanged(given, before, "forward")
        self._check_outputs(run, eager, exact, "")
        if any(_is_tensor(output) and output.requires_grad for output in eager.outputs):
            for layout, incoming in self._incoming(eager.outputs):
                expected = exact.gradients([None if g is None else _exactly(g) for g in incoming])
                self._check_gradients(run, incoming, expected, f"incoming gradient {layout}")
                self._check_unchanged(given, before, "backward")
                if layout == "random" and len(leaves) > 1:
                    for name in leaves:
                        only = self._run(self.kernel, [name])
                        self._check_gradients(only, incoming, expected, "everything else frozen")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                without = self._run(self.kernel, [])
                self._check_outputs(without, self._run(self.reference, []), exact, f" under {mode.__name__}")
        self._check_unchanged(given, before, "a call without gradients")

    def _check_unchanged(self, given: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], by: str) -> None:
        import torch

        for name, tensor in given.items():
            if not torch.equal(_bytes(tensor), before[name]):
                self._fail(f"the argument {name} was changed by {by}")

    def _arguments(self) -> Mapping[str, Any]:
        return self.contract.signature().bind(*self.sample.args, **self.sample.kwargs).arguments

    def _run(
        self, function: Kernel, leaves: list[str], convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> _Run:
        """Call `function` with fresh tensors over the sample's own memory, of which `leaves` require a gradient."""
        fresh: dict[int, torch.Tensor] = {}
        for name, tensor in _named(self._arguments()).items():
            plain = tensor.detach() if convert is None else convert(tensor.detach())
            fresh[id(tensor)] = plain.requires_grad_(name in leaves)
        result = function(*_replace(self.sample.args, fresh), **_replace(dict(self.sample.kwargs), fresh))
        passed = {name: fresh[id(tensor)] for name, tensor in _named(self._arguments()).items()}
        outputs = result if isinstance(result, tuple) else (result,)
        return _Run(outputs, passed, {name: passed[name] for name in leaves})

    def _check_outputs(self, run: _Run, eager: _Run, exact: _Run, when: str) -> None:
        if len(run.outputs) != len(eager.outputs):
            self._fail(f"{len(run.outputs)} outputs{when}, the reference has {len(eager.outputs)}")
        for number, (got, like, value) in enumerate(zip(run.outputs, eager.outputs, exact.outputs, strict=True)):
            what = f"output {number}{when}"
            if not _is_tensor(like):
                if type(got) is not type(like) or got != like:
                    self._fail(f"{what} is {got!r}, the reference gives {like!r}")
                continue
            if not _is_tensor(got):
                self._fail(f"{what} is a {type(got).__name__}, the reference gives a tensor")
            for attribute in ("dtype", "shape", "device", "requires_grad"):
                mine, theirs = getattr(got, attribute), getattr(like, attribute)
                if mine != theirs:
                    self._fail(f"{what} has {attribute} {mine}, the reference gives {theirs}")
            for name, tensor in run.passed.items():
                if got.numel() and got.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    self._fail(f"{what} shares memory with the argument {name}")
            self._compare(what, got, value)

    def _check_gradients(
        self,
        run: _Run,
        incoming: list[torch.Tensor | None],
        expected: Mapping[str, torch.Tensor | None],
        when: str,
    ) -> None:
        import torch

        before = [None if gradient is None else _bytes(gradient) for gradient in incoming]
        for name, got in run.gradients(incoming).items():
            what, value = f"the gradient of {name} ({when})", expected[name]
            if got is None or value is None:
                if got is not value:
                    self._fail(f"{what} is {_presence(got)}, that of the reference is {_presence(value)}")
                continue
            self._compare(what, got, value)
        for gradient, old in zip(incoming, before, strict=True):
            if gradient is not None and old is not None and not torch.equal(_bytes(gradient), old):
                self._fail(f"the incoming gradient was changed ({when})")

    def _incoming(self, outputs: tuple[Any, ...]) -> Iterator[tuple[str, list[torch.Tensor | None]]]:
        """Incoming gradients in three layouts: each is one more backward through the same graph."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)

        def random(like: torch.Tensor, *shape: int) -> torch.Tensor:
            # Never constant, or a kernel that reads one element of it for all would pass; and away from zero, so that a
            # scalar's is always large enough to see an error by.
            sign = torch.randint(2, shape, generator=generator) * 2 - 1
            return ((0.5 + torch.rand(shape, generator=generator)) * sign).to(like)

        tensors = [output if _is_tensor(output) else None for output in outputs]
        dense = [None if o is None else random(o, *o.shape) for o in tensors]
        yield "random", dense
        yield "strided", [None if g is None else torch.stack((g, torch.zeros_like(g)), dim=-1)[..., 0] for g in dense]
        yield "expanded from a scalar", [None if o is None else random(o).expand(o.shape) for o in tensors]

    def _compare(self, what: str, got: torch.Tensor, exact: torch.Tensor) -> None:
        import torch

        if got.shape != exact.shape:
            self._fail(f"{what} has shape {tuple(got.shape)}, the reference gives {tuple(exact.shape)}")
        if not exact.is_floating_point():
            if not torch.equal(got.cpu(), exact):
                self._fail(f"{what} differs from the reference")
            return
        value, exact = got.detach().cpu().double(), exact.detach()
        same = (value == exact) | (value.isnan() & exact.isnan())
        error = torch.where(same, 0.0, (value - exact).abs())
        largest = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else 0.0
        limit = self.tolerance.atol + self.tolerance.rtol * largest
        wrong = ~(error <= limit)  # so that NaN counts as wrong
        if wrong.any():
            worst = float(error.nan_to_num(nan=float("inf")).max())
            self._fail(
                f"{what} is wrong at {int(wrong.sum())} of {wrong.numel()} elements: max error {worst:.3g}, tolerance "
                f"{limit:.3g} = {self.tolerance.atol:.3g} + {self.tolerance.rtol:.3g} * {largest:.3g}"
            )

    def _fail(self, problem: str) -> None:
        raise AssertionError(f"{self.where}: {problem}")


def _presence(gradient: torch.Tensor | None) -> str:
    return "missing" if gradient is None else "there"


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _exactly(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in float64 when it is of a floating type: not every device has float64."""
    import torch

    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the memory behind the tensor: gaps between strided elements count, and NaN equals itself."""
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage()).clone()


def _named(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested arguments, by name: `weight`, `gate_logits[1]`."""
    if _is_tensor(value):
        return {name: value}
    if isinstance(value, Mapping):
        return {key: tensor for label, item in value.items() for key, tensor in _named(item, label).items()}
    if isinstance(value, (tuple, list)):
        parts = [_named(item, f"{name}[{number}]") for number, item in enumerate(value)]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {}


def _replace(value: Any, fresh: Mapping[int, torch.Tensor]) -> Any:
    if _is_tensor(value):
        return fresh[id(value)]
    if isinstance(value, dict):
        return {key: _replace(item, fresh) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_replace(item, fresh) for item in value)
    return value
