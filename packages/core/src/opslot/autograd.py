"""What the custom autograd functions of kernels share: autocast, second derivatives, and who looks on.

from opslot.autograd import first_order, has_addresses, is_watched, matmul_dtype
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_order", "has_addresses", "is_watched", "matmul_dtype"]

Gradients = Tensor | tuple[Tensor | None, ...] | None


def is_watched() -> bool:
    """Whether the compiler traces this call, or a dispatch mode sees its operators: go through a custom operator then.

    A mode may keep what an operator returned, as selective checkpointing does: it must not be written to. Nor does a
    mode see what a kernel writes through an address.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def has_addresses(*tensors: Tensor | None) -> bool:
    """Whether a kernel that takes addresses, as Triton's do, can be launched with these.

    Only plain tensors with data have one. Others (under torch.compile, FakeTensor, on the meta device, DTensor) go
    through a custom operator, which computes their shapes, or for a DTensor refuses since it has no sharding rule. So
    does everything under a dispatch mode (see `is_watched`).
    """
    return not is_watched() and all(
        t is None or (type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta) for t in tensors
    )


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would take `tensor`: autocast's where that is on, else its own.

    A custom autograd function hides its products from autocast, so the kernels cast as autocast would have.
    """
    kind = tensor.device.type
    # Autocast leaves float64 alone, and the meta device has none.
    if kind != "meta" and torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Any]:
    """Decorate the backward of a `torch.autograd.Function`: outside autocast, and refusing a second derivative.

    Forward has chosen its dtypes, and backward keeps to them wherever it is called. As for second derivatives, torch's
    `once_differentiable` refuses only where the incoming gradient itself requires one. Where that is a constant, as
    below a loss, a second derivative silently lacks the share of this function.

    Raises `RuntimeError`, from backward, under `create_graph=True`.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__module__} has no second derivative (create_graph=True): choose eager for this op"
            )
        first = gradients[0]
        # There is none below a function that gave none, where a forward asked for that: it has nothing to compute.
        if first is None or first.is_meta:
            return backward(ctx, *gradients)
        with torch.autocast(first.device.type, enabled=False):
            return backward(ctx, *gradients)

    return checked
