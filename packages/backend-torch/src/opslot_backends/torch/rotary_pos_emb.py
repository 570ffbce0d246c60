"""rotary_pos_emb/full: rotation of the two halves in place of the copies that rotate_half makes."""

from typing import Any

from opslot.autograd import first_order

import torch
from torch import Tensor


def rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary position embedding with a backward in closed form, which keeps neither q nor k."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return _plain(q, cos, sin), _plain(k, cos, sin)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # type: ignore[no-untyped-call]


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """For tables that are learnt: differentiable in all its arguments."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The transpose of the rotation: the sines change sign, and each multiplies what it came from.
        return _rotate(grad, cos, torch.cat(sin.chunk(2, dim=-1)[::-1], dim=-1).neg_()).to(ctx.dtype), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Halves by chunk: a slice at D // 2 is symbolic in a graph for any D, and torch 2.13 loses such a symbol between
    # the two graphs of an autograd function.
    (first, second), (sin_first, sin_second) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    out = x * cos
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin_first, value=-1)
    out_second.addcmul_(first, sin_second)
    return out
