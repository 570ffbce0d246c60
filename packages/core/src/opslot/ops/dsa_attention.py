"""dsa_attention/glm, dsa_attention/deepseek_v4: attention of every query to the few keys that were chosen for it.

Both take the indices of the keys, as the kernels of the field do, and nothing whose size is queries times keys unless a
model has it anyway. The references compute all logits, as transformers does, and are meant for reading and checking.
Dropout of attention weights and the weights themselves, as a second result, are in neither contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def dsa_attention_glm(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_latent: torch.Tensor,
    k_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    indices: torch.Tensor,
    scaling: float,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multi-head latent attention to the chosen keys, from the compressed latents to the heads' outputs.

        k[h, t], v[h, t] = (kv_b_weight[h] @ kv_latent[t]) split into Dn and Dv;   k[h, t] = cat(k[h, t], k_rot[t])
        p[h, s] = softmax32 over the chosen keys t of cat(q_nope, q_rot)[h, s] . k[h, t] * scaling
        out[s, h] = sum over t of p[h, s, t] * v[h, t]

    q_nope [B, H, S, Dn] and q_rot [B, H, S, Dr] are the queries' parts without and with rotation. kv_latent
    [B, 1, T, R], after its norm, and k_rot [B, 1, T, Dr], rotated, are one for all heads, with what a cache held before
    them: T may exceed S. kv_b_weight [H * (Dn + Dv), R] is the weight of kv_b_proj, heads outermost. It is an argument
    because the kernels of the field attend to the latents: they multiply the queries by its key half and the result by
    its value half, and expand no key. The result is [B, S, H, Dv].

    indices is [B, S, K] of integers, the keys chosen for each query in any order. A value outside [0, T), such as -1,
    is no key. attention_mask, [B, 1, S, T] or [1, 1, S, T], takes keys away from those that indices name: boolean
    (True: may be seen) or a float mask, 0 where a key may be seen and -inf or the lowest value of its dtype where not.
    It is no bias, and any other shape is refused. What transformers passes will do, before and after it merged the
    choice into it. Without it the indices alone decide. Keys that are named and may be seen must be distinct within a
    row: a sum over indices would count them twice. Others may repeat.

    A row without any key gives zeros, and adds zero, never NaN, to every gradient. (Upstream gives an average of all
    values there, or NaN, by the mask's lowest value.)

    Source: transformers 5.24.0, models/glm_moe_dsa, GlmMoeDsaAttention.expand_kv, the index mask of its forward, and
    eager_attention_forward.
    """
    import torch
    from torch.nn.functional import linear, softmax

    (batch, heads, queries, nope), keys = q_nope.shape, kv_latent.shape[2]
    allowed = _allowed("glm", indices, (batch, queries, keys), attention_mask)
    if kv_latent.shape[1] != 1 or k_rot.shape[1] != 1:
        raise ValueError(
            "dsa_attention/glm: kv_latent and k_rot must have one head, [B, 1, T, R] and [B, 1, T, Dr], "
            f"got {list(kv_latent.shape)} and {list(k_rot.shape)}"
        )
    kv = linear(kv_latent, kv_b_weight).view(batch, keys, heads, kv_b_weight.shape[0] // heads).transpose(1, 2)
    k_nope, value = torch.split(kv, [nope, kv.shape[-1] - nope], dim=-1)
    key = torch.cat((k_nope, k_rot.expand(-1, heads, -1, -1)), dim=-1)
    query = torch.cat((q_nope, q_rot), dim=-1)

    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    weights = softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)
    weights = weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def dsa_attention_deepseek_v4(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, indices: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention to the chosen keys, which are their own values, with a sink for every head.

        p[h, s] = softmax over the chosen keys t of q[h, s] . kv[t] * scaling, and over sinks[h] beside them
        out[s, h] = sum over t of p[h, s, t] * kv[t]: what went into the sink is lost

    q is [B, H, S, D] and kv [B, 1, T, D], one head for all, both rotated. In the model kv holds the keys of the sliding
    window followed by the compressed entries; the contract does not tell them apart. sinks is [H], finite, of any
    floating dtype (models keep it in float32); the softmax is computed in the wider dtype of logits and sinks. The
    result is [B, S, H, D] in the dtype of q, still rotated: the model turns it back.

    indices is [B, S, K] of integers, the keys chosen for each query, of both kinds and in any order. A value outside
    [0, T), such as -1, is no key. Keys must be distinct within a row: a sum over indices would count them twice.
    Upstream holds the choice as an additive mask [B, 1, S, T]: the indices are the columns of its zeros, in a row at
    most sliding_window + index_topk of them (with heavy compression, all the compressed ones).

    A row without any key gives zeros, and adds zero, never NaN, to every gradient: all of it went into the sink.

    Source: transformers 5.24.0, models/deepseek_v4, eager_attention_forward with the mask of DeepseekV4Attention.
    The compressors before it, with their windows, buffers and caches, are modules with state and in no contract.
    """
    import torch

    (batch, heads, queries, _), keys = q.shape, kv.shape[2]
    allowed = _allowed("deepseek_v4", indices, (batch, queries, keys), None)
    if kv.shape[1] != 1 or sinks.shape != (heads,):
        raise ValueError(
            f"dsa_attention/deepseek_v4: kv must be [B, 1, T, D] and sinks [H] = [{heads}], "
            f"got {list(kv.shape)} and {list(sinks.shape)}"
        )
    logits = torch.matmul(q, kv.expand(-1, heads, -1, -1).transpose(2, 3)) * scaling
    logits = logits.masked_fill(~allowed, float("-inf"))
    # The sinks' dtype decides in which one the softmax runs.
    logits = torch.cat([logits, sinks.view(1, heads, 1, 1).expand(batch, -1, queries, -1)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.softmax(logits, dim=-1)[..., :-1].to(kv.dtype)
    return torch.matmul(weights, kv.expand(-1, heads, -1, -1)).transpose(1, 2).contiguous()


def _allowed(
    variant: str, indices: torch.Tensor, shape: tuple[int, int, int], attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, 1, S, T]: which keys a query looks at."""
    import torch

    batch, queries, keys = shape
    if indices.dim() != 3 or indices.shape[:2] != (batch, queries) or indices.dtype.is_floating_point:
        raise ValueError(
            f"dsa_attention/{variant}: indices must be [B, S, K] = {[batch, queries]} by K of integers, "
            f"got {list(indices.shape)} of {indices.dtype}"
        )
    inside = (indices >= 0) & (indices < keys)
    # One column more, which takes what is no key and is cut off.
    named = torch.zeros(batch, queries, keys + 1, dtype=torch.bool, device=indices.device)
    named = named.scatter(-1, torch.where(inside, indices, keys).long(), True)[..., :keys].unsqueeze(1)
    if attention_mask is None:
        return named
    if attention_mask.shape not in ((batch, 1, queries, keys), (1, 1, queries, keys)):
        raise ValueError(
            f"dsa_attention/{variant}: attention_mask must be [B, 1, S, T] = {[batch, 1, queries, keys]} or "
            f"[1, 1, S, T], got {list(attention_mask.shape)}"
        )
    return named & (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)


def _chosen(draw: Draw, batch: int, queries: int, keys: int, top_k: int) -> torch.Tensor:
    import torch

    return draw.ranks(batch * queries, keys)[:, :top_k].reshape(batch, queries, min(top_k, keys)).to(torch.int32)


def _causal(queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
    """[1, 1, S, T]: the last query sees every key, each one before it one key less, as with a cache."""
    import torch

    last = torch.arange(queries, device=device) + max(keys - queries, 0)
    return torch.arange(keys, device=device) <= last[None, None, :, None]


def _past_removed(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """-1 in the place of keys that come after their query."""
    seen = _causal(indices.shape[1], keys, indices.device)[0].expand(len(indices), -1, -1)
    return indices.masked_fill(~seen.gather(-1, indices.long()), -1)


def glm_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def tensors(
        batch: int, queries: int, keys: int, heads: int, nope: int, rot: int, value: int, rank: int
    ) -> tuple[torch.Tensor, ...]:
        # The parts of one tensor, as the model's projection gives them.
        q = draw.normal(batch, queries, heads, nope + rot).transpose(1, 2)
        return (
            *map(leaf, torch.split(q, [nope, rot], dim=-1)),
            leaf(draw.normal(batch, 1, keys, rank)),
            leaf(draw.normal(batch, 1, keys, rot)),
            leaf(draw.normal(heads * (nope + value), rank, scale=rank**-0.5)),
        )

    def case(
        name: str,
        batch: int,
        queries: int,
        keys: int,
        *,
        heads: int = 4,
        value: int = 8,
        top_k: int = 4,
        indices: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> Sample:
        indices = _chosen(draw, batch, queries, keys, top_k) if indices is None else indices.to(device)
        keywords = {} if mask is None else {"attention_mask": mask}
        return Sample(name, (*tensors(batch, queries, keys, heads, 12, 4, value, 16), indices, 0.25), keywords)

    def additive(mask: torch.Tensor, forbidden: float) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, forbidden)

    causal = _causal(9, 9, device).expand(2, -1, -1, -1)
    chosen = _chosen(draw, 2, 9, 9, 4)
    yield case("ordinary", 2, 17, 17, indices=_past_removed(_chosen(draw, 2, 17, 17, 8), 17))
    other = case("another scaling", 2, 9, 9, indices=chosen)
    yield Sample(other.name, (*other.args[:-1], 0.1))
    yield case("boolean mask", 2, 9, 9, indices=chosen, mask=causal)
    yield case("one mask for all", 2, 9, 9, indices=chosen, mask=causal[:1])
    yield case("additive mask", 2, 9, 9, indices=chosen, mask=additive(causal, torch.finfo(dtype).min))
    yield case("additive mask of -inf", 2, 9, 9, indices=chosen, mask=additive(causal, float("-inf")))
    without = chosen.clone()
    without[0, 3], without[1, 8] = -1, 9
    padded = causal.clone()
    padded[1, :, :, :3] = False
    yield case("rows without an index", 2, 9, 9, indices=without, mask=padded)
    yield case("no row has an index", 1, 5, 9, indices=torch.full((1, 5, 4), -1))
    forbidden = chosen.clone()
    forbidden[:, 0, 1:] = 8
    yield case("a forbidden key again and again", 2, 9, 9, indices=forbidden, mask=causal)
    yield case("past the last key", 1, 5, 9, indices=torch.tensor([[8, 9, 2, 12]]).repeat(1, 5, 1))
    yield case("int64", 2, 5, 9, indices=_chosen(draw, 2, 5, 9, 4).long())
    yield case("cached keys", 2, 3, 17)
    yield case("every key", 1, 7, 7, top_k=7)
    yield case("one index", 2, 7, 7, top_k=1)
    yield case("one head", 2, 7, 9, heads=1)
    yield case("24 heads", 1, 5, 9, heads=24)
    yield case("32 heads", 1, 5, 9, heads=32)
    yield case("wide values", 1, 5, 9, value=65)
    yield case("many keys", 1, 3, 1025, heads=3, top_k=513)
    yield case("many queries", 1, 1025, 3, heads=3, top_k=2)
    yield case("one token", 1, 1, 1)
    q_nope, q_rot, kv, k_rot, weight = (tensor.detach() for tensor in tensors(2, 9, 9, 4, 12, 4, 8, 16))
    yield Sample("strided", (*(leaf(strided(t)) for t in (q_nope, q_rot, kv, k_rot, weight)), strided(chosen), 0.25))
    expanded = leaf(kv[:1].expand(2, -1, -1, -1)), leaf(k_rot[:1].expand(2, -1, -1, -1))
    indices = chosen[:, :1].expand(-1, 9, -1)
    yield Sample(
        "expanded", (leaf(q_nope.contiguous()), leaf(q_rot.contiguous()), *expanded, leaf(weight), indices, 0.25)
    )
    transposed = kv.mT.contiguous().mT, k_rot.mT.contiguous().mT, weight.t().contiguous().t()
    yield Sample("transposed", (leaf(q_nope), leaf(q_rot), *map(leaf, transposed), chosen.mT.contiguous().mT, 0.25))
    # Where the first key is chosen it takes everything: its logit is 8 above the others, beyond any rounding.
    q_rot, k_rot = q_rot * 0.1, k_rot.clone()
    q_rot[..., 0], k_rot[..., 0], k_rot[:, :, 0, 0] = 16, 0, 2
    yield Sample("saturated", (leaf(q_nope * 0.1), leaf(q_rot), leaf(kv), leaf(k_rot), leaf(weight), chosen, 0.25))
    yield case("no queries", 2, 0, 5)
    yield case("no keys", 2, 3, 0)


def deepseek_v4_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)

    def case(
        name: str,
        batch: int,
        queries: int,
        keys: int,
        *,
        heads: int = 4,
        dim: int = 16,
        top_k: int = 4,
        indices: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Sample:
        indices = _chosen(draw, batch, queries, keys, top_k) if indices is None else indices.to(device)
        sinks = draw.normal(heads, dtype=wide) if sinks is None else sinks
        q, kv = draw.normal(batch, heads, queries, dim), draw.normal(batch, 1, keys, dim)
        return Sample(name, (leaf(q), leaf(kv), leaf(sinks), indices, dim**-0.5))

    chosen = _chosen(draw, 2, 9, 12, 4)
    yield case("ordinary", 2, 17, 17, indices=_past_removed(_chosen(draw, 2, 17, 17, 8), 17))
    other = case("another scaling", 2, 9, 12, indices=chosen)
    yield Sample(other.name, (*other.args[:-1], 0.1))
    # A window of three, and compressed entries behind the nine keys: one for every four tokens.
    window = torch.arange(9).unsqueeze(-1) - torch.arange(3)
    entries = (
        torch.arange(2).expand(9, -1).masked_fill(torch.arange(2) >= (torch.arange(9).unsqueeze(-1) + 1) // 4, -10)
    )
    yield case("window and compressed", 2, 9, 11, indices=torch.cat([window, entries + 9], dim=-1).repeat(2, 1, 1))
    without = chosen.clone()
    without[0, 3], without[1, 8] = -1, 12
    yield case("rows without an index", 2, 9, 12, indices=without)
    yield case("no row has an index", 1, 5, 9, indices=torch.full((1, 5, 4), -1))
    yield case("past the last key", 1, 5, 9, indices=torch.tensor([[8, 9, 2, 12]]).repeat(1, 5, 1))
    yield case("int64", 2, 5, 9, indices=_chosen(draw, 2, 5, 9, 4).long())
    yield case("sinks in the dtype of the queries", 2, 9, 12, indices=chosen, sinks=draw.normal(4))
    yield case("deep sinks", 2, 9, 12, indices=chosen, sinks=draw.normal(4, dtype=wide) + 20)
    yield case("shallow sinks", 2, 9, 12, indices=chosen, sinks=draw.normal(4, dtype=wide) - 20)
    yield case("cached keys", 2, 1, 17)
    yield case("every key", 1, 7, 7, top_k=7)
    yield case("one index", 2, 7, 7, top_k=1)
    yield case("one head", 2, 7, 9, heads=1)
    yield case("24 heads", 1, 5, 9, heads=24)
    yield case("32 heads", 1, 5, 9, heads=32)
    yield case("odd head", 1, 5, 9, dim=65)
    yield case("many keys", 1, 3, 1025, heads=3, top_k=513)
    yield case("many queries", 1, 1025, 3, heads=3, top_k=2)
    yield case("one token", 1, 1, 1)
    q, kv, sinks = draw.normal(2, 4, 9, 16), draw.normal(2, 1, 12, 16), draw.normal(4, dtype=wide)
    yield Sample("strided", (leaf(strided(q)), leaf(strided(kv)), leaf(strided(sinks)), strided(chosen), 0.25))
    expanded = leaf(kv[:1].expand(2, -1, -1, -1)), leaf(sinks[:1].expand(4)), chosen[:, :1].expand(-1, 9, -1)
    yield Sample("expanded", (leaf(q), *expanded, 0.25))
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2), kv.mT.contiguous().mT, sinks
    yield Sample("transposed", (*map(leaf, transposed), chosen.mT.contiguous().mT, 0.25))
    # Where the first key is chosen it takes everything: its logit is 8 above the others, beyond any rounding.
    q, kv = q * 0.1, kv.clone()
    q[..., 0], kv[..., 0], kv[:, :, 0, 0] = 16, 0, 2
    yield Sample("saturated", (leaf(q), leaf(kv), leaf(sinks), chosen, 0.25))
    yield case("no queries", 2, 0, 5)
    yield case("no keys", 2, 3, 0)


def glm_problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, queries: int, keys: int, heads: int, top_k: int
) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    q = draw.normal(1, queries, heads, _NOPE + _ROT).transpose(1, 2)
    latents = draw.normal(1, 1, keys, _RANK), draw.normal(1, 1, keys, _ROT)
    weight = draw.normal(heads * (_NOPE + _VALUE), _RANK, scale=_RANK**-0.5)
    leaves = map(leaf, (*torch.split(q, [_NOPE, _ROT], dim=-1), *latents, weight))
    return Sample("problem", (*leaves, _chosen(draw, 1, queries, keys, top_k), (_NOPE + _ROT) ** -0.5))


def deepseek_v4_problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, queries: int, keys: int, heads: int, top_k: int
) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    q, kv = draw.normal(1, heads, queries, _DIM), draw.normal(1, 1, keys, _DIM)
    sinks = draw.normal(heads, dtype=torch.promote_types(dtype, torch.float32))
    return Sample("problem", (leaf(q), leaf(kv), leaf(sinks), _chosen(draw, 1, queries, keys, top_k), _DIM**-0.5))


# Sizes of GLM-5's and DeepSeek V4's heads.
_NOPE, _ROT, _VALUE, _RANK = 192, 64, 256, 512
_DIM = 512


def glm_flops(*, queries: int, keys: int, heads: int, top_k: int) -> int:
    """Every key expanded once, and the chosen ones multiplied. Kernels on the latents have wider rows, no expansion."""
    expand = 2 * keys * _RANK * heads * (_NOPE + _VALUE)
    return expand + 2 * queries * min(top_k, keys) * heads * (_NOPE + _ROT + _VALUE)


def deepseek_v4_flops(*, queries: int, keys: int, heads: int, top_k: int) -> int:
    return 2 * queries * min(top_k, keys) * heads * 2 * _DIM


# A logit has about unit size, and 4 at most where it is not meant to saturate. In it are rounded the key (or the query
# that took up the key's weight), the product and the scaled product: absolute errors that are relative ones of a
# probability, together 12. The probability, the value and the result are rounded too. These partly average, as do those
# of the backward: two products whose difference passes through the same three roundings. A query with one key has
# gradient zero; a kernel that takes it as a difference of dp and sum(p * dp), each a sum of Dv terms of unit size,
# leaves their roundings, times a key.
_LIMITS = tolerances(roundings=16, terms=1025, noise=16)


def glm_refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(glm_samples(device, dtype, seed))
    q_nope, q_rot, kv_latent, *rest = ordinary.args
    yield Sample("a latent for each head", (q_nope, q_rot, kv_latent.detach().expand(-1, 2, -1, -1), *rest))


def deepseek_v4_refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(deepseek_v4_samples(device, dtype, seed))
    q, kv, *rest = ordinary.args
    yield Sample("keys for each head", (q, kv.detach().expand(-1, 2, -1, -1), *rest))


CONTRACTS = (
    OpContract(
        op="dsa_attention",
        variant="deepseek_v4",
        summary="attention to the chosen keys, which are their own values, with a sink for every head",
        reference=dsa_attention_deepseek_v4,
        samples=deepseek_v4_samples,
        refused=deepseek_v4_refused,
        tolerances=_LIMITS,
        rows={"q": 0, "kv": 0, "indices": 0},
        workload=Workload(
            problem=deepseek_v4_problem,
            shapes={
                "deepseek-v4-flash": {"queries": 4096, "keys": 5120, "heads": 64, "top_k": 640},
                "deepseek-v4-flash, 32768 tokens in": {"queries": 512, "keys": 8832, "heads": 64, "top_k": 640},
            },
            flops=deepseek_v4_flops,
            large={"queries": 2**16 + 1, "keys": 128, "heads": 64, "top_k": 16},
        ),
    ),
    OpContract(
        op="dsa_attention",
        variant="glm",
        summary="multi-head latent attention to the chosen keys",
        reference=dsa_attention_glm,
        samples=glm_samples,
        refused=glm_refused,
        tolerances=_LIMITS,
        rows={"q_nope": 0, "q_rot": 0, "kv_latent": 0, "k_rot": 0, "indices": 0, "attention_mask": 0},
        workload=Workload(
            problem=glm_problem,
            shapes={
                "glm-5": {"queries": 4096, "keys": 4096, "heads": 64, "top_k": 2048},
                "glm-5, 32768 tokens in": {"queries": 512, "keys": 32768, "heads": 64, "top_k": 2048},
            },
            flops=glm_flops,
            large={"queries": 174763, "keys": 64, "heads": 64, "top_k": 16},
        ),
    ),
)
