"""Expert parallelism: transformers puts a forward of its own around that of the experts, which still runs inside."""

from typing import Any

from opslot import OpslotError, OpSlot
from transformers import PreTrainedModel

_DISTRIBUTED = "transformers.distributed."


def name_wrapped_forwards(model: PreTrainedModel) -> None:
    """Say of the forwards that transformers put around guarded experts what they wrap, as functools.wraps would.

    transformers swaps the tokens and the weights for those of this rank and calls the forward of the class in between,
    with the guard in it. Without `__wrapped__`, `bind` takes the guard for unreachable; with it, it looks for itself
    whether the wrapper holds that forward.
    """
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if forward is not None and forward.__module__.startswith(_DISTRIBUTED) and _has_guarded_forward(module):
            forward.__wrapped__ = type(module).forward


def refuse_new_weights(name: str) -> None:
    """transformers shards a checkpoint while it loads it, and has no way to shard a model with new weights."""
    raise OpslotError(
        f"{name} shards a checkpoint while it is loaded, and a config alone has no weights to load: save a new model "
        "once, build_foundation_model(config).save_pretrained(path), and then build_foundation_model(path, ops, "
        f"{name}=...) on every rank"
    )


def _has_guarded_forward(module: Any) -> bool:
    return isinstance(getattr(type(module), "moe_experts_op", None), OpSlot)
