"""Obstacles: why a module cannot hand its work to any kernel, whichever it is."""

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ._contract import OpContract
from ._slot import OpSlot, has_hooks
from ._target import load_target

if TYPE_CHECKING:
    import torch


def obstacle(module: "torch.nn.Module", attribute: str, contract: OpContract) -> str | None:
    """Why no kernel may run in place of the code that this module's slot guards, or None."""
    slot: OpSlot = getattr(module, attribute)
    hidden = _hidden(module, attribute)
    if hidden is not None:
        return hidden
    if slot.activation is not None and contract.activation is not None:
        activation = getattr(module, slot.activation, None)
        if activation is None:
            return f"it has no {slot.activation}, whose function the slot names"
        if has_hooks(activation):
            return f"its {slot.activation} has hooks, which no kernel would run"
        if not _same_function(activation, load_target(contract.activation, f"the activation of {contract}")):
            return f"its activation {activation!r} is not the {contract.activation!r} of the contract"
    return slot.check(module) if slot.check is not None else None


def parameter_dtypes(module: "torch.nn.Module") -> tuple[str, ...]:
    """The floating dtypes of the module's own parameters, or else of the first below it."""
    own = [p for p in module._parameters.values() if p is not None and p.is_floating_point()]
    # The first and no more: the model itself is asked too, for its losses.
    parameters = own or islice((p for p in module.parameters() if p.is_floating_point()), 1)
    return tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _hidden(module: "torch.nn.Module", attribute: str) -> str | None:
    """Why the guard is never reached: a forward of the instance, or of a class below the one that has the slot."""
    forward = vars(module).get("forward")
    if forward is not None and not _reaches(forward, module):
        return f"its forward was replaced by {forward!r}, so the guard in {type(module).__name__} is never reached"
    classes: Any = type(module).__mro__
    ours = next((cls for cls in classes if isinstance(vars(cls).get(attribute), OpSlot)), None)
    if ours is None:
        return None
    for cls in classes[: classes.index(ours)]:
        own = vars(cls).get("forward")
        if own is not None and not any(_leads_to(own, f) for f in (ours.forward, inspect.unwrap(ours.forward))):
            return (
                f"{cls.__qualname__} has a forward of its own, so the guard in {ours.__qualname__} may never be reached"
            )
    return None


def _reaches(forward: Any, module: "torch.nn.Module") -> bool:
    """Whether an instance's own forward still calls its class's, as accelerate's wrappers do and kernelize does not."""
    inner = getattr(forward, "__wrapped__", None) or vars(module).get("_old_forward")
    if inner is not None and _may_call(forward, inner):
        forward = inner
    return _leads_to(forward, type(module).forward)


def _leads_to(forward: Any, wanted: Any) -> bool:
    """Whether `wanted` is behind the wrappers around `forward`."""
    for _ in range(16):
        if getattr(forward, "__func__", forward) is wanted:
            return True
        inner = getattr(forward, "__wrapped__", None)
        if inner is None or not _may_call(forward, inner):
            return False
        forward = inner
    return False


def _may_call(wrapper: Any, inner: Any) -> bool:
    """Whether a wrapper has hold of what it says that it wraps: functools.wraps says so of any function.

    Whether it then calls it at each forward, only a proof tells.
    """
    if isinstance(wrapper, functools.partial):
        held = [wrapper.func, *wrapper.args, *wrapper.keywords.values()]
    else:
        function = getattr(wrapper, "__func__", wrapper)
        if not isinstance(function, FunctionType):
            return True  # an object, which keeps what it calls where it likes
        if {"forward", "_old_forward", "__wrapped__"}.intersection(function.__code__.co_names):
            return True  # as in super().forward(x)
        nonlocal_, global_, _, _ = inspect.getclosurevars(function)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        held = [*nonlocal_.values(), *global_.values(), *defaults]
    nested = [value for one in held for value in (one, *getattr(one, "__dict__", {}).values())]
    wanted = getattr(inner, "__func__", inner)
    return any(getattr(value, "__func__", value) is wanted for value in nested)


def _same_function(activation: Any, expected: Callable[..., Any]) -> bool:
    """Compare by values: names and classes of one function differ between libraries and versions.

    What has parameters is another function as soon as it trains.
    """
    import torch

    if isinstance(activation, torch.nn.Module) and next(activation.parameters(), None) is not None:
        return False
    with torch.no_grad():
        points = torch.linspace(-32, 32, 129, device="cpu")
        return torch.allclose(activation(points.clone()), expected(points), rtol=1e-5, atol=1e-6)
