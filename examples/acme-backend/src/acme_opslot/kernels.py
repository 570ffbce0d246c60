"""Acme's kernels. Imported by opslot when one of them is first bound."""

from typing import Any

import torch
from opslot.autograd import first_order


class _RMSNorm(torch.autograd.Function):
    """Saves x and one number per row, and normalises again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return weight * (x.float() * rstd).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        normalised = x.float() * rstd
        scaled = (grad * weight).to(x.dtype).float()
        grad_x = rstd * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True))
        grad_weight = (grad * normalised.to(x.dtype)).float().reshape(-1, x.shape[-1]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y.square()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * grad * y


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _ReluSquared.apply(x)
    return y
