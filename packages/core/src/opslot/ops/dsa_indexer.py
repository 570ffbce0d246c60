"""dsa_indexer/glm, dsa_indexer/deepseek_v4: which keys a query of sparse attention looks at (lightning indexer).

The contracts start at the indexer's rotated queries and keys, where transformers' code and the kernels of the field
meet. What comes before stays in the model: the projections, the norm, RoPE, DeepSeek V4's compressor and the caches,
which are modules with state. Neither model trains its indexer through the choice, so there is no gradient here, and no
scores come back: kernels that also return scores, for a loss of their own, drop them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def dsa_indexer_glm(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, attention_mask: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The keys with the largest scores among those that the mask allows, for every query.

        score[s, t] = sum over h of (weights32[s, h] / sqrt(H)) * relu(q32[s, h] . k32[t] / sqrt(D))

    q is [B, S, H, D] and k [B, T, D], one key for all heads, both after RoPE, k with what a cache held before it;
    weights is [B, S, H], what weights_proj returned, of any floating dtype. attention_mask is [B, S, T], or [1, S, T]
    for every sequence alike: boolean (True: may be seen) or a float mask, 0 where a key may be seen and -inf or the
    lowest value of its dtype where not. It is no bias, and any other shape is refused.

    The result is [B, S, K] of int32 with K = min(top_k, T), every value a key in [0, T), by falling score. A query that
    may see fewer than K keys gets all of those first and then, again and again, the first key that it may not see.
    (Upstream gives any keys there.) None is negative because transformers' attention scatters the indices into a mask;
    it applies its own mask after that, so a forbidden key does no harm. Who has no such mask must drop them:
    `dsa_attention/glm` is given both. Which of two keys with one score comes first is open. Scores are kept in float32.
    There is no gradient.

    Source: transformers 5.24.0, models/glm_moe_dsa, GlmMoeDsaIndexer.forward, from its scores on.
    """
    import torch

    _check_shapes("glm", q, k, weights)
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    if attention_mask.shape not in ((batch, queries, keys), (1, queries, keys)):
        raise ValueError(
            f"dsa_indexer/glm: attention_mask must be [B, S, T] = {[batch, queries, keys]} or [1, S, T], "
            f"got {list(attention_mask.shape)}"
        )
    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q.to(wide), k.transpose(-1, -2).to(wide).unsqueeze(1)) * dim**-0.5
        weights = weights.to(wide) * heads**-0.5
        scores = torch.matmul(weights.unsqueeze(-2), torch.relu(scores)).squeeze(-2)

        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        scores = scores.masked_fill(~allowed, float("-inf"))
        chosen = scores.topk(min(top_k, keys), dim=-1).indices
        allowed = allowed.expand_as(scores)
        # As many as there are allowed keys before it.
        first_forbidden = allowed.long().cumprod(-1).sum(-1, keepdim=True)
        return torch.where(allowed.gather(-1, chosen), chosen, first_forbidden).to(torch.int32)


def dsa_indexer_deepseek_v4(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    position_ids: torch.Tensor,
    compress_rate: int,
    top_k: int,
) -> torch.Tensor:
    """The compressed keys with the largest scores among those that lie wholly before the query, for every query.

        score[s, t] = sum over h of (weights32[s, h] / sqrt(H)) * relu(q32[s, h] . k32[t]) / sqrt(D)

    q is [B, S, H, D] after RoPE; k is [B, T, D], one key for all heads, the compressed entries after norm and RoPE with
    what a cache held before them; weights is [B, S, H], what weights_proj returned, of any floating dtype. Entry t
    stands for the tokens up to (t + 1) * compress_rate - 1: the query at position p sees the entries t <
    (p + 1) // compress_rate. position_ids is [B, S], or [1, S] for every sequence alike.

    The result is [B, S, K] of int64 with K = min(top_k, T), by falling score. A query that sees fewer than K entries
    gets all of those first and then -1. Which of two entries with one score comes first is open. Scores are kept in
    float32. There is no gradient. T = 0, before the first full window, gives K = 0.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4IndexerScorer.forward after its weights_proj, and
    DeepseekV4Indexer.forward from its scores on.
    """
    import torch

    _check_shapes("deepseek_v4", q, k, weights)
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    if position_ids.shape not in ((batch, queries), (1, queries)):
        raise ValueError(
            f"dsa_indexer/deepseek_v4: position_ids must be [B, S] = {[batch, queries]} or [1, S], "
            f"got {list(position_ids.shape)}"
        )
    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q.to(wide), k.transpose(-1, -2).to(wide).unsqueeze(1))
        scores = torch.relu(scores) * dim**-0.5
        weights = weights.to(wide) * heads**-0.5
        scores = (scores * weights.unsqueeze(-1)).sum(dim=2)

        seen = ((position_ids + 1) // compress_rate).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(keys, device=q.device) >= seen, float("-inf"))
        chosen = scores.topk(min(top_k, keys), dim=-1).indices
        return torch.where(chosen >= seen, -1, chosen)


def _check_shapes(variant: str, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
    # Every one of these would be broadcast to something.
    if q.dim() != 4 or k.shape != (q.shape[0], *k.shape[1:2], q.shape[3]) or weights.shape != q.shape[:3]:
        raise ValueError(
            f"dsa_indexer/{variant}: q must be [B, S, H, D], k [B, T, D] and weights [B, S, H], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(weights.shape)}"
        )


def _scored(
    draw: Draw, batch: int, queries: int, keys: int, heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and weights whose scores are all different, exact sums in every dtype: no rounding may change a choice.

    They hold small integers, and three dimensions beside that tell in head 0 one key from another: a fraction that no
    other key has, in two digits, and a constant that keeps relu from cutting it off.
    """
    assert dim > 3
    assert keys <= 2048
    q = (draw.integers(5, batch, queries, heads, dim) - 2).to(draw.dtype)
    k = (draw.integers(5, batch, keys, dim) - 2).to(draw.dtype)
    weights = (draw.integers(5, batch, queries, heads) - 2).to(draw.dtype)
    place = draw.ranks(batch, keys)
    step = 2.0 ** -math.ceil(math.log2(4 * max(keys, 2)))  # below 1 also when head 0 weighs 4
    k[..., -1] = ((place // 32) * (32 * step)).to(draw.dtype)
    k[..., -2] = ((place % 32) * step).to(draw.dtype)
    k[..., -3] = 1
    q[..., -3:] = 0
    q[:, :, 0, -2:] = 1
    q[:, :, 0, -3] = 2.0 ** math.ceil(math.log2(4 * dim))
    weights[:, :, 0] = (2.0 ** draw.integers(3, batch, queries)).to(draw.dtype)
    return leaf(q), leaf(k), leaf(weights)


def _causal(queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
    """[1, S, T]: the last query sees every key, each one before it one key less, as with a cache."""
    import torch

    last = torch.arange(queries, device=device) + max(keys - queries, 0)
    return torch.arange(keys, device=device) <= last[None, :, None]


def glm_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def case(
        name: str,
        batch: int,
        queries: int,
        keys: int,
        heads: int = 4,
        dim: int = 16,
        top_k: int = 4,
        mask: torch.Tensor | None = None,
    ) -> Sample:
        mask = _causal(queries, keys, device).expand(batch, -1, -1) if mask is None else mask
        return Sample(name, (*_scored(draw, batch, queries, keys, heads, dim), mask, top_k))

    def additive(mask: torch.Tensor, forbidden: float) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, forbidden)

    causal = _causal(9, 9, device)
    yield case("ordinary", 2, 33, 33, top_k=8)
    yield case("one mask for all", 3, 9, 9, mask=causal)
    yield case("additive mask", 2, 9, 9, mask=additive(causal.expand(2, -1, -1), torch.finfo(dtype).min))
    yield case("additive mask of -inf", 2, 9, 9, mask=additive(causal.expand(2, -1, -1), float("-inf")))
    padded = causal.repeat(2, 1, 1)
    padded[1, :, :3] = False
    yield case("queries that see nothing", 2, 9, 9, mask=padded)
    packed = causal.clone()
    packed[:, 4:, :4] = False
    yield case("packed sequences", 1, 9, 9, mask=packed)
    yield case("cached keys", 2, 3, 17)
    yield case("more than there are", 2, 5, 5, top_k=64)
    yield case("the best key", 2, 9, 9, top_k=1)
    yield case("one head", 1, 9, 9, heads=1)
    yield case("24 heads", 1, 5, 9, heads=24)
    yield case("32 heads", 1, 5, 9, heads=32)
    yield case("64 heads", 1, 5, 9, heads=64)
    yield case("many keys", 1, 3, 1025, dim=4, top_k=65)
    yield case("many queries", 1, 1025, 3, heads=3, dim=7, mask=draw.integers(2, 1, 1025, 3) == 0)
    yield case("one token", 1, 1, 1)
    q, k, weights = _scored(draw, 2, 9, 9, 4, 16)
    wide = weights.detach().to(torch.promote_types(dtype, torch.float32))
    yield Sample("float32 weights", (q, k, leaf(wide), causal, 4))
    yield Sample("strided", (leaf(strided(q.detach())), leaf(strided(k.detach())), leaf(strided(weights)), causal, 4))
    transposed = q.detach().transpose(1, 2).contiguous().transpose(1, 2), k.detach().mT.contiguous().mT
    yield Sample("transposed", (*map(leaf, transposed), weights, padded.mT.contiguous().mT, 4))
    yield case("no queries", 2, 0, 5)
    yield case("no tokens", 2, 0, 0)


def deepseek_v4_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def case(
        name: str,
        positions: torch.Tensor,
        keys: int,
        heads: int = 4,
        dim: int = 16,
        rate: int = 4,
        top_k: int = 4,
        batch: int | None = None,
    ) -> Sample:
        tensors = _scored(draw, batch or positions.shape[0], positions.shape[1], keys, heads, dim)
        return Sample(name, (*tensors, positions.to(device), rate, top_k))

    def counted(batch: int, queries: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + queries).expand(batch, -1)

    yield case("ordinary", counted(2, 33), 8)
    yield case("one row of positions for all", counted(1, 33), 8, batch=2)
    yield case("a position each", draw.integers(40, 2, 9), 8)
    yield case("cached keys", counted(2, 3, 38), 10)
    yield case("one query", counted(2, 1, 39), 10)
    yield case("queries that see nothing", counted(1, 7), 2, rate=8)
    # A second sequence in the row starts to count again.
    yield case("packed sequences", torch.cat([counted(1, 5), counted(1, 4)], dim=1), 2)
    yield case("nothing is compressed", counted(1, 9), 9, rate=1)
    yield case("odd rate", counted(2, 17), 5, rate=3, top_k=3)
    yield case("more than there are", counted(2, 17), 4, top_k=64)
    yield case("the best key", counted(2, 33), 8, top_k=1)
    yield case("one head", counted(1, 9), 2, heads=1)
    yield case("24 heads", counted(1, 21), 5, heads=24)
    yield case("64 heads", counted(1, 21), 5, heads=64)
    yield case("many keys", counted(1, 3, 4099), 1025, dim=4, top_k=65)
    yield case("many queries", counted(1, 1025), 3, heads=3, dim=7, rate=342)
    q, k, weights = _scored(draw, 2, 9, 9, 4, 16)
    positions = counted(2, 9, 30).to(device)
    wide = weights.detach().to(torch.promote_types(dtype, torch.float32))
    yield Sample("float32 weights", (q, k, leaf(wide), positions, 4, 4))
    yield Sample(
        "strided",
        (leaf(strided(q.detach())), leaf(strided(k.detach())), leaf(strided(weights)), strided(positions), 4, 4),
    )
    transposed = q.detach().transpose(1, 2).contiguous().transpose(1, 2), k.detach().mT.contiguous().mT
    yield Sample("transposed", (*map(leaf, transposed), weights, positions, 4, 4))
    yield case("no keys", counted(2, 3), 0)
    yield case("no queries", counted(2, 0), 5)


def glm_problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    top_k: int,
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    q, k = draw.normal(1, queries, heads, head_dim), draw.normal(1, keys, head_dim)
    mask = _causal(queries, keys, device)
    return Sample("problem", (q, k, draw.normal(1, queries, heads), mask, top_k))


def deepseek_v4_problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    top_k: int,
) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    q, k = draw.normal(1, queries, heads, head_dim), draw.normal(1, keys, head_dim)
    rate = 4
    positions = torch.arange(queries, device=device).unsqueeze(0) + max(rate * keys - queries, 0)
    return Sample("problem", (q, k, draw.normal(1, queries, heads), positions, rate, top_k))


def flops(*, queries: int, keys: int, heads: int, head_dim: int, top_k: int) -> int:
    """Of all scores, also those that a mask forbids: kernels that leave them out may come out above the peak."""
    return 2 * queries * keys * heads * (head_dim + 1)


# Indices are compared one by one.
_EXACT = tolerances(roundings=0, terms=0)


def glm_refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(glm_samples(device, dtype, seed))
    q, k, weights, *rest = ordinary.args
    yield Sample("weights for all queries", (q, k, weights.detach()[:, :1], *rest))


def deepseek_v4_refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(deepseek_v4_samples(device, dtype, seed))
    q, k, weights, *rest = ordinary.args
    yield Sample("weights for all queries", (q, k, weights.detach()[:, :1], *rest))


CONTRACTS = (
    OpContract(
        op="dsa_indexer",
        variant="deepseek_v4",
        summary="the compressed keys with the largest scores for every query, -1 where there are no more",
        reference=dsa_indexer_deepseek_v4,
        samples=deepseek_v4_samples,
        refused=deepseek_v4_refused,
        tolerances=_EXACT,
        rows={"q": 0, "k": 0, "weights": 0, "position_ids": 0},
        workload=Workload(
            problem=deepseek_v4_problem,
            shapes={
                "deepseek-v4-flash": {"queries": 8192, "keys": 2048, "heads": 64, "head_dim": 128, "top_k": 512},
                "deepseek-v4-flash, 32768 tokens in": {
                    "queries": 2048,
                    "keys": 8192,
                    "heads": 64,
                    "head_dim": 128,
                    "top_k": 512,
                },
            },
            flops=flops,
            large={"queries": 2**18 + 1, "keys": 64, "heads": 64, "head_dim": 128, "top_k": 16},
        ),
    ),
    OpContract(
        op="dsa_indexer",
        variant="glm",
        summary="the keys with the largest scores for every query, filled up with a forbidden one",
        reference=dsa_indexer_glm,
        samples=glm_samples,
        refused=glm_refused,
        tolerances=_EXACT,
        rows={"q": 0, "k": 0, "weights": 0, "attention_mask": 0},
        workload=Workload(
            problem=glm_problem,
            shapes={
                "glm-5": {"queries": 8192, "keys": 8192, "heads": 32, "head_dim": 128, "top_k": 2048},
                "glm-5, 32768 tokens in": {
                    "queries": 2048,
                    "keys": 32768,
                    "heads": 32,
                    "head_dim": 128,
                    "top_k": 2048,
                },
            },
            flops=flops,
            large={"queries": 2**19 + 1, "keys": 64, "heads": 32, "head_dim": 128, "top_k": 16},
        ),
    ),
)
