"""What the generated modules themselves need; users want `opslot_models.adopt`."""

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from opslot import BindError, OpSlot, OpslotError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ._families import patches, twins, upstream_module
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
    head = OpSlot.weight_obstacle(model.get_output_embeddings())
    return own_loss(model) or (f"its head {head}" if head else None)


def codec_head_loss_obstacle(talker: Any) -> str | None:
    """As `loss_obstacle`, for a model whose head transformers does not know as its output embeddings."""
    head = OpSlot.weight_obstacle(talker.codec_head)
    return own_loss(talker) or (f"its codec_head {head}" if head else None)


def latent_obstacle(attention: Any) -> str | None:
    """Why no kernel may attend to the latents of this attention, or None: it reads a projection as a tensor."""
    chosen = attention.config._attn_implementation
    if chosen not in ("eager", "sdpa"):
        return f"its config has attn_implementation={chosen!r}, which attends to chosen keys by itself"
    projection = OpSlot.weight_obstacle(attention.kv_b_proj)
    return f"its kv_b_proj {projection}" if projection else None


def runs_sparse(attention: Any, mask: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel may run this call: it needs the mask, drops out nothing and returns no attention weights."""
    if attention.training and attention.attention_dropout:
        return False
    weights = kwargs.get("output_attentions", attention.config.output_attentions)
    return isinstance(mask, torch.Tensor) and not weights


def keys_in_mask(attention: Any, mask: torch.Tensor) -> torch.Tensor:
    """The columns that an additive mask [B, 1, S, T] lets a query see, as [B, S, K] indices that end in -1.

    K is what DeepSeek-V4 can let a query see at most, known without a look at the mask: its window, and with a
    compressor the entries that its indexer chooses, or all of them.
    """
    total, seen = mask.shape[-1], attention.sliding_window
    if attention.compressor is not None:
        indexer = getattr(attention.compressor, "indexer", None)
        seen += total if indexer is None else indexer.index_topk
    width = min(total, seen)
    allowed = (mask == 0).squeeze(1)
    # The n-th column that is allowed goes to place n, every other one to a last place that is cut off.
    places = torch.where(allowed, allowed.cumsum(-1) - 1, width)
    keys = torch.full((*allowed.shape[:-1], width + 1), -1, dtype=torch.long, device=mask.device)
    columns = torch.arange(total, device=mask.device).expand_as(places)
    return keys.scatter_(-1, places, columns)[..., :width]


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
    """A module whose class changes from upstream's to ours, by assignment, since its state stays."""

    name: str
    module: torch.nn.Module
    upstream: type
    ours: type

    def do(self) -> None:
        self.module.__class__ = self.ours
        if isinstance(self.module, PreTrainedModel):
            # transformers finds what to record (router logits) by the name of the class, and fills this only in
            # __init__. Past the mapping's own assignment, which takes a model in one release and a name in another.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(self.ours), self.module._can_record_outputs)

    def undo(self) -> None:
        self.module.__class__ = self.upstream


def plan_swaps(model: torch.nn.Module) -> tuple[Swap, ...]:
    """Every upstream module of a generated family below `model`. Nothing changes yet.

    Raises `BindError` for one that runs another forward than its class's, that FSDP has wrapped, or whose class is no
    longer upstream's own because something patched it; `OpslotError` where no family of the model can be served.
    """
    modules = list(model.named_modules())
    pairs = _twins_in({cls.__module__ for _, module in modules for cls in type(module).__mro__})
    swaps = tuple(
        Swap(name, module, type(module), pairs[type(module)]) for name, module in modules if type(module) in pairs
    )
    for swap in swaps:
        if getattr(swap.module, "_use_kernels", False):
            raise BindError(
                f"{swap.name or swap.upstream.__name__} runs under use_kernels, which replaces the forwards that call "
                "opslot's kernels: build it without"
            )
        if "forward" in vars(swap.module):
            raise BindError(
                f"{swap.name or swap.upstream.__name__} has a forward of its own ({vars(swap.module)['forward']!r}), "
                "which calls upstream's code and would never reach a kernel. Adopt before whatever wrapped it "
                "(accelerate, mixed precision, use_kernels)"
            )
    for name, module in modules:
        # fully_shard makes `FSDPX(FSDPModule, X)` of a module's class X.
        if type(module).__name__.startswith("FSDP") and type(module).__bases__[-1] in pairs:
            raise BindError(f"{name or type(module).__name__} is sharded already: adopt before fully_shard")
    for upstream, ours in {(swap.upstream.__module__, swap.ours.__module__) for swap in swaps}:
        patched = patches(sys.modules[upstream], sys.modules[ours])
        if patched:
            raise BindError(
                f"{upstream} is patched ({', '.join(patched)}), and the generated classes would silently run "
                "upstream's code instead. Choose between that patch and opslot"
            )
    return swaps


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
