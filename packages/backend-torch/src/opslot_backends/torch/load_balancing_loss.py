"""load_balancing_loss/standard: all layers at once, with a gradient in closed form.

Shapes: R rows, the tokens of all layers one after the other; E experts.
"""

from collections.abc import Sequence
from typing import Any

from opslot.autograd import first_order

import torch
from torch import Tensor

# Router logits that are computed together, in elements: the memory for them, in float32 and a few times over, stays
# small however many layers there are.
_GROUP = 2**24


def load_balancing_loss(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor | int:
    """Layers by the dozen instead of one by one. Keeps the logits, not their softmax."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    device = gate_logits[0].device
    weights = None
    if attention_mask is not None:
        tokens = attention_mask.numel()
        if attention_mask.dim() > 2 or any(logits.shape[0] != tokens for logits in gate_logits):
            raise ValueError(
                "load_balancing_loss/standard: torch needs attention_mask as [B, S] or [B * S], one weight a token of "
                f"every layer, got {list(attention_mask.shape)} for layers of "
                f"{sorted({logits.shape[0] for logits in gate_logits})} tokens"
            )
        weights = attention_mask.reshape(-1).to(device)
    layers = [logits.to(device) for logits in gate_logits]
    loss: Tensor = _Balance.apply(num_experts, top_k, weights, *layers)  # type: ignore[no-untyped-call]
    return loss


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # Not by name: torch 2.13's compiler, without gradients, counts parameters to tell whether there is a ctx, and
        # named ones before `*layers` are as many as the arguments when there are two layers.
        num_experts, top_k, weights, *layers = arguments
        exact = torch.promote_types(layers[0].dtype, torch.float32)
        counts, sums = layers[0].new_zeros(2, num_experts, dtype=exact)
        rows: Any = 0
        peaks = []
        for group in _groups(layers):
            logits = _stack(layers[group])
            largest, selected = logits.topk(top_k, dim=-1)
            peaks.append(largest[:, :1].clone())
            probabilities = _softmax(logits, peaks[-1])
            chosen = torch.zeros_like(logits).scatter_(1, selected, 1)
            if weights is not None:
                # Not as matrix products, which autocast would make in half precision.
                each = _for_rows(weights, logits)
                chosen, probabilities = chosen.mul_(each), probabilities.mul_(each)
            counts, sums = counts + chosen.sum(0), sums + probabilities.sum(0)
            rows = rows + (logits.shape[0] if weights is None else each.sum())
        slope = counts / rows / rows * num_experts
        ctx.save_for_backward(slope, weights, *peaks, *layers)
        ctx.groups = len(peaks)
        return torch.sum(slope * sums)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, weights, *rest = ctx.saved_tensors
        peaks, layers = rest[: ctx.groups], rest[ctx.groups :]
        slope = slope * grad
        gradients: list[Tensor] = []
        for group, peak in zip(_groups(layers), peaks, strict=True):
            probabilities = _softmax(_stack(layers[group]), peak)
            d_logits = probabilities.mul_(slope - (probabilities @ slope).unsqueeze(-1))
            if weights is not None:
                d_logits.mul_(_for_rows(weights, d_logits))
            gradients += torch.split(d_logits.to(layers[0].dtype), [logits.shape[0] for logits in layers[group]])
        return None, None, None, *gradients


def _groups(layers: Sequence[Tensor]) -> list[slice]:
    """Layers that are computed together: as many as fit in a bounded amount of memory, and one at least."""
    groups, start, size = [], 0, 0
    for number, logits in enumerate(layers):
        if size and size + logits.numel() > _GROUP:
            groups.append(slice(start, number))
            start, size = number, 0
        size += logits.numel()
    return [*groups, slice(start, len(layers))]


def _stack(layers: Sequence[Tensor]) -> Tensor:
    logits = torch.cat(tuple(layers))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _softmax(logits: Tensor, peak: Tensor) -> Tensor:
    """softmax, told each row's maximum: torch's own is slow on rows as short as these."""
    exponentials = (logits - peak).exp_()
    return exponentials.div_(exponentials.sum(-1, keepdim=True))


def _for_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """One layer's weights for the rows of a group of layers, as a column."""
    return weights.to(rows.dtype).repeat(rows.shape[0] // weights.shape[0]).unsqueeze(-1)
