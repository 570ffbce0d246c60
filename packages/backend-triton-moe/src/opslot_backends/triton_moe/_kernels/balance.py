"""The balancing loss of all layers at once, in Triton: sums of each program, their total, and the gradient.

Names: T tokens of a layer, E experts, K choices. A program has a run of tokens of one layer. Its tile is [PARTS, R, W],
R tokens and PARTS * W columns of experts: the parts of a row lie in registers of one thread, which leaves fewer threads
to a row and so fewer exchanges between them. Columns beyond E hold -inf.
"""

import triton
import triton.language as tl


@triton.jit
def _layer(layers, number, COUNT: tl.constexpr):
    """layers[number], for a number that only the program knows."""
    found = layers[0]
    for i in tl.static_range(1, COUNT):
        found = tl.where(number == i, layers[i], found)
    return found


@triton.jit
def _columns(PARTS: tl.constexpr, W: tl.constexpr):
    return tl.arange(0, PARTS)[:, None, None] * W + tl.arange(0, W)[None, None, :]


@triton.jit
def _rows(logits, tokens, columns, E: tl.constexpr):
    at = tokens[None, :, None].to(tl.int64) * E + columns
    return tl.load(logits + at, mask=columns < E, other=float("-inf"))


@triton.jit
def _keys(x, columns, E: tl.constexpr):
    """Whole numbers without a sign in the order of x, of equal elements the first being the largest, all distinct.

    NaN has a place in that order as any other bits have, and what is beyond E is below them all: a row of anything has
    K largest.
    """
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True).to(tl.int64)
        value = (bits ^ ((bits >> 63) & 0x7FFFFFFF)) + 0x80000000
        keys = (value.to(tl.uint64) << 16) | (0xFFFF - columns).to(tl.uint64)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFF)) + 0x8000
        keys = (value.to(tl.uint32) << 16) | (0xFFFF - columns).to(tl.uint32)
    return tl.where(columns < E, keys, 0)


@triton.jit
def _value(key, DTYPE: tl.constexpr):
    """The element whose key this is."""
    if DTYPE.primitive_bitwidth == 32:
        value = (key >> 16).to(tl.int64) - 0x80000000
        element = (value ^ ((value >> 63) & 0x7FFFFFFF)).to(tl.int32).to(DTYPE, bitcast=True)
    else:
        value = (key >> 16).to(tl.int32) - 0x8000
        element = (value ^ ((value >> 31) & 0x7FFF)).to(tl.int16).to(DTYPE, bitcast=True)
    return element


@triton.jit
def _largest(tile):
    return tl.max(tl.max(tile, 0), 1)


@triton.jit
def _total(tile):
    return tl.sum(tl.sum(tile, 0), 1)


@triton.jit
def sums(
    layers,  # a tuple of [T, E]
    weights,  # [T] or None
    partial,  # [programs, 2, E]
    T,
    SHARE,  # of the tokens, for a program
    COUNT: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """For each expert, how many of the program's tokens choose it and the sum of its probabilities, both weighted."""
    logits = _layer(layers, tl.program_id(1), COUNT)
    columns = _columns(PARTS, W)
    start = tl.program_id(0) * SHARE
    end = tl.minimum(start + SHARE, T)
    counts = tl.zeros((PARTS, R, W), tl.float32)
    probabilities = tl.zeros((PARTS, R, W), tl.float32)
    for first in range(start, end, R):
        tokens = first + tl.arange(0, R)
        # The last token again, where there are no more, and with no weight.
        mine = tl.minimum(tokens, end - 1)
        x = _rows(logits, mine, columns, E)
        weight = tl.where(tokens < end, 1.0, 0.0)
        if weights is not None:
            weight *= tl.load(weights + mine).to(tl.float32)
        keys = _keys(x, columns, E)
        last = _largest(keys)
        exponentials = tl.exp(x.to(tl.float32) - _value(last, x.dtype).to(tl.float32)[None, :, None])
        for _ in range(K - 1):
            # From the last to a key below it the way leads around zero: the nearest of those keys is the farthest.
            farthest = _largest(tl.sub(keys, last[None, :, None], sanitize_overflow=False))
            last = tl.add(last, farthest, sanitize_overflow=False)
        counts += tl.where(keys >= last[None, :, None], weight[None, :, None], 0.0)
        probabilities += exponentials * (weight / _total(exponentials))[None, :, None]
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = partial + program * 2 * E + _columns(PARTS, W).reshape(PARTS, W)
    inside = _columns(PARTS, W).reshape(PARTS, W) < E
    tl.store(at, tl.sum(counts, 1), mask=inside)
    tl.store(at + E, tl.sum(probabilities, 1), mask=inside)


@triton.jit
def total(
    partial,  # [P, 2, E]
    loss,  # [1]
    slope,  # [E], of the loss by the sum of an expert's probabilities
    P,
    E: tl.constexpr,
    K: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    """In the order of the programs, by one program."""
    columns = tl.arange(0, BE)[None, :]
    counts = tl.zeros((BP, BE), tl.float32)
    probabilities = tl.zeros((BP, BE), tl.float32)
    for first in range(0, P, BP):
        rows = first + tl.arange(0, BP)[:, None]
        at = partial + rows * 2 * E + columns
        inside = (rows < P) & (columns < E)
        counts += tl.load(at, mask=inside, other=0.0)
        probabilities += tl.load(at + E, mask=inside, other=0.0)
    chosen = tl.sum(counts, 0)
    # Every token has K choices.
    tokens = tl.sum(chosen, 0) / K
    slopes = chosen / tokens / tokens * E
    experts = tl.arange(0, BE)
    tl.store(slope + experts, slopes, mask=experts < E)
    # Not NaN * 0 beyond E, which would be NaN even so: all slopes are where no token counts.
    tl.store(loss, tl.sum(slopes * tl.sum(probabilities, 0), 0))


@triton.jit
def gradient(
    layers,  # a tuple of [T, E]
    weights,  # [T] or None
    slope,  # [E]
    incoming,  # [1]
    out,  # [COUNT, T, E]
    T,
    COUNT: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """p * (slope - sum of p * slope), weighted, of R tokens."""
    logits = _layer(layers, tl.program_id(1), COUNT)
    tokens = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, W)[None, :]
    inside = (tokens < T)[:, None] & (columns < E)
    at = tokens[:, None].to(tl.int64) * E + columns
    slopes = tl.load(slope + columns, mask=columns < E, other=0.0) * tl.load(incoming)
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    exponentials = tl.exp(x - tl.max(x, 1)[:, None])
    scale = 1.0 / tl.sum(exponentials, 1)
    mean = tl.sum(exponentials * slopes, 1) * scale
    if weights is not None:
        scale *= tl.load(weights + tokens, mask=tokens < T, other=0.0).to(tl.float32)
    d = exponentials * scale[:, None] * (slopes - mean[:, None])
    tl.store(out + tl.program_id(1).to(tl.int64) * T * E + at, d.to(out.dtype.element_ty), mask=inside)
