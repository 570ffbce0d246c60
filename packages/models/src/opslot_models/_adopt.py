"""Adopting: give slots to a stock transformers model that exists already."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from opslot import BindError, Binding, OpsConfig, OpSlot, bind, registry
from transformers import PreTrainedConfig, PreTrainedModel

from ._attention import choosing_attention
from ._families import GENERATED, families
from ._left import Left, left
from .adoption import plan_restore, plan_swaps
from .auxiliary import remove_auxiliary_hooks

# Where a model remembers what attention it had before `adopt` chose, so that a copy of it knows too.
_ATTENTION = "_opslot_attention_before"


@dataclass(frozen=True)
class Adoption:
    """What `adopt` did: the binding, the modules that have slots now, and those that it left as they are and why."""

    binding: Binding
    swapped: tuple[str, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [str(self.binding), f"  adopted {len(self.swapped)} modules"]
        if self.left:
            lines.append("  left as they are, without slots:")
        for reason, group in groupby(sorted(self.left, key=lambda one: one.reason), key=lambda one: one.reason):
            first, *more = group
            lines.append(f"    {first}{f' and {len(more)} more' if more else ''}: {reason}")
        return "\n".join(lines)


def adopt(
    model: torch.nn.Module,
    ops: OpsConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    device: Any = None,
    probe: bool | None = None,
) -> Adoption:
    """Switch a stock transformers model to its generated classes in place, and bind the kernels that `ops` chooses.

    The model keeps its attributes, parameters and state dict, so Trainer, PEFT and FSDP2 scripts go on as they were.
    Do it before the model is compiled, prepared by accelerate or wrapped by DDP; PEFT and `fully_shard` may come first.
    A user's own subclass of a model class keeps its class: its inner modules get slots, and `Adoption.left` names what
    did not, and why. `unadopt` is the way back.

    `ops`, `device` and `probe` are those of `opslot.bind`. Raises `BindError` when nothing in the model has a generated
    class, something has replaced a forward, wrapped the model or patched upstream's classes; `OpslotError` when its
    families are not served for the installed transformers; and what `opslot.bind` raises. After an error the model is
    as it was.
    """
    config = OpsConfig.effective(ops)
    config.rules(registry())
    swaps = plan_swaps(model)
    if not swaps and not any(_is_generated(module) for module in model.modules()):
        why = "".join(f". {one}: {one.reason}" for one in left(model)[:1])
        raise BindError(
            f"{type(model).__name__} has no module of a generated family; there are: {', '.join(families())}{why}"
        )
    with ExitStack() as undo:
        for swap in swaps:
            undo.callback(swap.undo)
            swap.do()
        attention, _ = config.setting("attn_implementation")
        if attention is not None:
            with choosing_attention(config):
                _choose_attention(model, attention, undo)
        rest = left(model)
        binding = bind(model, config, device=device, probe=probe)  # the last step, whole or not at all by itself
        undo.pop_all()
    return Adoption(binding, tuple(swap.name for swap in swaps), rest)


def unadopt(model: torch.nn.Module) -> tuple[str, ...]:
    """Give an adopted or built model upstream's classes again, in place; returns the names of the modules that changed.

    Afterwards the model is stock: no slots and no kernels, no `opslot_binding`, no auxiliary hidden states, and the
    attention that it had before `adopt` chose another. Weights and gradients stay. A subclass of a generated class that
    a user wrote keeps its class, without kernels.

    Raises `BindError` when no module has a generated class, during backward, and where upstream's code would not run
    afterwards: a replaced forward, a parametrised module, a class of upstream's that something has replaced. After an
    error the model is as it was.
    """
    if torch._C._current_graph_task_id() != -1:
        raise BindError("a model cannot be unadopted during backward, where activations may be recomputed")
    swaps = plan_restore(model)
    if not swaps:
        raise BindError(
            f"{type(model).__name__} has no module of a generated class: it was not adopted, or is stock again"
        )
    for module in model.modules():
        _forget(module)
        for config, before, chosen in vars(module).pop(_ATTENTION, ()):
            if config._attn_implementation == chosen:
                _set_attention(config, before)
    for swap in swaps:
        swap.do()
    return tuple(swap.name for swap in swaps)


def _forget(module: torch.nn.Module) -> None:
    """Take out of an instance what binding and adopting wrote into it."""
    held = vars(module)
    for name, slot in [(name, value) for name, value in held.items() if isinstance(value, OpSlot)]:
        if isinstance(getattr(type(module), name, None), OpSlot):
            del held[name]
        else:
            held[name] = slot.bound_to(None, None)  # which the module's own __init__ made
    held.pop("opslot_binding", None)
    remove_auxiliary_hooks(module)


def _choose_attention(model: torch.nn.Module, name: str, undo: ExitStack) -> None:
    """Choose transformers' attention, and leave in the model what it had, for `unadopt`; `undo` takes both back."""
    choose: Any = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise BindError(
            f"{type(model).__name__} cannot choose attention {name!r}: set it on the transformers model inside"
        )
    held = vars(next(module for module in model.modules() if isinstance(module, PreTrainedModel)))
    earlier = held.get(_ATTENTION, ())
    undo.callback(held.update, {_ATTENTION: earlier}) if earlier else undo.callback(held.pop, _ATTENTION, None)
    before = [(config, config._attn_implementation) for config in _configs(model)]
    for config, attention in before:
        undo.callback(_set_attention, config, attention)
    choose(name)
    first = {id(config): old for config, old, chosen in earlier if (config, chosen) in before}
    held[_ATTENTION] = [(config, first.get(id(config), old), config._attn_implementation) for config, old in before]


def _configs(model: torch.nn.Module) -> Iterator[PreTrainedConfig]:
    """The configs in which transformers keeps a model's attention: its own, and those of its towers."""
    seen: list[PreTrainedConfig] = []
    todo = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while todo:
        config = todo.pop()
        if isinstance(config, PreTrainedConfig) and not any(config is one for one in seen):
            seen.append(config)
            yield config
            todo += [getattr(config, name, None) for name in config.sub_configs]


def _set_attention(config: PreTrainedConfig, attention: str | None) -> None:
    config._attn_implementation_internal = attention  # the setter would overwrite the towers' own


def _is_generated(module: torch.nn.Module) -> bool:
    return any(cls.__module__.startswith(GENERATED) for cls in type(module).__mro__)
