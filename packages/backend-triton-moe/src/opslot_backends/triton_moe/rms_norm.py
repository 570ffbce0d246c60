"""rms_norm/standard: one pass each way over rows of up to 8,192 elements, two over longer ones.

Saves x and one number a row. The gradient of the weight is summed in shares of the rows and then over the shares, in
their order.
"""

from typing import Any, NamedTuple

import torch
import triton
from opslot import KernelUnavailable
from opslot.autograd import first_order, has_addresses
from torch import Tensor

from ._kernels import norm as _kernels
from ._launch import device_of

# Elements of a row that one block holds; those of a longer row are read twice, in blocks of this many.
_WHOLE = 8192
# Elements of a tile: several short rows, or a block of a long one.
_TILE = 2048
# Of each thread, so that registers remain for several programs a multiprocessor; backward has more to keep of each.
_FORWARD, _BACKWARD = 16, 8
# Threads of a warp: on ROCm 32 warps would be 2,048 threads, where a program has at most 1,024.
_THREADS = 64 if torch.version.hip else 32
# Warps of all programs that share the rows in backward: the 32 of 64 registers for each multiprocessor of an H200.
_WARPS = 32 * 132
# Tiles of backward that are read at a time.
_STAGES = 2


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in Llama's order of casts; a row's results do not depend on the rows beside it."""
    if weight.dim() != 1 or weight.shape != x.shape[-1:] or not weight.numel():
        raise ValueError(
            "rms_norm/standard: triton needs a weight of [H] for rows of H, at least one, got "
            f"{list(weight.shape)} for x of {list(x.shape)}"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelUnavailable(
            f"rms_norm/standard: triton computes in float32, got a weight of {weight.dtype}: choose eager"
        )
    if weight.device != x.device:
        raise ValueError(f"rms_norm/standard: x is on {x.device}, the weight on {weight.device}")
    out: Tensor = _RMSNorm.apply(x, weight, float(eps))  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        compute = _forward if has_addresses(x, weight) else _forward_op
        out, scale = compute(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        compute = _backward if has_addresses(grad, x, weight) else _backward_op
        d_x, d_weight = compute(grad, x, weight, scale, want_x, want_weight)
        return d_x if want_x else None, d_weight if want_weight else None, None


class _Rows(NamedTuple):
    """Contiguous rows: row r of `tensor` begins at (r // period) * outer + (r % period) * inner.

    Triton compiles a kernel for whether addresses and strides are multiples of 16, and the order in which a row is
    summed follows from that. So here it depends on the length of a row alone: rows of a multiple of 16 begin at such
    addresses, others follow upon one another.
    """

    tensor: Tensor
    period: int
    outer: int
    inner: int

    @classmethod
    def of(cls, x: Tensor) -> "_Rows":
        size = x.shape[-1]
        if size % 16 == 0 and x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        if not x.is_contiguous():
            strides = _strides(x)
            if size % 16 == 0 and x.stride(-1) == 1 and len(strides) <= 2 and not any(s % 16 for _, s in strides):
                (period, inner), (_, outer) = (*strides, (1, 0), (1, 0))[:2]
                return cls(x, period, outer, inner)
            x = x.contiguous()
        return cls(x, max(1, x.numel() // size), 0, size)


def _strides(x: Tensor) -> list[tuple[int, int]]:
    """How many rows lie how far apart, the innermost first; dimensions that one stride goes through are one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * size, found[-1][1]
        elif size > 1:
            found.append((size, stride))
    return found


class _Blocks(NamedTuple):
    """A tile's rows and columns, and its warps: they depend on a row's length, never on how many rows there are."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, size: int, elements: int) -> "_Blocks":
        columns = min(triton.next_power_of_2(size), _WHOLE)
        rows = max(1, _TILE // columns)
        return cls(rows, columns, max(4, rows * columns // (_THREADS * elements)))


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and 1 / rms of each row."""
    size = x.shape[-1]
    count = x.numel() // size
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    rows, blocks = _Rows.of(x), _Blocks.of(size, _FORWARD)
    with device_of(x):
        _kernels.forward[(triton.cdiv(count, blocks.rows),)](
            rows.tensor,
            weight.contiguous(),
            out,
            scale,
            count,
            *rows[1:],
            size,
            eps,
            blocks.rows,
            blocks.columns,
            size <= _WHOLE,
            num_warps=blocks.warps,
        )
    return out, scale


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, each empty where it is not wanted."""
    size, count = x.shape[-1], scale.shape[0]
    blocks = _Blocks.of(size, _BACKWARD)
    programs = _WARPS // blocks.warps
    share = triton.cdiv(triton.cdiv(count, programs), blocks.rows) * blocks.rows
    programs = triton.cdiv(count, max(1, share))
    d_x = torch.empty(x.shape if want_x else 0, dtype=x.dtype, device=x.device)
    d_weight = torch.empty(size if want_weight else 0, dtype=weight.dtype, device=x.device)
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device) if want_weight else None
    given, rows, weight = _Rows.of(grad), _Rows.of(x), weight.contiguous()
    layout = *given[1:], *rows[1:], size, blocks.rows, blocks.columns
    with device_of(x):
        if size <= _WHOLE:
            _kernels.gradients[(programs,)](
                given.tensor,
                rows.tensor,
                weight,
                scale,
                d_x if want_x else None,
                partial,
                count,
                share,
                *layout,
                _STAGES,
                num_warps=blocks.warps,
            )
        else:
            if want_x:
                _kernels.gradient_of_long_rows[(triton.cdiv(count, blocks.rows),)](
                    given.tensor, rows.tensor, weight, scale, d_x, count, *layout, num_warps=blocks.warps
                )
            if partial is not None:
                _kernels.weight_gradient_of_long_rows[(programs, triton.cdiv(size, blocks.columns))](
                    given.tensor, rows.tensor, scale, partial, count, share, *layout, _STAGES, num_warps=blocks.warps
                )
        if partial is not None:
            _kernels.total[(triton.cdiv(size, 64),)](partial, d_weight, programs, size, 64, 64)
    return d_x, d_weight


_forward_op = torch.library.custom_op("opslot_triton_moe::rms_norm", _forward, mutates_args=())
_backward_op = torch.library.custom_op("opslot_triton_moe::rms_norm_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return out, x.new_empty(rows, dtype=torch.float32)


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if want_x else 0), weight.new_empty(weight.shape if want_weight else 0)
