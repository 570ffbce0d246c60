"""What the generated modules themselves need; users want `opslot_models.adopt`."""

from collections.abc import Iterator

import torch
from opslot import BindError
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ._families import families, twins


def adopt_backbone(head: torch.nn.Module) -> None:
    """Give the backbone of a generic head its generated classes: `AutoModel` has just built upstream's."""
    swap_classes(head)


def own_loss(model: PreTrainedModel) -> str | None:
    """Why no fused loss may run: it would bypass a loss function that is not the one it computes."""
    loss = model.loss_function
    if loss is ForCausalLMLoss:
        return None
    return f"its loss_function is {getattr(loss, '__qualname__', loss)!r}, which a fused loss would bypass"


def swap_classes(model: torch.nn.Module) -> tuple[str, ...]:
    """Switch every upstream module of a generated family to its generated class, in place; their names.

    Attributes, parameters, hooks and state dict stay as they are. All modules are judged before the first changes:
    `BindError` for one that runs another forward than its class's, or that FSDP has wrapped.
    """
    pairs = {upstream: ours for family in families() if _is_loaded(family) for upstream, ours in twins(family).items()}
    swaps = [(name, module, pairs[type(module)]) for name, module in model.named_modules() if type(module) in pairs]
    for name, module, _ in swaps:
        if "forward" in vars(module):
            raise BindError(
                f"{name or type(module).__name__} has a forward of its own ({vars(module)['forward']!r}), which calls "
                "upstream's code and would never reach a kernel. Adopt before whatever wrapped it (accelerate, "
                "mixed precision, use_kernels)"
            )
    for name, module in _sharded(model, pairs):
        raise BindError(f"{name or type(module).__name__} is sharded already: adopt before fully_shard")
    for _, module, ours in swaps:
        module.__class__ = ours
        if isinstance(module, PreTrainedModel):
            # transformers finds what to record (router logits) by class, and fills this only in __init__.
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs
    return tuple(name for name, _, _ in swaps)


def _is_loaded(family: str) -> bool:
    """Whether upstream's module is imported: without it no model of that family can exist."""
    import sys

    return f"transformers.models.{family}.modeling_{family}" in sys.modules


def _sharded(model: torch.nn.Module, pairs: dict[type, type]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        # fully_shard makes `FSDPX(FSDPModule, X)` of a module's class X.
        if type(module).__name__.startswith("FSDP") and type(module).__bases__[-1] in pairs:
            yield name, module
