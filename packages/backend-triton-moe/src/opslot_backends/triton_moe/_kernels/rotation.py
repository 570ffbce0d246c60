"""Rotation of neighbouring elements of heads, in Triton, and its transpose.

Names: S tokens of a sequence, D elements of a head, in a block of BD. A program has BS tokens and up to HEADS heads, of
queries or of keys, for which it reads the tables once.
"""

import triton
import triton.language as tl


@triton.jit
def _heads(
    x,
    out,
    batch,
    tokens,
    head,
    heads,
    cos,
    sin,
    S,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    BD: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    BS: tl.constexpr = tokens.shape[0]
    HALF: tl.constexpr = D // 2
    all_columns = tl.arange(0, BD)[None, :]
    columns = tl.arange(0, BD // 2)[None, :]
    x += batch.to(tl.int64) * x_batch + tokens[:, None].to(tl.int64) * x_token
    out += batch.to(tl.int64) * out_batch + tokens[:, None].to(tl.int64) * out_token
    for i in tl.static_range(HEADS):
        mine = (tokens < S)[:, None] & (head + i < heads)
        x_at = x + (head + i).to(tl.int64) * x_head
        out_at = out + (head + i).to(tl.int64) * out_head
        whole = mine & (all_columns < D)
        half = mine & (columns < HALF)
        if BACK:
            first = tl.load(x_at + columns, mask=half, other=0.0).to(tl.float32)
            second = tl.load(x_at + HALF + columns, mask=half, other=0.0).to(tl.float32)
            pair = tl.join(first * cos + second * sin, second * cos - first * sin)
            tl.store(out_at + all_columns, pair.reshape(BS, BD).to(out.dtype.element_ty), mask=whole)
        else:
            pair = tl.load(x_at + all_columns, mask=whole, other=0.0).to(tl.float32)
            even, odd = pair.reshape(BS, BD // 2, 2).split()
            tl.store(out_at + columns, (even * cos - odd * sin).to(out.dtype.element_ty), mask=half)
            tl.store(out_at + HALF + columns, (odd * cos + even * sin).to(out.dtype.element_ty), mask=half)


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
    BS: tl.constexpr,
    BD: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    """Pairs (2i, 2i + 1) become (i, i + D/2), turned by the angles of their tokens; with BACK the other way round."""
    blocks = tl.cdiv(S, BS)
    batch = tl.program_id(0) // blocks
    tokens = tl.program_id(0) % blocks * BS + tl.arange(0, BS)
    columns = tl.arange(0, BD // 2)[None, :]
    inside = (tokens < S)[:, None] & (columns < D // 2)
    at = batch.to(tl.int64) * cos_batch + tokens[:, None].to(tl.int64) * cos_token + columns
    c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    at = batch.to(tl.int64) * sin_batch + tokens[:, None].to(tl.int64) * sin_token + columns
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    groups = tl.cdiv(Q_HEADS, HEADS)
    group = tl.program_id(1)
    if group < groups:
        head = group * HEADS
        _heads(
            q, q_out, batch, tokens, head, Q_HEADS, c, s, S, q_batch, q_head, q_token, q_out_batch, q_out_head,
            q_out_token, D, BD, HEADS, BACK,
        )  # fmt: skip
    else:
        head = (group - groups) * HEADS
        _heads(
            k, k_out, batch, tokens, head, K_HEADS, c, s, S, k_batch, k_head, k_token, k_out_batch, k_out_head,
            k_out_token, D, BD, HEADS, BACK,
        )  # fmt: skip
