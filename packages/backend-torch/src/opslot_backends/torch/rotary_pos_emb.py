"""rotary_pos_emb/full: rotation of the two halves in place of the copies that rotate_half makes."""

from typing import Any

import torch
from torch import Tensor

from ._autograd import first_order


def rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary position embedding with a backward in closed form, which keeps neither q nor k."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return _rotate(q, cos, sin), _rotate(k, cos, sin)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # type: ignore[no-untyped-call]


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
        turned = sin.unflatten(-1, (2, -1)).flip(-2).neg_().flatten(-2)
        return _rotate(grad, cos, turned).to(ctx.dtype), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Halves as a dimension of their own: slices at D // 2 would be symbolic in a graph for any D, and torch 2.13 loses
    # such symbols between the two graphs of an autograd function.
    halves, sines = x.unflatten(-1, (2, -1)), sin.unflatten(-1, (2, -1))
    out = x * cos
    rotated = out.unflatten(-1, (2, -1))
    rotated[..., 0, :].addcmul_(halves[..., 1, :], sines[..., 0, :], value=-1)
    rotated[..., 1, :].addcmul_(halves[..., 0, :], sines[..., 1, :])
    return out
