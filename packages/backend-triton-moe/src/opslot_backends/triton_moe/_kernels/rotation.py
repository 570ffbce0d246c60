"""Rotation of neighbouring elements of heads, in Triton, and its transpose.

Names: S tokens of a sequence, D elements of a head, in a block of BD. A tile is [HEADS, BS, BD], heads of queries or of
keys and tokens, for which the tables are read once.
"""

import triton
import triton.language as tl


@triton.jit
def _heads(
    x,
    out,
    batch,
    heads,
    HEADS_OF_X,
    tokens,
    S,
    cos,
    sin,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    BD: tl.constexpr,
    BACK: tl.constexpr,
):
    HEADS: tl.constexpr = heads.shape[0]
    BS: tl.constexpr = tokens.shape[0]
    heads, tokens = heads[:, None, None], tokens[None, :, None]
    mine = (heads < HEADS_OF_X) & (tokens < S)
    heads, tokens = heads.to(tl.int64), tokens.to(tl.int64)
    x += batch.to(tl.int64) * x_batch + heads * x_head + tokens * x_token
    out += batch.to(tl.int64) * out_batch + heads * out_head + tokens * out_token
    whole = tl.arange(0, BD)[None, None, :]
    half = tl.arange(0, BD // 2)[None, None, :]
    in_whole = mine & (whole < D)
    in_half = mine & (half < D // 2)
    if BACK:
        first = tl.load(x + half, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(x + D // 2 + half, mask=in_half, other=0.0).to(tl.float32)
        pairs = tl.join(first * cos + second * sin, second * cos - first * sin).reshape(HEADS, BS, BD)
        tl.store(out + whole, pairs.to(out.dtype.element_ty), mask=in_whole)
    else:
        pairs = tl.load(x + whole, mask=in_whole, other=0.0).to(tl.float32).reshape(HEADS, BS, BD // 2, 2)
        even, odd = pairs.split()
        tl.store(out + half, (even * cos - odd * sin).to(out.dtype.element_ty), mask=in_half)
        tl.store(out + D // 2 + half, (odd * cos + even * sin).to(out.dtype.element_ty), mask=in_half)


@triton.jit
def _table(table, batch, tokens, S, of_batch, of_token, D: tl.constexpr, BD: tl.constexpr):
    columns = tl.arange(0, BD // 2)[None, :]
    at = table + batch.to(tl.int64) * of_batch + tokens[:, None].to(tl.int64) * of_token + columns
    value = tl.load(at, mask=(tokens < S)[:, None] & (columns < D // 2), other=0.0)
    return value.to(tl.float32)[None, :, :]


@triton.jit
def rotate(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    S,
    Q_HEADS,
    K_HEADS,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BACK: tl.constexpr,
):
    """Pairs (2i, 2i + 1) become (i, i + D/2), turned by the angles of their tokens; with BACK the other way round."""
    blocks = tl.cdiv(S, BS)
    batch = tl.program_id(0) // blocks
    tokens = tl.program_id(0) % blocks * BS + tl.arange(0, BS)
    c = _table(cos, batch, tokens, S, cos_batch, cos_token, D, BD)
    s = _table(sin, batch, tokens, S, sin_batch, sin_token, D, BD)
    groups = tl.cdiv(Q_HEADS, HEADS)
    group = tl.program_id(1)
    if group < groups:
        heads = group * HEADS + tl.arange(0, HEADS)
        _heads(
            q, q_out, batch, heads, Q_HEADS, tokens, S, c, s, q_batch, q_head, q_token, q_out_batch, q_out_head,
            q_out_token, D, BD, BACK,
        )  # fmt: skip
    else:
        heads = (group - groups) * HEADS + tl.arange(0, HEADS)
        _heads(
            k, k_out, batch, heads, K_HEADS, tokens, S, c, s, k_batch, k_head, k_token, k_out_batch, k_out_head,
            k_out_token, D, BD, BACK,
        )  # fmt: skip
