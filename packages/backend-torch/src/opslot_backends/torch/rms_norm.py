"""rms_norm/standard: torch's fused RMSNorm where it has one, elsewhere a backward in closed form."""

from typing import Any

from opslot.autograd import first_order

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that saves x and one number a row. On CUDA, torch's own kernel."""
    if not x.is_cuda:
        out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out
    # Autocast would run this one in float32, and give float32 where upstream's own operations keep x.dtype.
    with torch.autocast("cuda", enabled=False):
        if x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return weight * F.rms_norm(x, weight.shape, None, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        if x.dtype == exact:
            scale = x.square().mean(-1, keepdim=True)
        else:
            # One pass without a copy in float32. Its root and the square of that cost roundings of float32, which are
            # nothing beside those of x.dtype.
            scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact).square_().div_(x.shape[-1])
        scale = scale.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normal: Tensor = (x * scale).to(x.dtype)
        # Not in place: compiled by torch 2.11, gradients would silently be those of another function.
        return normal * weight

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        normal = x * scale
        product = grad * normal
        d_x = d_weight = None
        if want_weight:
            d_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if x.dim() > 1 else product.to(weight.dtype)
        if want_x:
            weight = weight.to(normal.dtype)
            along = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
            d_x = torch.mul(grad, weight).sub_(normal.mul_(along)).mul_(scale).to(x.dtype)
        return d_x, d_weight, None
