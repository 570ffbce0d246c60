"""Root mean square normalisation of rows, in Triton, and its two gradients.

Names: H elements of a row. A tile is [R, B]: R rows, whose number depends on H alone, and B columns, all of a row where
WHOLE says so. So a row is summed in the same order whatever rows stand beside it; for that nothing is specialised on
their number either: for one row Triton would compile another kernel. Row r begins at
(r // PERIOD) * outer + (r % PERIOD) * inner, which is every view of heads and of merged projections.
"""

import triton
import triton.language as tl


@triton.jit
def _start(x, rows, PERIOD, outer, inner):
    return (x + (rows // PERIOD).to(tl.int64) * outer + (rows % PERIOD).to(tl.int64) * inner)[:, None]


@triton.jit
def _read(at, columns, mine, H):
    return tl.load(at + columns[None, :], mask=mine[:, None] & (columns < H)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _write(out, rows, columns, mine, H, value):
    at = out + rows[:, None].to(tl.int64) * H + columns[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=mine[:, None] & (columns < H)[None, :])


@triton.jit
def _weights(weight, columns, H):
    return tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["ROWS", "PERIOD"])
def forward(
    x,
    weight,
    out,  # [ROWS, H]
    scale,  # [ROWS], written: 1 / rms
    ROWS,
    PERIOD,
    outer,
    inner,
    H,
    eps,
    R: tl.constexpr,
    B: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """out = weight * (x * scale), the product in brackets rounded to x's dtype."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    mine = rows < ROWS
    columns = tl.arange(0, B)
    at = _start(x, rows, PERIOD, outer, inner)
    if WHOLE:
        value = _read(at, columns, mine, H)
        factor = tl.rsqrt(tl.sum(value * value, 1) / H + eps)
        normal = (value * factor[:, None]).to(x.dtype.element_ty).to(tl.float32)
        _write(out, rows, columns, mine, H, normal * _weights(weight, columns, H))
    else:
        squares = tl.zeros((R, B), tl.float32)
        for c in range(0, H, B):
            value = _read(at, c + columns, mine, H)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, 1) / H + eps)
        for c in range(0, H, B):
            normal = (_read(at, c + columns, mine, H) * factor[:, None]).to(x.dtype.element_ty).to(tl.float32)
            _write(out, rows, c + columns, mine, H, normal * _weights(weight, c + columns, H))
    tl.store(scale + rows, factor, mask=mine)


@triton.jit(do_not_specialize=["ROWS", "SHARE", "GRAD_PERIOD", "PERIOD"])
def gradients(
    grad,
    x,
    weight,
    scale,  # [ROWS]
    d_x,  # [ROWS, H] or None
    partial,  # [programs, H] or None, written: the program's share of the weight's gradient
    ROWS,
    SHARE,  # of the rows, for a program: a multiple of R
    GRAD_PERIOD,
    grad_outer,
    grad_inner,
    PERIOD,
    outer,
    inner,
    H,
    R: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_x = scale * (grad * weight - normal * mean(grad * weight * normal)), for rows that fit in one block."""
    columns = tl.arange(0, B)
    weights = _weights(weight, columns, H)
    total = tl.zeros((R, B), tl.float32)
    start = tl.program_id(0) * SHARE
    for first in tl.range(start, tl.minimum(start + SHARE, ROWS), R, num_stages=STAGES):
        rows = first + tl.arange(0, R)
        mine = rows < ROWS
        factor = tl.load(scale + rows, mask=mine, other=0.0)[:, None]
        normal = _read(_start(x, rows, PERIOD, outer, inner), columns, mine, H) * factor
        d = _read(_start(grad, rows, GRAD_PERIOD, grad_outer, grad_inner), columns, mine, H)
        if partial is not None:
            total += d * normal.to(x.dtype.element_ty).to(tl.float32)
        if d_x is not None:
            d *= weights
            mean = tl.sum(d * normal, 1)[:, None] / H
            _write(d_x, rows, columns, mine, H, (d - normal * mean) * factor)
    if partial is not None:
        tl.store(partial + tl.program_id(0).to(tl.int64) * H + columns, tl.sum(total, 0), mask=columns < H)


@triton.jit(do_not_specialize=["ROWS", "GRAD_PERIOD", "PERIOD"])
def gradient_of_long_rows(
    grad,
    x,
    weight,
    scale,
    d_x,
    ROWS,
    GRAD_PERIOD,
    grad_outer,
    grad_inner,
    PERIOD,
    outer,
    inner,
    H,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """d_x alone, in two passes."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    mine = rows < ROWS
    columns = tl.arange(0, B)
    at = _start(x, rows, PERIOD, outer, inner)
    grad_at = _start(grad, rows, GRAD_PERIOD, grad_outer, grad_inner)
    factor = tl.load(scale + rows, mask=mine, other=0.0)[:, None]
    products = tl.zeros((R, B), tl.float32)
    for c in range(0, H, B):
        d = _read(grad_at, c + columns, mine, H) * _weights(weight, c + columns, H)
        products += d * (_read(at, c + columns, mine, H) * factor)
    mean = tl.sum(products, 1)[:, None] / H
    for c in range(0, H, B):
        d = _read(grad_at, c + columns, mine, H) * _weights(weight, c + columns, H)
        normal = _read(at, c + columns, mine, H) * factor
        _write(d_x, rows, c + columns, mine, H, (d - normal * mean) * factor)


@triton.jit(do_not_specialize=["ROWS", "SHARE", "GRAD_PERIOD", "PERIOD"])
def weight_gradient_of_long_rows(
    grad,
    x,
    scale,
    partial,  # [programs, H], written
    ROWS,
    SHARE,
    GRAD_PERIOD,
    grad_outer,
    grad_inner,
    PERIOD,
    outer,
    inner,
    H,
    R: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The share of a run of rows, for B columns."""
    columns = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((R, B), tl.float32)
    start = tl.program_id(0) * SHARE
    for first in tl.range(start, tl.minimum(start + SHARE, ROWS), R, num_stages=STAGES):
        rows = first + tl.arange(0, R)
        mine = rows < ROWS
        factor = tl.load(scale + rows, mask=mine, other=0.0)[:, None]
        normal = _read(_start(x, rows, PERIOD, outer, inner), columns, mine, H) * factor
        d = _read(_start(grad, rows, GRAD_PERIOD, grad_outer, grad_inner), columns, mine, H)
        total += d * normal.to(x.dtype.element_ty).to(tl.float32)
    tl.store(partial + tl.program_id(0).to(tl.int64) * H + columns, tl.sum(total, 0), mask=columns < H)


@triton.jit
def total(partial, out, P, H, BP: tl.constexpr, B: tl.constexpr):
    """The sum of the P rows of `partial`, in their order."""
    columns = tl.program_id(0) * B + tl.arange(0, B)
    acc = tl.zeros((BP, B), tl.float32)
    for first in range(0, P, BP):
        rows = first + tl.arange(0, BP)
        at = partial + rows[:, None].to(tl.int64) * H
        acc += _read(at, columns, rows < P, H)
    tl.store(out + columns, tl.sum(acc, 0).to(out.dtype.element_ty), mask=columns < H)
