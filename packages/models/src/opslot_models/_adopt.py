"""Adopting: give slots to a stock transformers model that exists already."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from opslot import BindError, Binding, OpsConfig, bind, registry

from ._attention import choosing_attention
from ._families import GENERATED, families
from .adoption import plan_swaps


@dataclass(frozen=True)
class Adoption:
    """What `adopt` did: the binding, the modules that have slots now, and upstream's modules that have none."""

    binding: Binding
    swapped: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(self.binding), f"  adopted {len(self.swapped)} modules"]
        if self.left:
            lines.append(f"  left as they are, without slots: {', '.join(self.left)}")
        return "\n".join(lines)


def adopt(
    model: torch.nn.Module,
    ops: OpsConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    device: Any = None,
    probe: bool | None = None,
) -> Adoption:
    """Switch a stock transformers model to its generated classes in place, and bind the kernels that `ops` chooses.

    The model keeps its attributes, parameters and state dict, so Trainer, PEFT and FSDP scripts go on as they were; do
    it before FSDP shards the model or accelerate prepares it. A user's own subclass of a model class keeps its
    class: its inner modules get slots, and `Adoption.left` names what did not.

    `ops`, `device` and `probe` are those of `opslot.bind`. Raises `BindError` when nothing in the model has a generated
    class, or something has patched upstream's, `OpslotError` when its families are not served for the installed
    transformers, and what `opslot.bind` raises. After an error the model is as it was.
    """
    config = OpsConfig.effective(ops)
    config.rules(registry())
    swaps = plan_swaps(model)
    if not swaps and not any(_is_generated(module) for module in model.modules()):
        raise BindError(
            f"{type(model).__name__} has no module of a generated family; there are: {', '.join(families())}"
        )
    with ExitStack() as undo:
        for swap in swaps:
            undo.callback(swap.undo)
            swap.do()
        attention, _ = config.setting("attn_implementation")
        if attention is not None:
            with choosing_attention(config):
                undo.callback(_set_attention(model, attention))
        binding = bind(model, config, device=device, probe=probe)
        adoption = Adoption(binding, tuple(swap.name for swap in swaps), tuple(_left(model)))
        undo.pop_all()
    return adoption


def _set_attention(model: torch.nn.Module, name: str) -> Callable[[], None]:
    """Choose transformers' attention; returns what sets it back."""
    choose: Any = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise BindError(
            f"{type(model).__name__} cannot choose attention {name!r}: set it on the transformers model inside"
        )
    before = cast(Any, model).config._attn_implementation
    choose(name)
    return partial(choose, before)


def _is_generated(module: torch.nn.Module) -> bool:
    return any(cls.__module__.startswith(GENERATED) for cls in type(module).__mro__)


def _left(model: torch.nn.Module) -> list[str]:
    """Modules that upstream's modeling code, or a subclass of it, still runs."""
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.startswith("transformers.models.") and ".modeling_" in cls.__module__:
                names[f"{name or 'the model'} ({type(module).__name__})"] = None
    return list(names)
