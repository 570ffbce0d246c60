"""load_balancing_loss/standard: all layers at once, with a gradient in closed form.

Shapes: R rows, the tokens of all layers one after the other; E experts.
"""

from typing import Any

import torch
from torch import Tensor

from ._autograd import first_order


def load_balancing_loss(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor | int:
    """The loss of all layers in a dozen operations, whatever their number. Keeps the logits, not their softmax."""
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
        weights = attention_mask.reshape(-1).to(device).repeat(len(gate_logits))
    layers = [logits.to(device) for logits in gate_logits]
    loss: Tensor = _Balance.apply(num_experts, top_k, weights, *layers)  # type: ignore[no-untyped-call]
    return loss


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_experts: int, top_k: int, weights: Tensor | None, *layers: Tensor) -> Tensor:
        probabilities = _probabilities(layers)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1)
        if weights is None:
            rows: int | Tensor = probabilities.shape[0]
            counts, sums = chosen.sum(0), probabilities.sum(0)
        else:
            weights = weights.to(probabilities.dtype)
            rows = weights.sum()
            counts, sums = weights @ chosen, weights @ probabilities
        slope = counts / rows / rows * num_experts
        ctx.save_for_backward(slope, weights, *layers)
        return slope @ sums

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, weights, *layers = ctx.saved_tensors
        slope = slope * grad
        probabilities = _probabilities(layers)
        d_logits = probabilities.mul_(slope - (probabilities @ slope).unsqueeze(-1))
        if weights is not None:
            d_logits.mul_(weights.unsqueeze(-1))
        parts = d_logits.split([logits.shape[0] for logits in layers])
        return None, None, None, *(part.to(logits.dtype) for part, logits in zip(parts, layers, strict=True))


def _probabilities(layers: Any) -> Tensor:
    logits = torch.cat(tuple(layers))
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
