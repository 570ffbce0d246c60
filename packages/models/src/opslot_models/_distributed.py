"""Expert parallelism: transformers puts a forward of its own around that of the experts, which still runs inside."""

import inspect
from types import MethodType
from typing import Any

from opslot import BindError, OpSlot, OpslotError
from transformers import PreTrainedModel

# With these transformers shards the weights while it loads them.
SHARDING = frozenset({"distributed_config", "tp_plan", "tp_size"})


def name_wrapped_forwards(model: PreTrainedModel) -> None:
    """Say of the forwards that transformers put around guarded experts what they wrap, as functools.wraps would.

    They swap tokens and weights for those of this rank and call the forward of the class in between, with its guard.
    Without `__wrapped__`, `bind` takes the guard for unreachable; with it, `bind` looks for itself whether the wrapper
    holds that forward.
    """
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if is_of_transformers(forward) and _slot(module) is not None:
            forward.__wrapped__ = type(module).forward


def is_of_transformers(forward: Any) -> bool:
    """Whether this comes from where `distributed_config` takes what it puts on modules."""
    return str(getattr(forward, "__module__", "")).startswith("transformers.distributed.")


def expert_dispatchers(module: Any) -> list[Any]:
    """What brings these experts their tokens and calls the forward of their class, as its attribute `experts_forward`.

    Empty where transformers put no such forward on the module (5.17 keeps the inner one elsewhere), where something
    stands in between, or where the implementation is not transformers' own and may keep the forward in more places.
    """
    forward = vars(module).get("forward")
    if not is_of_transformers(forward):
        return []
    outer = inspect.getclosurevars(forward).nonlocals.get("implementation")
    if not is_of_transformers(type(outer)):
        return []
    held = [one for one in (outer, *vars(outer).values()) if hasattr(one, "experts_forward")]
    # A bound method: in a deep copy of the model it still belongs to the module that was copied.
    own = MethodType(type(module).forward, module)
    return held if all(one.experts_forward == own for one in held) else []


def refuse_new_weights(name: str) -> None:
    """Raise: transformers shards a checkpoint while it loads it, and a model with new weights in no way."""
    raise OpslotError(
        f"{name} shards a checkpoint while it is loaded, and a config alone has no weights to load. Save a new model "
        "once, build_foundation_model(config).save_pretrained(path), then call build_foundation_model(path, ops, "
        f"{name}=...) on every rank"
    )


def refuse_disconnected_experts(model: PreTrainedModel) -> None:
    """Raise `BindError` where a rank whose experts no token chose would leave the collectives of backward to others.

    With "all_reduce" each rank sums in backward what all ranks have, as far as autograd leads there. Upstream's loop
    over experts returns new zeros when none was chosen, which leads nowhere; its other implementations and opslot's
    kernels return what depends on their inputs. With "all_to_all" a rank runs at least one token.
    """
    config: Any = model.config
    distributed = getattr(config, "distributed_config", None)
    # 5.17 has no other implementation, and no field for it.
    if not getattr(distributed, "enable_expert_parallel", False) or config._experts_implementation != "eager":
        return
    if getattr(distributed, "ep_implementation", "all_reduce") != "all_reduce":
        return
    for name, module in model.named_modules():
        slot = _slot(module)
        if slot is not None and slot.kernel is None:
            raise BindError(
                f"{name} would run upstream's loop over experts under expert parallelism by all_reduce, where a rank "
                "whose experts no token chose takes no part in the collectives of backward: the others hang, or add "
                f"up what does not belong together. Choose a kernel ({slot.op}: torch), "
                "experts_implementation='grouped_mm', or ep_implementation='all_to_all'"
            )


def _slot(module: Any) -> OpSlot | None:
    slot = getattr(module, "moe_experts_op", None)
    return slot if isinstance(slot, OpSlot) else None
