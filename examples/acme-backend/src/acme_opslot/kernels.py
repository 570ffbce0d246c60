"""Acme's kernels. Imported by opslot when one of them is first bound."""

from typing import Any

import torch


def _refuse_second_derivatives() -> None:
    # torch's once_differentiable leaves a kernel's share of a second derivative out, silently, below a plain loss.
    if torch.is_grad_enabled():
        raise RuntimeError("acme's kernels have no second derivative (create_graph=True): choose eager")


class _RMSNorm(torch.autograd.Function):
    """Saves x and one number per row, and normalises again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return weight * (x.float() * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        _refuse_second_derivatives()
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
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _refuse_second_derivatives()
        (y,) = ctx.saved_tensors
        return 2 * grad * y


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _ReluSquared.apply(x)
    return y
