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
from ._modules import canonical_modules
from ._obstacle import obstacle
from ._report import collapse, counted
from ._target import load_target

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch.utils.hooks import RemovableHandle

    from ._binding import Binding, Row, Write

# What is counted for each slot: calls of its module, calls of its kernel, those of them for which a gradient was due
# and recorded, and backward passes through its result. Plain numbers, because compiled code must trace them.
_MODULE, _MODULE_NO_GRAD, _KERNEL, _KERNEL_NO_GRAD, _DUE, _RECORDED, _BACKWARD = range(7)

# After these, for every tensor among the results and then the arguments: whether it was there, whether a gradient was
# due (recorded, for a result), and whether one came back. Tensors in tuples have places of their own, the last shared.
_THERE, _WANTED, _CAME = range(3)
_WIDTH = 64

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
    each of its results and out of each argument that required one, wherever the contract's reference would give one.
    Whether values and gradients are right is not looked at: that is what `opslot.testing.check` does. A kernel that
    returns something else than its contract's reference (None, a tuple for a tensor) raises `BindError` at the call.
    A gradient that a backward leaves out is seen in eager code alone, since compilers write zeros there, and an
    argument is proven when one of the results gave it a gradient. A module whose class has `opslot_untrained = True`
    only chooses indices, and no gradient is waited for in it; in one with `opslot_whole = True` whose own kernel ran,
    nothing else need run. Of the modules that PEFT's modules_to_save hold in one place, those that ran are judged.
    """

    def __init__(self, binding: "Binding") -> None:
        self._binding = binding
        self._counts: dict[int, torch.Tensor] = {}
        self._before: tuple[Write, ...] = ()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Proof":
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
                names = tuple(write.contract.signature().parameters)
                counts = self._counts[index] = _zeros(len(names))
                kernel = _marking(slot.kernel, counts, row.where, _result(write.contract), names)
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
        called = {
            (name, binding._writes[index].attribute)
            for index, counts in self._counts.items()
            for name in binding._writes[index].names
            if counts[_MODULE] + counts[_MODULE_NO_GRAD]
        }
        modules = list(canonical_modules(binding._model))
        untrained = [name for name, module in modules if getattr(module, "opslot_untrained", False)]
        ran = {name for index in self._counts for name in binding._writes[index].names if self._ran(index)}
        whole = [name for name, module in modules if name in ran and getattr(module, "opslot_whole", False)]
        found = []
        for index, (row, write) in enumerate(zip(binding.rows, binding._writes, strict=True)):
            if write.slot is None or write.slot.offer is None:
                continue
            counts = (self._counts[index] if index in self._counts else _zeros(0)).tolist()
            was_called = counts[_MODULE] or counts[_MODULE_NO_GRAD]
            if (
                not was_called
                and not problems[index]
                and any((name, write.attribute) in called for name in write.names)
            ):
                continue  # another module ran in its place
            if not was_called and any(_is_below(name, holder) for name in write.names for holder in whole):
                continue  # the kernel of the module that holds it ran in its place
            inside = any(_is_below(name, chooser) for name in write.names for chooser in untrained)
            due = backward and write.slot.offer.spec.backward and not inside
            reason = _missed(write, counts, idle, due)
            # A kernel that ran where it no longer belongs, since an activation changed, is no proof either.
            reason = problems[index] if reason and problems[index] else reason
            reason = reason or obstacle(write.module, write.attribute, write.contract) or ""
            if reason:
                found.append(Miss(row, reason))
        return tuple(found)

    def _ran(self, index: int) -> bool:
        counts = self._counts[index].tolist()
        return bool(counts[_KERNEL] + counts[_KERNEL_NO_GRAD])

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


def _is_below(name: str, holder: str) -> bool:
    """Whether a module is the other one or in it, by their names; the model's own is empty."""
    return not holder or f"{name}.".startswith(f"{holder}.")


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
        when = write.contract.runs_when
        remedy = f". It runs when {when}; if that is not meant, choose {write.contract.op}: eager" if when else ""
        return called + remedy
    missed = _missed_backward(write.contract, counts) if backward else ""
    # Indices that an op chooses have no gradient, with any kernel.
    return missed if missed and any(_given(write.contract).values()) else ""


def _missed_backward(contract: OpContract, counts: Sequence[int]) -> str:
    if counts[_DUE] and not counts[_RECORDED]:
        return "its result carries no gradient although an input requires one: training would stop there"
    if counts[_BACKWARD]:
        return _lost(contract, counts)
    if not counts[_KERNEL]:
        return "it ran only without gradients (no_grad, inference_mode), so there was no backward"
    if not counts[_DUE]:
        return ""  # nothing trains before it, as under a frozen embedding: no gradient is due
    return (
        "no gradient came back through its result: backward was not called, or nothing differentiated uses the result"
    )


def _lost(contract: OpContract, counts: Sequence[int]) -> str:
    """Which of the gradients that the reference gives did not come, where some did."""
    names = tuple(contract.signature().parameters)
    results = [item for item in range(_WIDTH) if counts[_place(0, item) + _THERE]]
    used = [item for item in results if item not in contract.stored]
    stuck = [item for item in used if counts[_place(0, item) + _WANTED] and not counts[_place(0, item) + _CAME]]
    if stuck:
        return (
            f"no gradient came back through its result {stuck[0]}: nothing differentiated uses it, or what uses it was "
            "detached"
        )
    plain = [item for item in results if not counts[_place(0, item) + _WANTED]]
    due = [
        (name, item)
        for number, name in enumerate(names, 1)
        for item in range(_WIDTH)
        if counts[_place(number, item) + _WANTED]
    ]
    empty = [(name, item) for name, item in due if not counts[_place(names.index(name) + 1, item) + _CAME]]
    if not plain and not empty:
        return ""
    given = _given(contract)
    for item in plain:
        if sources := [name for name, _ in due if name in given.get(item, set())]:
            return (
                f"its result {item} carries no gradient although {sources[0]} requires one: training would stop there"
            )
    for name, item in empty:
        if any(name in given.get(result, set()) for result in results):
            part = f"{name}[{item}]" if item else name
            return f"no gradient came out for {part}, which requires one: it was lost inside the kernel"
    return ""


def _given(contract: OpContract) -> dict[int, set[str]]:
    """The arguments to which a gradient of each result leads in the contract's reference, over its samples."""
    import torch

    reference, signature = contract.load_reference(), contract.signature()
    samples = load_target(contract.samples, f"the samples of {contract}")
    given: dict[int, set[str]] = {}
    with torch.enable_grad():
        for sample in samples(torch.device("cpu"), torch.float32, 0):
            leaves: list[tuple[str, torch.Tensor]] = []

            def leaf(value: Any, name: str, leaves: list[tuple[str, torch.Tensor]] = leaves) -> Any:
                if isinstance(value, tuple | list):
                    return type(value)(leaf(one, name) for one in value)
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    return value
                leaves.append((name, value.detach().requires_grad_()))
                return leaves[-1][1]

            bound = signature.bind(*sample.args, **sample.kwargs)
            bound.arguments.update({name: leaf(value, name) for name, value in bound.arguments.items()})
            result = reference(*bound.args, **bound.kwargs)
            for number, one in enumerate(result if isinstance(result, tuple) else (result,)):
                if not _require_grad([one]):
                    continue
                tensors = [tensor for _, tensor in leaves]
                found = torch.autograd.grad(one.sum(), tensors, retain_graph=True, allow_unused=True)
                reached = (name for (name, _), gradient in zip(leaves, found, strict=True) if gradient is not None)
                given.setdefault(number, set()).update(reached)
    return given


def _place(number: int, item: int = 0) -> int:
    """Where the counts of a tensor begin. 0 is the result, then the arguments in the contract's order."""
    return _item(_BACKWARD + 1 + 3 * number * _WIDTH, item)


def _item(place: int, item: int) -> int:
    return place + 3 * min(item, _WIDTH - 1)


def _zeros(arguments: int) -> "torch.Tensor":
    import torch

    # On the CPU whatever the device: counting then neither waits for the device nor depends on its kind.
    return torch.zeros(_place(arguments + 1), dtype=torch.int64, device="cpu")


def _marking(
    kernel: Callable[..., Any], counts: "torch.Tensor", where: str, wanted: str, names: Sequence[str]
) -> Callable[..., Any]:
    """The kernel, whose contract's parameters are `names`, counting in `counts`.

    `wanted` is what it must return, empty where that is not known.
    """
    import torch

    mark, through = _mark(), _through()
    number = {name: position for position, name in enumerate(names, 1)}

    def passed(value: Any, place: int, view: bool) -> Any:
        if isinstance(value, tuple | list):
            items = [passed(one, _item(place, item), view) for item, one in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return through(value, counts, place + _CAME, view) if _require_grad([value]) else value

    def seen(value: Any, place: int, wanted: Callable[[Any], bool]) -> list[int]:
        if isinstance(value, tuple | list):
            nested = [seen(one, _item(place, item), wanted) for item, one in enumerate(value)]
            return [column for columns in nested for column in columns]
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            return []
        return [place + _THERE, place + _WANTED] if wanted(value) else [place + _THERE]

    def marked(*args: Any, **kwargs: Any) -> Any:
        columns = [_KERNEL_NO_GRAD]
        if torch.is_grad_enabled():
            columns = [_KERNEL]
            given = [*enumerate(args, 1), *((number[name], kwargs[name]) for name in names if name in kwargs)]
            for position, value in given:
                columns += seen(value, _place(position), _due)
            columns += [_DUE] if _require_grad([*args, *kwargs.values()]) else []
            args = tuple([passed(value, _place(position), True) for position, value in enumerate(args, 1)])
            kwargs = {
                name: passed(value, _place(number[name]), True) if name in number else value
                for name, value in kwargs.items()
            }
        result = kernel(*args, **kwargs)
        if wanted and _kind(result) != wanted:
            raise BindError(f"{where}: the kernel returned {_kind(result)}, its contract's reference returns {wanted}")
        if torch.is_grad_enabled():
            columns += seen(result, _place(0), _recorded)
            columns += [_RECORDED] if _recorded(result) else []
        mark(counts, columns, None)
        return passed(result, _place(0), False)

    marked.proves = kernel  # type: ignore[attr-defined]  # what a copy of the slot gets
    return marked


def _due(value: Any) -> bool:
    return _require_grad([value])


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
def _through() -> Callable[["torch.Tensor", "torch.Tensor", int, bool], "torch.Tensor"]:
    """The tensor itself, which counts the gradients that come back through it.

    A result is copied, since the model may change it in place, which a view would not allow. An argument, which a
    kernel may not change, is passed as a view.
    """
    import torch

    mark = _mark()

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, counts: torch.Tensor, column: int, view: bool) -> torch.Tensor:
            ctx.counts = counts  # not saved for backward, which would refuse it once it has counted
            ctx.columns = [column] if view else [column, _BACKWARD]
            ctx.set_materialize_grads(False)  # a gradient that is missing is not zero
            return tensor.view_as(tensor) if view else tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
            # Only compiled code needs the gradient as an input, to tell backward from forward. In eager code it may be
            # of a class that knows no foreign operations, such as DTensor.
            if grad is not None:
                mark(ctx.counts, ctx.columns, grad.detach() if torch.compiler.is_compiling() else None)
            return grad, None, None, None

    apply: Callable[[torch.Tensor, torch.Tensor, int, bool], torch.Tensor] = Through.apply
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
