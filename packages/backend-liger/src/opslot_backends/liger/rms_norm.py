"""rms_norm in Liger's kernel: a row in one block, a partial gradient of the weight for each multiprocessor."""

from typing import Any

import torch
from liger_kernel.ops.utils import calculate_settings
from opslot.autograd import first_order, has_addresses
from torch import Tensor

from ._function import refuse_long_rows
from ._implementation import chosen

# CuTe's fails for rows of one element, and elsewhere it does not launch: docs/results/*-h200-liger-cutedsl.json.
IMPLEMENTATION, (rms_norm_forward, rms_norm_backward) = chosen(
    "rms_norm", "liger_kernel.ops.rms_norm", ("rms_norm_forward", "rms_norm_backward")
)

# Liger's casting modes: what is rounded to x's dtype before the weight multiplies it, and what never is.
_LLAMA, _GEMMA = 0, 1


def implementation() -> str:
    return IMPLEMENTATION


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in Llama's order of casts."""
    if weight.dtype == x.dtype:
        return _apply(x, weight, eps, 0.0, _LLAMA)
    # Liger gives x's dtype where type promotion gives that of the product.
    return weight * _apply(x, None, eps, 0.0, _LLAMA)


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm whose weight multiplies before anything is rounded."""
    return _apply(x, weight, eps, 0.0, _GEMMA)


def rms_norm_zero_centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with 1 + weight, added in float32."""
    return _apply(x, weight, eps, 1.0, _GEMMA)


def rms_norm_unweighted(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight, rounded once."""
    return _apply(x, None, eps, 0.0, _GEMMA)


def _apply(x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: int) -> Tensor:
    refuse_long_rows(x.shape[-1], "rms_norm")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: a weight of shape {tuple(weight.shape)} for rows of {x.shape[-1]}")
    out: Tensor = _RMSNorm.apply(x, weight, eps, offset, mode)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: int) -> Tensor:
        compute = _forward if has_addresses(x, weight) else _forward_op
        out, rstd = compute(x, weight, eps, offset, mode)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.mode = offset, mode
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        compute = _backward if has_addresses(grad, x, weight) else _backward_op
        d_x, d_weight = compute(grad, x, weight, rstd, ctx.offset, ctx.mode, want_weight)
        return d_x if want_x else None, d_weight if want_weight else None, None, None, None


def _forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: int) -> tuple[Tensor, Tensor]:
    out, _, rstd, *_ = rms_norm_forward(
        x.contiguous(), None if weight is None else weight.contiguous(), eps, offset, mode, None
    )
    return out, rstd


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, mode: int, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, the second empty where there is none."""
    size = x.shape[-1]
    # Not in place of the incoming gradient: a residual beside the norm has the same one.
    in_place = False
    d_x, d_weight = rms_norm_backward(
        grad.contiguous(),
        x.contiguous().view(-1, size),
        None if weight is None else weight.contiguous(),
        rstd,
        offset,
        mode,
        *calculate_settings(size),
        in_place,
        None,
        needs_dw=want_weight,
    )
    return d_x, x.new_empty(0) if d_weight is None else d_weight


_forward_op = torch.library.custom_op("opslot_liger::rms_norm", _forward, mutates_args=())
_backward_op = torch.library.custom_op("opslot_liger::rms_norm_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: int) -> tuple[Tensor, Tensor]:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)


@_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, mode: int, want_weight: bool
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), x.new_empty(0) if weight is None or not want_weight else weight.new_empty(
        weight.shape
    )
