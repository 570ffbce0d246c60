"""The products and what lies between them, in Triton. Each is launched over all rows or tiles that there could be.

Names: T tokens, K choices, H hidden, I intermediate, E experts; P rows, in tiles of BM of one expert each (`_route`).
Operands come through tensor descriptors (TMA on Hopper), which give zeros outside a tensor and store nothing there, so
no size needs to be a multiple of a block.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(number, tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles take turns, so that their weights are still in the cache."""
    group = number // (GROUP * COLUMNS)
    within = number % (GROUP * COLUMNS)
    size = min(tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def up(
    x,
    w,  # [E, 2, I, H]
    hidden,  # [P, 2, I]
    active,  # [P, I]
    choice,
    weights,
    expert,
    tiles,
    S,
    H,
    I: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    KEEP: tl.constexpr,
):
    """hidden = x @ w.T, its rows gathered from the tokens, gate and up in one product; active = silu(gate) * up * weight."""
    COLUMNS: tl.constexpr = (I + BN - 1) // BN
    count = tl.load(tiles)
    for number in tl.range(tl.program_id(0), count * COLUMNS, tl.num_programs(0), flatten=True):
        m, n = _tile(number, count, COLUMNS, GROUP)
        e = tl.load(expert + m)
        chosen = tl.load(choice + m * BM + tl.arange(0, BM))
        mine = chosen < S
        rows = x + tl.where(mine, chosen // K, 0)[:, None].to(tl.int64) * H + tl.arange(0, BK)[None, :]
        acc = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, H, BK):
            a = tl.load(rows + k, mask=(k + tl.arange(0, BK) < H)[None, :], other=0.0)
            b = w.load([e, 0, n * BN, k]).reshape(2 * BN, BK)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        # A row of padding has read the first token, whose NaN would not be its own.
        acc = tl.where(mine[:, None], acc, 0.0)
        gate, linear = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        gate = gate.to(active.dtype)
        linear = linear.to(active.dtype)
        if KEEP:
            hidden.store([m * BM, 0, n * BN], gate.reshape(BM, 1, BN))
            hidden.store([m * BM, 1, n * BN], linear.reshape(BM, 1, BN))
        gate = gate.to(tl.float32)
        weight = tl.load(weights + tl.where(mine, chosen, 0)).to(tl.float32)
        out = gate * tl.sigmoid(gate) * linear.to(tl.float32) * tl.where(mine, weight, 0.0)[:, None]
        active.store([m * BM, n * BN], out.to(active.dtype))


@triton.jit
def product(
    a,  # [P, D]
    w,  # [E, N, D], or [E, D, N] without TRANSPOSED
    out,  # [P, N]
    expert,
    tiles,
    N: tl.constexpr,
    D,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Each row times the matrix of its expert, or its transpose."""
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    count = tl.load(tiles)
    for number in tl.range(tl.program_id(0), count * COLUMNS, tl.num_programs(0), flatten=True):
        m, n = _tile(number, count, COLUMNS, GROUP)
        e = tl.load(expert + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            rows = a.load([m * BM, k])
            if TRANSPOSED:
                b = w.load([e, n * BN, k]).reshape(BN, BK).T
            else:
                b = w.load([e, k, n * BN]).reshape(BK, BN)
            acc = tl.dot(rows, b, acc, input_precision=PRECISION)
        out.store([m * BM, n * BN], acc.to(out.dtype))


@triton.jit
def weight_gradient(
    left,  # [P, M]
    right,  # [P, N]
    out,  # [E, M, N]
    first,
    rows,
    E,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left.T @ right over the rows of each expert; zeros for one without."""
    ROWS: tl.constexpr = (M + BM - 1) // BM
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    for number in tl.range(tl.program_id(0), E * ROWS * COLUMNS, tl.num_programs(0)):
        e = number // (ROWS * COLUMNS)
        m = number % (ROWS * COLUMNS) // COLUMNS
        n = number % COLUMNS
        begin = tl.load(first + e)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(begin, begin + tl.load(rows + e), BK):
            acc = tl.dot(left.load([k, m * BM]).T, right.load([k, n * BN]), acc, input_precision=PRECISION)
        out.store([e, m * BM, n * BN], acc.to(out.dtype).reshape(1, BM, BN))


@triton.jit
def activation_gradient(
    grad,  # [P, I], of active before the routing weight
    hidden,  # [P, 2, I], overwritten with its gradient
    active,  # [P, I], written: what the second product was given
    d_weights,  # [S]
    choice,
    weights,
    tiles,
    S,
    I,
    TILE: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    """The gradients of gate, up and routing weight, from that of their product. Rows of padding get zeros."""
    start = tl.program_id(0) * BR
    if start < tl.load(tiles) * TILE:
        rows = start + tl.arange(0, BR)
        chosen = tl.load(choice + rows)
        mine = chosen < S
        weight = tl.load(weights + tl.where(mine, chosen, 0), mask=mine, other=0.0).to(tl.float32)[:, None]
        total = tl.zeros((BR,), tl.float32)
        at = rows[:, None].to(tl.int64) * I
        for c in range(0, I, BI):
            columns = c + tl.arange(0, BI)[None, :]
            inside = mine[:, None] & (columns < I)
            gates = hidden + 2 * at + columns
            d = tl.load(grad + at + columns, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
            linear = tl.load(gates + I, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            total += tl.sum(d * silu * linear, 1)
            d *= weight
            out = active.dtype.element_ty
            kept = columns < I
            tl.store(active + at + columns, (silu * linear * weight).to(out), mask=kept)
            tl.store(gates + I, (d * silu).to(out), mask=kept)
            tl.store(gates, (d * linear * sigmoid * (1 + gate * (1 - sigmoid))).to(out), mask=kept)
        tl.store(d_weights + chosen, total, mask=mine)


@triton.jit
def gather(x, out, choice, tiles, S, H, K: tl.constexpr, TILE: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """out[row] = x[token of the row], zeros in padding."""
    start = tl.program_id(0) * BR
    if start < tl.load(tiles) * TILE:
        rows = start + tl.arange(0, BR)
        chosen = tl.load(choice + rows)
        mine = chosen < S
        source = x + tl.where(mine, chosen // K, 0)[:, None].to(tl.int64) * H
        target = out + rows[:, None].to(tl.int64) * H
        for c in range(0, H, BH):
            columns = c + tl.arange(0, BH)[None, :]
            value = tl.load(source + columns, mask=mine[:, None] & (columns < H), other=0.0)
            tl.store(target + columns, value, mask=columns < H)


@triton.jit
def combine(rows, place, out, H, K: tl.constexpr, BH: tl.constexpr):
    """out[token] = the sum of its rows, in float32 and in the order of its choices."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    acc = tl.zeros((BH,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token.to(tl.int64) * K + k)
        value = tl.load(rows + row.to(tl.int64) * H + columns, mask=(columns < H) & (row >= 0), other=0.0)
        acc += value.to(tl.float32)
    tl.store(out + token.to(tl.int64) * H + columns, acc.to(out.dtype.element_ty), mask=columns < H)
