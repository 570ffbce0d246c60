"""glu/swiglu: SwiGLU that keeps its two inputs and nothing else."""

from typing import Any

from opslot.autograd import first_order

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, whose backward computes silu(gate) again."""
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        want_gate, want_up = ctx.needs_input_grad
        d_gate = torch.ops.aten.silu_backward(grad * up, gate) if want_gate else None
        d_up = F.silu(gate) * grad if want_up else None
        return d_gate, d_up
