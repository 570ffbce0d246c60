"""Adopting: give slots to a stock transformers model that exists already."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opslot import BindError, Binding, OpsConfig, bind

from ._families import families
from .adoption import swap_classes


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
) -> Adoption:
    """Switch a stock transformers model to its generated classes in place, and bind the kernels that `ops` chooses.

    The model keeps its attributes, parameters and state dict, so Trainer, PEFT and FSDP scripts go on as they were; do
    it before FSDP shards the model or accelerate prepares it. A user's own subclass of a model class keeps its
    class: its inner modules get slots, and `Adoption.left` names what did not.

    `ops` and `device` are those of `opslot.bind`. Raises `BindError` when nothing in the model has a generated class.
    When binding fails, the model has its new classes, which run upstream's code, and no kernel is bound.
    """
    config = OpsConfig.parse(ops)
    swapped = swap_classes(model)
    left = tuple(_left(model))
    set_attention: Any = getattr(model, "set_attn_implementation", None)
    if config.attn_implementation is not None and set_attention is not None:
        set_attention(config.attn_implementation)
    if not swapped and not any(_is_generated(module) for module in model.modules()):
        raise BindError(
            f"{type(model).__name__} has no module of a generated family; there are: {', '.join(families())}"
        )
    return Adoption(bind(model, config, device=device), swapped, left)


def _is_generated(module: torch.nn.Module) -> bool:
    return any(cls.__module__.startswith("opslot_models.generated.") for cls in type(module).__mro__)


def _left(model: torch.nn.Module) -> list[str]:
    """Modules that upstream's modeling code, or a subclass of it, still runs."""
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.startswith("transformers.models.") and ".modeling_" in cls.__module__:
                names[f"{name or 'the model'} ({type(module).__name__})"] = None
    return list(names)
