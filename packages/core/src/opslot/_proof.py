"""The proof: each bound kernel ran, forward and backward, in eager and in compiled code."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ._contract import OpContract
from ._errors import BindError
from ._obstacle import obstacle
from ._report import collapse, counted

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch.utils.hooks import RemovableHandle

    from ._binding import Binding, Row, Write

# What is counted for each slot: calls of its module, calls of its kernel, those of them for which a gradient was due
# and recorded, and backward passes through its result. Plain numbers, because compiled code must trace them.
_MODULE, _MODULE_NO_GRAD, _KERNEL, _KERNEL_NO_GRAD, _DUE, _RECORDED, _BACKWARD = range(7)

_PLAIN_RESULT = re.compile(r"Tensor|tuple\[Tensor(, Tensor)*\]")


@dataclass(frozen=True)
class Miss:
    """A slot whose kernel was not seen to run as it should have, and why."""

    row: "Row"
    reason: str

    def __str__(self) -> str:
        return f"{self.row.where}: {self.reason}"


class Proof:
    """Counts, while its `with` block runs, how often each slot of a binding ran its kernel. Made by `Binding.proof`.

    Inside the block every module that has a kernel holds a counting one, so compiled code is compiled again there, and
    every result is copied: prove one step, not a training. The counts come from operations in the graph itself, hence
    from what ran and not from what was traced. Not seen is what runs a graph that no longer looks at the slots
    (exported, or compiled with its guards skipped): such slots are missed, never passed.

    A kernel is proven when it ran at least once and, unless its spec claims no backward, a gradient came back through
    its result, one of them where it has several, whenever one of its inputs required one. Whether values and gradients
    are right is not looked at: that is what `opslot.testing.check` does. A kernel that returns something else than its
    contract's reference (None, a tuple for a tensor) raises `BindError` at the call.
    """

    def __init__(self, binding: "Binding") -> None:
        self._binding = binding
        self._counts: dict[int, torch.Tensor] = {}
        self._before: tuple[Write, ...] = ()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Proof":
        import torch

        binding = self._binding
        if binding._proving:
            raise BindError("another proof of this binding is running: leave its `with` block first")
        if self._before:
            raise BindError("a proof has one `with` block: make another with binding.proof()")
        if any(parameter.is_meta for parameter in binding._model.parameters()):
            raise BindError("the model is on meta, where nothing is computed: move it to its device, then prove")
        self._before = binding._writes
        marked = []
        for index, (row, write) in enumerate(zip(binding.rows, binding._writes, strict=True)):
            slot = write.slot
            if slot is not None and slot.kernel is not None and write.in_place():
                # On the CPU whatever the device: counting then neither waits for the device nor depends on its kind.
                counts = self._counts[index] = torch.zeros(7, dtype=torch.int64, device="cpu")
                kernel = _marking(slot.kernel, counts, row.where, _result(write.contract))
                write = replace(write, slot=slot.bound_to(kernel, slot.offer))
            marked.append(write)
        with ExitStack() as undo:
            undo.callback(self.__exit__, None, None, None)
            binding._writes, binding._proving = tuple(marked), True
            for index, counts in self._counts.items():
                marked[index].do(marked[index].slot)
                self._hooks.append(marked[index].module.register_forward_pre_hook(_calls(counts)))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        binding = self._binding
        for marked, before in zip(binding._writes, self._before, strict=True):
            if marked.in_place():  # else it was bound again meanwhile
                before.do(before.slot)
        for hook in self._hooks:
            hook.remove()
        binding._writes, binding._proving = self._before, False

    def counts(self) -> "dict[Row, tuple[int, int]]":
        """How often each kernel ran, and how often a gradient came back: once for each of its results."""
        rows = self._binding.rows
        return {
            rows[index]: (int(counts[_KERNEL] + counts[_KERNEL_NO_GRAD]), int(counts[_BACKWARD]))
            for index, counts in self._counts.items()
        }

    def misses(self, *, backward: bool = True) -> tuple[Miss, ...]:
        """The slots that were not proven, each with its reason. `backward=False`: forward is enough, for inference."""
        binding = self._binding
        problems = binding.problems()
        idle = not any(ran for ran, _ in self.counts().values())
        found = []
        for index, (row, write) in enumerate(zip(binding.rows, binding._writes, strict=True)):
            if write.slot is None or write.slot.offer is None:
                continue
            counts = self._counts[index].tolist() if index in self._counts else [0] * 7
            reason = _missed(write, counts, idle, backward and write.slot.offer.spec.backward)
            # A kernel that ran where it no longer belongs, since an activation changed, is no proof either.
            reason = problems[index] if reason and problems[index] else reason
            reason = reason or obstacle(write.module, write.attribute, write.contract) or ""
            if reason:
                found.append(Miss(row, reason))
        return tuple(found)

    def check(self, *, backward: bool = True) -> None:
        """Raise `BindError` that names every miss."""
        misses = self.misses(backward=backward)
        groups: dict[str, list[str]] = {}
        for miss in misses:
            what = f"{miss.row.op}/{miss.row.variant} -> {miss.row.kernel}"
            groups.setdefault(f"{what}: {miss.reason}", []).append(miss.row.module)
        if misses:
            lines = [f"  {what} [{', '.join(collapse(modules))}]" for what, modules in groups.items()]
            raise BindError(
                f"the kernel was not seen to run as it should in {counted(len(misses), 'slot')}:\n" + "\n".join(lines)
            )


def _missed(write: "Write", counts: Sequence[int], idle: bool, backward: bool) -> str:
    if not counts[_KERNEL] + counts[_KERNEL_NO_GRAD]:
        if idle:
            return (
                "no kernel of this binding ran: the model was not called inside the `with` block, or it ran a graph "
                "that does not look at the slots (exported, or compiled with its guards skipped)"
            )
        if not counts[_MODULE] + counts[_MODULE_NO_GRAD]:
            return "its module was never called"
        called = "its module was called, but not the kernel"
        if not counts[_MODULE]:
            called = "its module was called only without gradients (no_grad), and did not call the kernel"
        return f"{called}. It runs when {write.contract.runs_when}" if write.contract.runs_when else called
    if backward and counts[_DUE] and not counts[_RECORDED]:
        return "its result carries no gradient although an input requires one: training would stop there"
    if not backward or counts[_BACKWARD]:
        return ""
    if not counts[_KERNEL]:
        return "it ran only without gradients (no_grad, inference_mode), so there was no backward"
    if not counts[_DUE]:
        return ""  # nothing trains before it, as under a frozen embedding: no gradient is due
    return (
        "no gradient came back through its result: backward was not called, or nothing differentiated uses the result"
    )


def _marking(kernel: Callable[..., Any], counts: "torch.Tensor", where: str, wanted: str) -> Callable[..., Any]:
    """The kernel, counting in `counts`. `wanted` is what it must return, empty where that is not known."""
    import torch

    mark, through = _mark(), _through()

    def passed(result: Any) -> Any:
        if isinstance(result, tuple | list):
            items = [passed(one) for one in result]
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        return through(result, counts) if _require_grad([result]) else result

    def marked(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if wanted and _kind(result) != wanted:
            raise BindError(f"{where}: the kernel returned {_kind(result)}, its contract's reference returns {wanted}")
        if torch.is_grad_enabled():
            columns = [_KERNEL]
            columns += [_DUE] if _require_grad([*args, *kwargs.values()]) else []
            columns += [_RECORDED] if _recorded(result) else []
        else:
            columns = [_KERNEL_NO_GRAD]
        mark(counts, columns, None)
        return passed(result)

    marked.proves = kernel  # type: ignore[attr-defined]  # what a copy of the slot gets
    return marked


def _calls(counts: "torch.Tensor") -> Callable[..., None]:
    """A hook that counts the calls of a module."""
    import torch

    mark = _mark()

    def called(module: Any, args: Any) -> None:
        mark(counts, [_MODULE if torch.is_grad_enabled() else _MODULE_NO_GRAD], None)

    return called


@functools.cache
def _mark() -> Callable[..., None]:
    """The operation that counts. Compilers keep it because it changes an input; a Python counter they would trace."""
    import torch

    @torch.library.custom_op(
        "opslot::mark", mutates_args=("counts",), schema="(Tensor(a!) counts, int[] columns, Tensor? after) -> ()"
    )
    def mark(counts: torch.Tensor, columns: list[int], after: torch.Tensor | None) -> None:
        for column in columns:
            counts[column] += 1

    @mark.register_fake
    def _(counts: torch.Tensor, columns: list[int], after: torch.Tensor | None) -> None:
        return None

    return mark


@functools.cache
def _through() -> Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]:
    """A copy, which counts the gradients that come back through it."""
    import torch

    mark = _mark()

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, result: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ctx.counts = counts  # not saved for backward, which would refuse it once it has counted
            return result.clone()  # not a view, which the model could not change in place

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            # Only compiled code needs the gradient as an input, to tell backward from forward. In eager code it may be
            # of a class that knows no foreign operations, such as DTensor.
            mark(ctx.counts, [_BACKWARD], grad.detach() if torch.compiler.is_compiling() else None)
            return grad, None

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = Through.apply
    return apply


def _require_grad(values: Sequence[Any]) -> bool:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        if isinstance(value, tuple | list) and _require_grad(value):
            return True
    return False


def _recorded(result: Any) -> bool:
    """Whether a gradient can pass through a result; through a leaf, made by `requires_grad_()`, none can."""
    if isinstance(result, tuple | list):
        return any(_recorded(one) for one in result)
    import torch

    # Compilers do not tell what made a tensor.
    return _require_grad([result]) and (torch.compiler.is_compiling() or result.grad_fn is not None)


def _result(contract: OpContract) -> str:
    """What the reference says it returns, where that is a tensor or a tuple of tensors."""
    annotation = contract.signature().return_annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace("torch.", "")
    return text if _PLAIN_RESULT.fullmatch(text) else ""


def _kind(result: Any) -> str:
    import torch

    if isinstance(result, tuple):
        return f"tuple[{', '.join([_kind(one) for one in result])}]"
    return "Tensor" if isinstance(result, torch.Tensor) else type(result).__name__
