"""What the generated modules themselves need; users want `opslot_models.adopt`."""

import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from opslot import BindError, OpSlot, OpslotError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ._distributed import expert_dispatchers, is_of_transformers
from ._families import GENERATED, patches, twins, upstream_module
from ._sets import known_families


def adopt_backbone(head: torch.nn.Module) -> None:
    """Give the backbone of a generic head its generated classes: `AutoModel` has just built upstream's."""
    for swap in plan_swaps(head):
        swap.do()


def no_hub_kernels(model: PreTrainedModel, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
    """In place of `set_use_kernels`, which replaces the forwards in which the guards stand."""
    if use_kernels:
        raise BindError(
            f"use_kernels would replace forwards inside {type(model).__name__}, and kernels bound there would never "
            "run. Choose kernels with opslot, or use_kernels on a model from transformers"
        )
    PreTrainedModel.set_use_kernels(model, use_kernels, *args, **kwargs)


def own_loss(model: PreTrainedModel) -> str | None:
    """Why no fused loss may run: it would bypass a loss function that is not the one it computes."""
    loss = model.loss_function
    if loss is ForCausalLMLoss:
        return None
    return f"its loss_function is {getattr(loss, '__qualname__', loss)!r}, which a fused loss would bypass"


def loss_obstacle(model: PreTrainedModel) -> str | None:
    """Why no fused loss may be bound: the loss is the user's own, or the head does more than its weight says."""
    head = _linear_obstacle(model.get_output_embeddings())
    return own_loss(model) or (f"its head {head}" if head else None)


def codec_head_loss_obstacle(talker: Any) -> str | None:
    """As `loss_obstacle`, for a model whose head transformers does not know as its output embeddings."""
    head = _linear_obstacle(talker.codec_head)
    return own_loss(talker) or (f"its codec_head {head}" if head else None)


def sparse_obstacle(attention: Any) -> str | None:
    """Why no kernel may attend to chosen keys here, or None: the user has chosen another attention than upstream's."""
    chosen = attention.config._attn_implementation
    return None if chosen in _DENSE else f"its config has attn_implementation={chosen!r}, which a kernel would bypass"


def latent_obstacle(attention: Any) -> str | None:
    """As `sparse_obstacle`, for a kernel that reads the projection of the latents as a tensor."""
    projection = _linear_obstacle(attention.kv_b_proj)
    return sparse_obstacle(attention) or (f"its kv_b_proj {projection}" if projection else None)


# Upstream's own, in which it masks what was not chosen.
_DENSE = ("eager", "sdpa")


def runs_sparse(attention: Any, mask: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel may run this call: it needs the mask, drops out nothing and returns no attention weights."""
    if (attention.training and attention.attention_dropout) or attention.config._attn_implementation not in _DENSE:
        return False
    weights = kwargs.get("output_attentions", attention.config.output_attentions)
    return isinstance(mask, torch.Tensor) and not weights


def plain_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask as a kernel takes it: one that adds anything but 0 or the lowest value is an error, on the device."""
    if mask.is_floating_point():
        plain = (mask == 0) | (mask <= torch.finfo(torch.float16).min)
        torch._assert_async(plain.all(), "a kernel of dsa_attention takes no bias in the attention mask: choose eager")
    return mask


def keys_in_mask(attention: Any, mask: torch.Tensor, batch: int) -> torch.Tensor:
    """The columns that an additive mask [B or 1, 1, S, T] lets a query see, as [B, S, K] indices that end in -1.

    K is what DeepSeek-V4 can let a query see at most, known without a look at the mask: its window, and with a
    compressor the entries that its indexer chooses, or all of them. A mask that shows more is an error, on the device.
    """
    total, seen = mask.shape[-1], attention.sliding_window
    if attention.compressor is not None:
        indexer = getattr(attention.compressor, "indexer", None)
        seen += total if indexer is None else indexer.index_topk
    width = min(total, seen)
    allowed = (plain_mask(mask) == 0).squeeze(1)
    count = allowed.cumsum(-1)
    torch._assert_async(
        (count[..., -1] <= width).all(),
        "the attention mask shows more keys than a window of DeepSeek-V4: choose dsa_attention: eager",
    )
    # The n-th column that is allowed goes to place n, every other one to a last place that is cut off.
    places = torch.where(allowed, count - 1, total)
    keys = torch.full((*allowed.shape[:-1], total + 1), -1, dtype=torch.long, device=mask.device)
    columns = torch.arange(total, device=mask.device).expand_as(places)
    return keys.scatter_(-1, places, columns)[..., :width].expand(batch, -1, -1)


def convolution_obstacle(net: Any) -> str | None:
    """Why no kernel may convolve here, or None: it knows SiLU alone."""
    known = net.activation in (None, "silu", "swish")
    return None if known else f"its activation is {net.activation!r}, and kernels compute SiLU"


def packs_alike(net: Any, kwargs: Mapping[str, Any]) -> bool:
    """Always true: raises `BindError` for packed sequences that one of the layer's two ops would run together.

    Upstream's convolution takes sequences apart by `seq_idx` and where it has a library for it, kernels by
    `cu_seq_lens_q`; the delta rule takes that in both.
    """
    convolves, packed = net.causal_conv1d_op.kernel is not None, kwargs.get("cu_seq_lens_q") is not None
    indexed = kwargs.get("seq_idx") is not None
    if packed and not convolves and not indexed and net.chunk_gated_delta_rule_op.kernel is not None:
        raise BindError(
            f"packed sequences (cu_seq_lens_q) reach {type(net).__name__} with a kernel of chunk_gated_delta_rule and "
            "none of causal_conv1d, which would run over their ends: choose a kernel for causal_conv1d too"
        )
    if indexed and not packed and convolves:
        raise BindError(
            f"seq_idx without cu_seq_lens_q reaches {type(net).__name__}, whose kernel of causal_conv1d takes packed "
            "sequences apart by cu_seq_lens_q alone: pass it too, or choose causal_conv1d: eager"
        )
    return True


def _linear_obstacle(linear: Any) -> str | None:
    """`OpSlot.weight_obstacle`, but for a weight that FSDP2 has sharded with its model: it is whole at the call.

    One that is still a `DTensor` there, as under tensor parallelism, raises at the call.
    """
    problem = OpSlot.weight_obstacle(linear)
    weight = getattr(linear, "weight", None)
    if isinstance(weight, DTensor) and getattr(linear, "_is_fsdp_managed_module", False):
        return None if problem == f"has a weight {OpSlot.tensor_obstacle(weight)}" else problem
    return problem


def experts_obstacle(experts: torch.nn.Module) -> str | None:
    """Why no kernel may be bound to read these experts' weights, or None. What FSDP shards is whole at the call."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        problem = None if isinstance(weight, DTensor) else OpSlot.tensor_obstacle(weight)
        if problem:
            return f"its {name} is {problem}"
    return None


def interleave_obstacle(attention: torch.nn.Module) -> str | None:
    """Why no rotation of neighbours may be bound: the config chooses that of halves, which has no guard."""
    config: Any = attention.config
    chosen = config.rope_interleave
    return None if chosen else f"its config has rope_interleave={chosen!r}, which rotates halves"


@dataclass(frozen=True)
class Swap:
    """A module whose class changes by assignment, between upstream's and ours, since its state stays."""

    name: str
    module: torch.nn.Module
    old: type
    new: type

    def do(self) -> None:
        self._assign(self.new)

    def undo(self) -> None:
        self._assign(self.old)

    def _assign(self, cls: type) -> None:
        dispatchers = expert_dispatchers(self.module)
        self.module.__class__ = cls
        for dispatcher in dispatchers:
            dispatcher.experts_forward = MethodType(cls.forward, self.module)  # type: ignore[attr-defined]
            vars(self.module)["forward"].__wrapped__ = cls.forward  # type: ignore[attr-defined]  # for bind to see
        if isinstance(self.module, PreTrainedModel):
            # transformers finds what to record (router logits) by the class's name, and fills this only in __init__. By
            # `update`, since item assignment takes the name in 5.17 and the model in 5.24.
            _CAN_RECORD_REGISTRY.update({str(cls): self.module._can_record_outputs})


def plan_swaps(model: torch.nn.Module) -> tuple[Swap, ...]:
    """Every upstream module of a generated family below `model`. Nothing changes yet.

    Raises `BindError` for one that runs another forward than its class's, that something has compiled or wrapped, or
    whose class is no longer upstream's own because something patched it; `OpslotError` where no family of the model can
    be served.
    """
    modules = list(model.named_modules())
    pairs = _twins_in({cls.__module__ for _, module in modules for cls in type(module).__mro__})
    swaps = tuple(_swaps(modules, pairs))
    for swap in swaps:
        if getattr(swap.module, "_use_kernels", False):
            raise BindError(
                f"{_place(swap)} runs under use_kernels, which replaces the forwards that call opslot's kernels: build "
                "it without"
            )
        remedy = "Adopt before whatever wrapped it (accelerate, mixed precision, use_kernels, tensor parallelism)"
        if hasattr(swap.module, "_hf_hook"):
            remedy += ". What device_map does, build_foundation_model(path, ops, device_map=...) does with slots"
        elif is_of_transformers(vars(swap.module).get("forward")):
            remedy += ". build_foundation_model(path, ops, distributed_config=...) puts slots inside of it"
        _refuse_own_forward(swap, f"which calls upstream's code and would never reach a kernel. {remedy}")
    _refuse_wrappers(modules, swaps)
    for theirs, ours in {(own_class(swap.old).__module__, own_class(swap.new).__module__) for swap in swaps}:
        patched = patches(sys.modules[theirs], sys.modules[ours])
        if patched:
            raise BindError(
                f"{theirs} is patched ({', '.join(patched)}), and the generated classes would silently run "
                "upstream's code instead. Choose between that patch and opslot"
            )
    return swaps


def plan_restore(model: torch.nn.Module) -> tuple[Swap, ...]:
    """The way back of `plan_swaps`: every module of a generated class below `model`. Nothing changes yet.

    Raises `BindError` where upstream's class would not run: a forward that still calls ours, a class that something has
    derived from ours or put in the place of upstream's.
    """
    modules = list(model.named_modules())
    found = {cls for _, module in modules for cls in type(module).__mro__ if cls.__module__.startswith(GENERATED)}
    families = {cls.__module__.rpartition(".modeling_")[2] for cls in found}
    pairs = {ours: theirs for family in families for theirs, ours in twins(family).items()}
    swaps = tuple(_swaps(modules, pairs))
    for swap in swaps:
        _refuse_own_forward(swap, "which calls the generated code: undo what set it, then unadopt")
    for name, module in modules:
        if type(module) in found and type(module) not in pairs:
            raise BindError(
                f"{name or 'the model'} has the generated class {type(module).__name__}, and upstream's class of that "
                "name is not its own any more: undo what replaced it, then unadopt"
            )
        if torch.nn.utils.parametrize.is_parametrized(module) and found.intersection(type(module).__mro__):
            raise BindError(
                f"{name or 'the model'} is parametrised, by a class that derives from the generated one: "
                "torch.nn.utils.parametrize.remove_parametrizations(...) first, then unadopt"
            )
    return swaps


def _swaps(modules: list[tuple[str, torch.nn.Module]], pairs: Mapping[type, type]) -> Iterator[Swap]:
    for name, module in modules:
        cls = own_class(type(module))
        if cls in pairs:
            new = pairs[cls] if type(module) is cls else _sharded(type(module), pairs[cls])
            yield Swap(name, module, type(module), new)


def own_class(cls: type) -> type:
    """Of a module that `fully_shard` has given the class `FSDPX(FSDPModule, X)`: X. Of any other, `cls` itself."""
    return cls.__bases__[1] if len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], FSDPModule) else cls


# What `fully_shard` made of a class -> what it would make of its twin, and back: unadopting leads to the same class.
_SHARDED: dict[type, type] = {}


def _sharded(cls: type, twin: type) -> type:
    if cls not in _SHARDED:
        other = type(cls.__name__, (cls.__bases__[0], twin), {"__deepcopy__": vars(cls)["__deepcopy__"]})
        _SHARDED[cls], _SHARDED[other] = other, cls
    return _SHARDED[cls]


def _place(swap: Swap) -> str:
    return swap.name or own_class(swap.old).__name__


def _refuse_own_forward(swap: Swap, why: str) -> None:
    forward = vars(swap.module).get("forward")
    if forward is not None and not expert_dispatchers(swap.module):
        # Not its repr: that of a bound method prints the whole model.
        function = getattr(forward, "func", forward)
        named = getattr(function, "__qualname__", type(function).__name__)
        raise BindError(f"{_place(swap)} has a forward of its own ({named}), {why}")


# By name: none of them need be installed, and importing them costs.
_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "torch.distributed._composable.replicate",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "DeepSpeedEngine": "deepspeed.initialize",
}


def _refuse_wrappers(modules: list[tuple[str, torch.nn.Module]], swaps: tuple[Swap, ...]) -> None:
    """What has compiled a model, or keeps references into it, was made for the classes that it had."""
    swapped = {id(swap.module) for swap in swaps}
    for name, module in modules:
        wrapper = next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is None and getattr(module, "_compiled_call_impl", None) is not None:
            wrapper = "torch.compile"
        if wrapper and any(id(inner) in swapped for inner in module.modules()):
            raise BindError(
                f"{name or 'the model'} ({type(module).__name__}) is wrapped by {wrapper} already: "
                f"adopt before wrapping: adopt(model, ops) first, then {wrapper}"
            )


def _twins_in(present: Set[str]) -> dict[type, type]:
    """Upstream's class -> ours, for the families whose upstream module is one of `present`.

    A family that cannot be served does not stop another: its modules stay upstream's, and `adopt` lists them.
    """
    pairs: dict[type, type] = {}
    refusals = []
    for family in known_families():
        if upstream_module(family) in present:
            try:
                pairs |= twins(family)
            except OpslotError as error:
                refusals.append(error)
    if refusals and not pairs:
        raise refusals[0]
    return pairs
