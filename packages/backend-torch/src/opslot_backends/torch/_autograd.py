"""What the custom autograd functions of this backend share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Tensor | tuple[Tensor | None, ...]]


def is_watched() -> bool:
    """Whether the compiler traces this call, or a dispatch mode sees its operators.

    Such a mode may keep what an operator returned, as selective checkpointing does: it must not be written to.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would take `tensor`: autocast's where that is on, else its own.

    A custom autograd function hides its products from autocast, so the kernels cast as autocast would have.
    """
    kind = tensor.device.type
    # Autocast leaves float64 alone, and the meta device has none.
    if kind != "meta" and torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def first_order(backward: Backward) -> Backward:
    """A backward without autocast, which refuses `create_graph=True`.

    Forward has chosen its dtypes, and backward keeps to them wherever it is called. As for second derivatives, torch's
    `once_differentiable` refuses only when the incoming gradient itself requires one. When that is a constant, as below
    a loss, a second derivative silently lacks the share of this function.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__module__} has no second derivative (create_graph=True): choose eager for this op"
            )
        if gradients[0].is_meta:
            return backward(ctx, *gradients)
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return checked
