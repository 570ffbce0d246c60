"""glu/swiglu and glu/geglu_tanh in Liger's kernels, which keep the two inputs and compute the activation again."""

from collections.abc import Callable
from typing import Any

import torch
from opslot.autograd import first_order, has_addresses
from torch import Tensor

from ._function import refuse_long_rows, writable
from ._implementation import chosen

# CuTe's does not launch for no rows: docs/results/*-h200-liger-cutedsl.json.
SWIGLU_IMPLEMENTATION, (swiglu_forward, swiglu_backward) = chosen(
    "glu/swiglu", "liger_kernel.ops.swiglu", ("swiglu_forward", "swiglu_backward")
)
GEGLU_IMPLEMENTATION, (geglu_forward, geglu_backward) = chosen(
    "glu/geglu_tanh", "liger_kernel.ops.geglu", ("geglu_forward", "geglu_backward")
)

_Pair = tuple[Tensor, Tensor]


def swiglu_implementation() -> str:
    return SWIGLU_IMPLEMENTATION


def geglu_implementation() -> str:
    return GEGLU_IMPLEMENTATION


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _apply(gate, up, "glu/swiglu", _SwiGLU)


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its tanh form."""
    return _apply(gate, up, "glu/geglu_tanh", _GeGLU)


def _apply(gate: Tensor, up: Tensor, op: str, function: type[torch.autograd.Function]) -> Tensor:
    if gate.shape != up.shape:
        raise ValueError(f"{op}: gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    refuse_long_rows(gate.shape[-1], op)
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    out: Tensor = function.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up) if has_addresses(gate, up) else _swiglu_op(gate, up)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, swiglu_backward, _swiglu_backward_op)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _geglu(gate, up) if has_addresses(gate, up) else _geglu_op(gate, up)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, geglu_backward, _geglu_backward_op)


def _gradients(
    ctx: Any, grad: Tensor, in_place: Callable[..., _Pair], copying: Callable[..., _Pair]
) -> tuple[Tensor | None, ...]:
    if has_addresses(grad):
        # In a list, so that no name here holds what might be written over.
        pair = in_place(*(saved.contiguous() for saved in writable(list(ctx.saved_tensors))), grad.contiguous())
    else:
        pair = copying(*ctx.saved_tensors, grad)
    return tuple(d if wanted else None for d, wanted in zip(pair, ctx.needs_input_grad, strict=True))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = swiglu_forward(gate.contiguous(), up.contiguous())[2]
    return out


def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _copying(swiglu_backward, gate, up, grad)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = geglu_forward(gate.contiguous(), up.contiguous())[2]
    return out


def _geglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _copying(geglu_backward, gate, up, grad)


def _copying(in_place: Callable[..., _Pair], gate: Tensor, up: Tensor, grad: Tensor) -> _Pair:
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return in_place(*copies, grad.contiguous())


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(gate: Tensor, up: Tensor, grad: Tensor) -> _Pair:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


_swiglu_op = torch.library.custom_op("opslot_liger::swiglu", _swiglu, mutates_args=())
_swiglu_backward_op = torch.library.custom_op("opslot_liger::swiglu_backward", _swiglu_backward, mutates_args=())
_geglu_op = torch.library.custom_op("opslot_liger::geglu_tanh", _geglu, mutates_args=())
_geglu_backward_op = torch.library.custom_op("opslot_liger::geglu_tanh_backward", _geglu_backward, mutates_args=())
for _op in (_swiglu_op, _geglu_op):
    _op.register_fake(_fake)
for _op in (_swiglu_backward_op, _geglu_backward_op):
    _op.register_fake(_fake_backward)
