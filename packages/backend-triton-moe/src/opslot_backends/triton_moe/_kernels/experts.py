"""The products of the experts and what lies between them. Each is launched over all rows that there could be.

T tokens, K choices of each, S = T * K, H hidden, I intermediate, E experts; P rows, in tiles of BM of one expert each
(`_route`). Operands come through tensor descriptors (TMA on Hopper), which give zeros outside a tensor and store
nothing there, so no size needs to be a multiple of a block. The products are persistent: as many programs as the device
has multiprocessors take the tiles in turn, so that loads of one overlap stores of the one before.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(number, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows take turns, so that the weights of a column are still in the cache."""
    group = number // (GROUP * columns)
    within = number % (GROUP * columns)
    size = min(rows - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def _store(out, acc, row, column, BM: tl.constexpr, BN: tl.constexpr):
    """In two halves, since what a store stages takes the shared memory of one more stage of the loads."""
    left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
    out.store([row, column], left.to(out.dtype))
    out.store([row, column + BN // 2], right.to(out.dtype))


@triton.jit
def _clamp(gate, linear, limit):
    # As torch.clamp: a NaN stays one.
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    linear = tl.minimum(linear, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, tl.maximum(linear, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _activate(
    both,  # [BM, 2 * BN] where PAIRED, else [BM, 2, BN]
    hidden,
    active,
    weight,
    alpha,
    limit,
    offset,
    row,
    column,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAIRED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Store gate and up, and active."""
    both = both.to(active.dtype)
    if PAIRED:
        if KEEP:
            hidden.store([row, 2 * column], both)
        gate, linear = both.reshape(BM, BN, 2).split()
    else:
        gate, linear = both.permute(0, 2, 1).split()
        if KEEP:
            hidden.store([row, 0, column], gate.reshape(BM, 1, BN))
            hidden.store([row, 1, column], linear.reshape(BM, 1, BN))
    gate, linear = _clamp(gate.to(tl.float32), linear.to(tl.float32), limit)
    out = (linear + offset) * gate * tl.sigmoid(alpha * gate) * weight[:, None]
    active.store([row, column], out.to(active.dtype))


@triton.jit
def up(
    x,  # [T, H]
    w,  # [E, 2, I, H], or [E, H, 2I] where PAIRED
    bias,  # [E, 2I] where PAIRED
    hidden,  # [P, 2, I], or [P, 2I] where PAIRED
    active,  # [P, I]
    choice,
    weights,
    expert,
    tiles,
    alpha,
    limit,
    offset,
    S,
    H,
    INNER,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """hidden = x @ w, with rows gathered from the tokens, gate and up in one product; active is what `down` is given.

    active = (up + offset) * gate * sigmoid(alpha * gate) * routing weight, both clamped by `limit`.
    """
    columns = tl.cdiv(INNER, BN)
    count = tl.load(tiles)
    for number in tl.range(tl.program_id(0), count * columns, tl.num_programs(0), flatten=True):
        m, n = _tile(number, count, columns, GROUP)
        e = tl.load(expert + m)
        chosen = tl.load(choice + m * BM + tl.arange(0, BM))
        mine = chosen < S
        rows = x + tl.where(mine, chosen // K, 0)[:, None].to(tl.int64) * H + tl.arange(0, BK)[None, :]
        acc = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, H, BK):
            a = tl.load(rows + k, mask=(k + tl.arange(0, BK) < H)[None, :], other=0.0)
            if PAIRED:
                b = w.load([e, k, 2 * n * BN]).reshape(BK, 2 * BN)
            else:
                b = w.load([e, 0, n * BN, k]).reshape(2 * BN, BK).T
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if PAIRED:
            column = 2 * n * BN + tl.arange(0, 2 * BN)
            more = tl.load(bias + e.to(tl.int64) * 2 * INNER + column, mask=column < 2 * INNER, other=0.0)
            acc += more.to(tl.float32)[None, :]
        # A row of padding has read the first token, whose NaN would not be its own.
        acc = tl.where(mine[:, None], acc, 0.0)
        weight = tl.load(weights + tl.where(mine, chosen, 0)).to(tl.float32)
        weight = tl.where(mine, weight, 0.0)
        # In two halves of the columns, as in _store.
        if PAIRED:
            left, right = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        else:
            left, right = acc.reshape(BM, 2, 2, BN // 2).permute(0, 1, 3, 2).split()
        _activate(left, hidden, active, weight, alpha, limit, offset, m * BM, n * BN, BM, BN // 2, PAIRED, KEEP)
        _activate(
            right, hidden, active, weight, alpha, limit, offset, m * BM, n * BN + BN // 2, BM, BN // 2, PAIRED, KEEP
        )


@triton.jit
def product(
    a,  # [P, D]
    w,  # [E, N, D] where TRANSPOSED, else [E, D, N]
    bias,  # [E, N] where BIASED
    out,  # [P, N]
    choice,
    weights,
    expert,
    tiles,
    S,
    N,
    D,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """out = a @ w of each row's expert, plus its routing weight times the bias."""
    columns = tl.cdiv(N, BN)
    count = tl.load(tiles)
    for number in tl.range(tl.program_id(0), count * columns, tl.num_programs(0), flatten=True):
        m, n = _tile(number, count, columns, GROUP)
        e = tl.load(expert + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            rows = a.load([m * BM, k])
            if TRANSPOSED:  # noqa: SIM108  # Triton's ternary wants one type of both
                b = w.load([e, n * BN, k]).reshape(BN, BK).T
            else:
                b = w.load([e, k, n * BN]).reshape(BK, BN)
            acc = tl.dot(rows, b, acc, input_precision=PRECISION)
        if BIASED:
            chosen = tl.load(choice + m * BM + tl.arange(0, BM))
            weight = tl.load(weights + chosen, mask=chosen < S, other=0.0).to(tl.float32)
            column = n * BN + tl.arange(0, BN)
            more = tl.load(bias + e.to(tl.int64) * N + column, mask=column < N, other=0.0).to(tl.float32)
            acc += weight[:, None] * more[None, :]
        _store(out, acc, m * BM, n * BN, BM, BN)


@triton.jit
def weight_gradient(
    left,  # [P, M]
    right,  # [P, N]
    out,  # [E, M, N]
    first,
    size,
    E,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = left.T @ right over the rows of each expert, and zeros behind them; zeros for one without rows."""
    height = tl.cdiv(M, BM)
    width = tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), E * height * width, tl.num_programs(0)):
        e = number // (height * width)
        m = number % (height * width) // width
        n = number % width
        begin = tl.load(first + e)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(begin, begin + tl.load(size + e), BK):
            acc = tl.dot(left.load([k, m * BM]).T, right.load([k, n * BN]), acc, input_precision=PRECISION)
        one, other = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        out.store([e, m * BM, n * BN], one.to(out.dtype).reshape(1, BM, BN // 2))
        out.store([e, m * BM, n * BN + BN // 2], other.to(out.dtype).reshape(1, BM, BN // 2))


@triton.jit
def _is_read(row, choice, tiles, S, TILE: tl.constexpr, PAD: tl.constexpr):
    """Whether anything but a row of padding depends on a row: the gradients of weights read PAD rows at a time.

    Padding comes last, so PAD rows of which the first is padding have nothing else.
    """
    there = row < tl.load(tiles) * TILE
    return tl.load(choice + row // PAD * PAD, mask=there, other=S) < S


@triton.jit
def activation_gradient(
    grad,  # [P, I], of active before the routing weight
    hidden,  # [P, 2, I], or [P, 2I] where PAIRED
    d_hidden,  # written, as hidden: may be its memory
    active,  # [P, I], written: what the second product was given
    d_weights,  # [S], of float32; where PAIRED it holds the share of the bias already
    choice,
    weights,
    tiles,
    alpha,
    limit,
    offset,
    S,
    INNER,
    TILE: tl.constexpr,
    PAD: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The gradients of gate, up and routing weight, from that of their product; zeros for padding that is read."""
    start = tl.program_id(0) * BR
    if _is_read(start, choice, tiles, S, TILE, PAD):
        rows = start + tl.arange(0, BR)
        chosen = tl.load(choice + rows)
        mine = chosen < S
        weight = tl.load(weights + chosen, mask=mine, other=0.0).to(tl.float32)[:, None]
        total = tl.load(d_weights + chosen, mask=mine, other=0.0) if PAIRED else tl.zeros((BR,), tl.float32)
        at = rows[:, None].to(tl.int64) * INNER
        for c in range(0, INNER, BI):
            column = c + tl.arange(0, BI)[None, :]
            inside = mine[:, None] & (column < INNER)
            d = tl.load(grad + at + column, mask=inside, other=0.0).to(tl.float32)
            if PAIRED:
                both = 2 * c + tl.arange(0, 2 * BI)[None, :]
                pairs = tl.load(hidden + 2 * at + both, mask=mine[:, None] & (both < 2 * INNER), other=0.0)
                gate, linear = pairs.to(tl.float32).reshape(BR, BI, 2).split()
            else:
                gate = tl.load(hidden + 2 * at + column, mask=inside, other=0.0).to(tl.float32)
                linear = tl.load(hidden + 2 * at + INNER + column, mask=inside, other=0.0).to(tl.float32)
            # What lies exactly at the limit gets its gradient, as from torch.clamp.
            below = gate <= limit
            between = (linear <= limit) & (linear >= -limit)
            gate, linear = _clamp(gate, linear, limit)
            linear += offset
            sigmoid = tl.sigmoid(alpha * gate)
            swish = gate * sigmoid
            total += tl.sum(d * swish * linear, 1)
            d *= weight
            out = active.dtype.element_ty
            d_linear = tl.where(between, d * swish, 0.0).to(out)
            d_gate = tl.where(below, d * linear * sigmoid * (1 + alpha * gate * (1 - sigmoid)), 0.0).to(out)
            tl.store(active + at + column, (swish * linear * weight).to(out), mask=column < INNER)
            if PAIRED:
                tl.store(d_hidden + 2 * at + both, tl.join(d_gate, d_linear).reshape(BR, 2 * BI), mask=both < 2 * INNER)
            else:
                tl.store(d_hidden + 2 * at + column, d_gate, mask=column < INNER)
                tl.store(d_hidden + 2 * at + INNER + column, d_linear, mask=column < INNER)
        tl.store(d_weights + chosen, total, mask=mine)


@triton.jit
def dispatch(
    x,  # [T, W]
    out,  # [P, W], written: the token of each row, and zeros for padding that is read
    bias,  # [E, W] where BIASED
    along,  # [S], of float32, written where BIASED: row times bias
    choice,
    place,
    expert,
    tiles,
    T,
    S,
    W,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PAD: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    BIASED: tl.constexpr,
):
    """A program reads a token once and writes it K times; those behind the last token fill the padding of a tile."""
    program = tl.program_id(0)
    if program < T:
        source = x + program.to(tl.int64) * W
        for k in tl.static_range(K):
            row = tl.load(place + program * K + k)
            if row >= 0:
                target = out + row.to(tl.int64) * W
                total = 0.0
                for c in range(0, W, BW):
                    column = c + tl.arange(0, BW)
                    value = tl.load(source + column, mask=column < W, other=0.0)
                    tl.store(target + column, value, mask=column < W)
                    if BIASED:
                        shift = bias + tl.load(expert + row // TILE).to(tl.int64) * W
                        by = tl.load(shift + column, mask=column < W, other=0.0)
                        total += tl.sum(value.to(tl.float32) * by.to(tl.float32))
                if BIASED:
                    tl.store(along + program * K + k, total)
    elif program - T < tl.load(tiles):
        for start in range((program - T) * TILE, (program - T) * TILE + TILE, BR):
            row = start + tl.arange(0, BR)
            empty = tl.load(choice + row) >= S
            if (tl.max(empty.to(tl.int32)) > 0) & _is_read(start, choice, tiles, S, TILE, PAD):
                target = out + row[:, None].to(tl.int64) * W
                for c in range(0, W, BW):
                    column = c + tl.arange(0, BW)[None, :]
                    zeros = tl.zeros((BR, BW), out.dtype.element_ty)
                    tl.store(target + column, zeros, mask=empty[:, None] & (column < W))


@triton.jit
def combine(rows, place, out, W, K: tl.constexpr, BW: tl.constexpr):
    """out[token] = the sum of its rows, in float32 and in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    acc = tl.zeros((BW,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k).to(tl.int64)
        acc += tl.load(rows + row * W + column, mask=(column < W) & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * W + column, acc.to(out.dtype.element_ty), mask=column < W)


@triton.jit
def bias_gradient(
    rows,  # [P, W]
    out,  # [E, W]
    choice,
    weights,
    first,
    size,
    S,
    W,
    BR: tl.constexpr,
    BW: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """out = the sum of the rows of each expert, times their routing weights where WEIGHTED."""
    e = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)[None, :]
    begin = tl.load(first + e)
    acc = tl.zeros((BR, BW), tl.float32)
    for start in range(begin, begin + tl.load(size + e), BR):
        row = start + tl.arange(0, BR)
        value = tl.load(rows + row[:, None].to(tl.int64) * W + column, mask=column < W, other=0.0).to(tl.float32)
        if WEIGHTED:
            chosen = tl.load(choice + row)
            value *= tl.load(weights + chosen, mask=chosen < S, other=0.0).to(tl.float32)[:, None]
        acc += value
    total = tl.sum(acc, 0)[None, :]
    tl.store(out + e * W + column, total.to(out.dtype.element_ty), mask=column < W)
