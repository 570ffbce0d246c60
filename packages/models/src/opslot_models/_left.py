"""What adopting leaves as it is, and why."""

from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from opslot import OpSlot, OpslotError

from ._families import twins, upstream_module
from ._sets import known_families
from .adoption import own_class

# Where transformers puts the code of a checkpoint that it loads with trust_remote_code.
_REMOTE = "transformers_modules."


@dataclass(frozen=True)
class Left:
    """A module whose forward is not a generated one: its name, empty for the model itself, its class and the reason."""

    name: str
    cls: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.cls})"


def left(model: torch.nn.Module) -> tuple[Left, ...]:
    """Every module below `model` that modeling code of transformers or of a checkpoint, or a subclass of it, runs."""
    reasons: dict[type, str | None] = {}
    for module in model.modules():
        cls = own_class(type(module))
        if cls not in reasons:
            reasons[cls] = _reason(cls)
    named = ((name, own_class(type(module))) for name, module in model.named_modules())
    return tuple(Left(name, cls.__name__, reason) for name, cls in named if (reason := reasons[cls]) is not None)


def _reason(cls: type) -> str | None:
    theirs = next((one for one in cls.__mro__ if _is_modeling(one)), None)
    if theirs is None:
        return None
    if any(one.__module__.startswith(_REMOTE) for one in cls.__mro__):
        return "the code of the checkpoint (trust_remote_code) runs, of which nothing is generated"
    family = next((name for name in known_families() if upstream_module(name) == theirs.__module__), None)
    if family is None:
        return f"no family {theirs.__module__.rpartition('.modeling_')[2]} is generated"
    try:
        twin = twins(family).get(theirs)
    except OpslotError as error:
        return str(error)
    if twin is None:
        return f"the generated module has no class for {theirs.__name__} as it is here"
    return None if cls is theirs else _of_subclass(cls, theirs, twin)


def _of_subclass(cls: type, theirs: type, twin: type) -> str:
    """What a user's own class misses, which would lose its own code if its class were changed."""
    slots = {name: slot for name, slot in vars(twin).items() if isinstance(slot, OpSlot)}
    if not slots:
        return f"a class derived from {theirs.__name__} keeps its own code; there is no slot in that class"
    ops = ", ".join(slot.op for slot in slots.values())
    below = cls.__mro__[: cls.__mro__.index(theirs)]
    guarded = [name for name, member in vars(twin).items() if _reads(member, set(slots))]
    overridden = [name for name in guarded if any(name in vars(one) for one in below)]
    if overridden:
        return f"it overrides {', '.join(overridden)} of {theirs.__name__}, where a kernel of {ops} would run"
    return f"a class derived from {theirs.__name__} keeps its own code, and so has no slots for {ops}"


def _reads(member: Any, slots: set[str]) -> bool:
    """Whether a method has a guard in it, or around it as `guard_forward` makes it."""
    code = getattr(member, "__code__", None)
    if code is None:
        return False
    cells = (cell.cell_contents for cell in getattr(member, "__closure__", None) or ())
    wrapped = getattr(member, "__wrapped__", None)
    return (
        _names(code, slots)
        or any(value in slots for value in cells if isinstance(value, str))
        or _reads(wrapped, slots)
    )


def _names(code: CodeType, slots: set[str]) -> bool:
    return not slots.isdisjoint(code.co_names)


def _is_modeling(cls: type) -> bool:
    module = cls.__module__
    return module.startswith(_REMOTE) or (module.startswith("transformers.models.") and ".modeling_" in module)
