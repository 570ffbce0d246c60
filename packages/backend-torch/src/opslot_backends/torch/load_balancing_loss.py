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
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # Not by name: torch 2.13's compiler, without gradients, counts parameters to tell whether there is a ctx, and
        # named ones before `*layers` are as many as the arguments when there are two layers.
        num_experts, top_k, weights, *layers = arguments
        logits = _stack(layers)
        largest, selected = logits.topk(top_k, dim=-1)
        peak = largest[:, :1]
        probabilities = _softmax(logits, peak)
        chosen = torch.zeros_like(logits).scatter_(1, selected, 1)
        if weights is None:
            rows: int | Tensor = logits.shape[0]
            counts, sums = chosen.sum(0), probabilities.sum(0)
        else:
            weights = weights.to(logits.dtype)
            rows = weights.sum()
            # Not as matrix products, which autocast would make in half precision.
            counts, sums = ((each * weights.unsqueeze(-1)).sum(0) for each in (chosen, probabilities))
        slope = counts / rows / rows * num_experts
        ctx.save_for_backward(slope, peak, weights, *layers)
        return torch.sum(slope * sums)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, peak, weights, *layers = ctx.saved_tensors
        slope = slope * grad
        probabilities = _softmax(_stack(layers), peak)
        d_logits = probabilities * (slope - (probabilities @ slope).unsqueeze(-1))
        if weights is not None:
            d_logits *= weights.unsqueeze(-1)
        parts = d_logits.split([logits.shape[0] for logits in layers])
        wanted = ctx.needs_input_grad[3:]
        gradients = [
            part.to(logits.dtype) if want else None for part, logits, want in zip(parts, layers, wanted, strict=True)
        ]
        return None, None, None, *gradients


def _stack(layers: Any) -> Tensor:
    logits = torch.cat(tuple(layers))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _softmax(logits: Tensor, peak: Tensor) -> Tensor:
    """softmax, told each row's maximum: torch's own is slow on rows as short as these."""
    exponentials = (logits - peak).exp_()
    return exponentials.div_(exponentials.sum(-1, keepdim=True))
