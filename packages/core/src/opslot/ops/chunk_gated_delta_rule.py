"""chunk_gated_delta_rule/standard: the linear attention of Qwen3-Next and Qwen3.5, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances
from ._packed import segments

if TYPE_CHECKING:
    import torch

# Tokens that are solved for at once. It decides how the reference rounds, and nothing else.
_CHUNK = 64


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A state per head that forgets by g, corrects what it holds for a key by beta, and is read by the query.

        S = exp(g[t]) * S                                        what it forgets
        S = S + key[t] (beta[t] * (value[t] - key[t] S))         what it had for this key, moved to the value
        out[t] = query[t] S / sqrt(D)                            S is [D, Dv], vectors are rows

    query and key are [B, T, Hk, D], value [B, T, Hv, Dv], g and beta [B, T, Hv]; Hv is a multiple of Hk, and a key head
    serves Hv / Hk value heads that lie next to each other. g is the logarithm of a decay and thus at most 0, beta lies
    between 0 and 1, and keys should be no longer than 1 or the state grows: neither is checked. Values of g below
    -88 or so forget everything.

    `use_qk_l2norm_in_kernel` first divides queries and keys by sqrt(their sum of squares + 1e-6); 1 / sqrt(D) comes
    after that. g and beta may be float32 beside half-precision vectors. `initial_state` is S before the first token,
    [B, Hv, D, Dv], zeros without it. The second result is S after the last token with `output_final_state`, None
    without. All is computed in float32; out has the dtype of query, the state is float32.

    With `cu_seqlens`, N + 1 integers (int32 or int64, on the device of the tokens) from 0 to T, the single row of
    the batch (B = 1) holds N sequences one after the other, and none sees another: values, states and gradients are
    those of N separate calls. States are then [N, Hv, D, Dv]. An empty sequence leaves its state as it was.

    Source: transformers 5.24.0, models/qwen3_next, torch_chunk_gated_delta_rule with its chunk_size of 64; it refuses
    packed sequences, and fails for no tokens.
    """
    import torch

    heads = value.shape[2]
    if query.shape != key.shape or heads % key.shape[2]:
        raise ValueError(
            "chunk_gated_delta_rule/standard: query and key must be of one shape [B, T, Hk, D], and value have a "
            f"multiple of their heads; got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    spans = None
    if cu_seqlens is not None:
        spans = segments("chunk_gated_delta_rule/standard", cu_seqlens, *value.shape[:2])
    states = (value.shape[0] if spans is None else len(spans), heads, key.shape[-1], value.shape[-1])
    exact = torch.promote_types(query.dtype, torch.float32)
    if initial_state is None:
        initial_state = torch.zeros(states, dtype=exact, device=value.device)
    elif initial_state.shape != states:
        raise ValueError(
            f"chunk_gated_delta_rule/standard: initial_state must be {list(states)}, one state a sequence and head of "
            f"value, got {list(initial_state.shape)}"
        )
    tensors = query, key, value, g, beta
    if spans is None:
        out, state = _sequences(tensors, initial_state, use_qk_l2norm_in_kernel)
    else:
        parts = [
            _sequences([x[:, start:end] for x in tensors], initial_state[n : n + 1], use_qk_l2norm_in_kernel)
            for n, (start, end) in enumerate(spans)
        ]
        out, state = torch.cat([part for part, _ in parts], dim=1), torch.cat([state for _, state in parts])
    return out, state if output_final_state else None


def _sequences(
    tensors: Sequence[torch.Tensor], state: torch.Tensor, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from torch.nn.functional import pad

    query, key, value, g, beta = tensors
    dtype, tokens, group = query.dtype, query.shape[1], value.shape[2] // key.shape[2]
    exact = torch.promote_types(dtype, torch.float32)
    query, key = (x.repeat_interleave(group, dim=2) for x in (query, key))
    query, key, value, g, beta = (x.transpose(1, 2).to(exact).contiguous() for x in (query, key, value, g, beta))
    if normalise:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5

    # Tokens added at the end have keys of zero and no decay: they change no state. No tokens at all are one such chunk.
    chunks = max(1, -(-tokens // _CHUNK))
    extra = chunks * _CHUNK - tokens
    query, key, value = (pad(x, (0, 0, 0, extra)) for x in (query, key, value))
    g, beta = (pad(x, (0, extra)) for x in (g, beta))
    written_value, written_key = value * beta.unsqueeze(-1), key * beta.unsqueeze(-1)
    query, key, written_value, written_key, g = (
        x.reshape(*x.shape[:2], chunks, _CHUNK, *x.shape[3:]) for x in (query, key, written_value, written_key, g)
    )

    # decay[i, j] is what is left at token i of what token j wrote, and nothing of later tokens.
    since_start = g.cumsum(-1)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=query.device).triu(1)
    decay = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()

    # Within a chunk each token corrects what the tokens before it wrote: a triangular system, whose solution is what
    # the tokens write from an empty state, and how that changes with the state before the chunk.
    system = (written_key @ key.transpose(-1, -2)) * decay
    attention = (query @ key.transpose(-1, -2)) * decay
    entered = written_key * since_start.exp().unsqueeze(-1)
    writes = torch.linalg.solve_triangular(system, written_value, upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, entered, upper=False, unitriangular=True)

    query = query * since_start.exp().unsqueeze(-1)
    key = key * (since_start[..., -1:] - since_start).exp().unsqueeze(-1)
    whole = since_start[..., -1].exp()[..., None, None]
    state, outs = state.to(exact), []
    for chunk in range(chunks):
        written = writes[:, :, chunk] - reads[:, :, chunk] @ state
        outs.append(query[:, :, chunk] @ state + attention[:, :, chunk] @ written)
        state = state * whole[:, :, chunk] + key[:, :, chunk].transpose(-1, -2) @ written
    out = torch.stack(outs, dim=2).flatten(2, 3)[:, :, :tokens]
    return out.transpose(1, 2).to(dtype).contiguous(), state


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)

    def tensors(batch: int, tokens: int, heads: int, per_key: int, size: int, value_size: int) -> list[torch.Tensor]:
        # Keys of about length 1, as the delta rule wants them; a state that forgets in some ten tokens.
        return [
            draw.normal(batch, tokens, heads // per_key, size),
            draw.normal(batch, tokens, heads // per_key, size, scale=size**-0.5),
            draw.normal(batch, tokens, heads, value_size),
            -0.1 * draw.normal(batch, tokens, heads, dtype=wide).exp(),
            draw.normal(batch, tokens, heads).sigmoid(),
        ]

    def state(sequences: int, heads: int, size: int, value_size: int) -> torch.Tensor:
        return leaf(draw.normal(sequences, heads, size, value_size, dtype=wide))

    def case(name: str, *sizes: int, **keywords: Any) -> Sample:
        return Sample(name, tuple(map(leaf, tensors(*sizes))), keywords)

    def packed(name: str, *ends: int, dtype: torch.dtype = torch.int64, **keywords: Any) -> Sample:
        cu_seqlens = torch.tensor((0, *ends), dtype=dtype, device=device)
        return case(name, 1, ends[-1], 4, 2, 16, 8, cu_seqlens=cu_seqlens, **keywords)

    norm: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    final: dict[str, Any] = {"output_final_state": True}
    yield case("ordinary", 2, 70, 4, 2, 16, 16, **norm)
    yield case("as keys come", 2, 70, 2, 1, 16, 8)
    yield case("initial and final state", 2, 65, 4, 2, 16, 8, initial_state=state(2, 4, 16, 8), **final, **norm)
    yield case("final state", 1, 64, 2, 2, 8, 16, **final)
    yield case("initial state", 1, 63, 2, 1, 8, 8, initial_state=state(1, 2, 8, 8), **norm)
    yield case("three chunks", 1, 130, 2, 1, 8, 8, **norm, **final)
    yield case("many tokens", 1, 1025, 1, 1, 4, 4, **norm)
    yield case("many features", 1, 3, 1, 1, 5, 1025, **norm)
    yield case("three value heads for a key", 2, 9, 6, 3, 8, 8, **norm)
    yield case("real heads", 1, 66, 1, 1, 128, 128, **norm, **final)
    yield case("one head", 3, 3, 1, 1, 3, 5, **norm)
    yield case("one feature", 1, 5, 2, 1, 1, 1)
    yield case("one token, with states", 2, 1, 4, 4, 8, 8, initial_state=state(2, 4, 8, 8), **final, **norm)
    yield case("no tokens", 2, 0, 2, 1, 8, 8, initial_state=state(2, 2, 8, 8), **final, **norm)
    yield case("no sequences", 0, 5, 2, 1, 8, 8, **norm)

    yield packed("packed", 3, 6, **norm)
    yield packed("packed, with states", 70, 71, 135, initial_state=state(3, 4, 16, 8), **final, **norm)
    yield packed("packed, int32", 64, 129, 130, dtype=torch.int32)
    yield packed("packed, one empty", 3, 3, 6, initial_state=state(3, 4, 16, 8), **final, **norm)
    yield packed("packed, single tokens", 1, 2, 3, initial_state=state(3, 4, 16, 8), **final, **norm)
    yield packed("packed, one sequence", 9, **norm)

    query, key, value, g, beta = map(leaf, tensors(2, 9, 4, 2, 8, 8))
    begin = {"initial_state": state(2, 4, 8, 8), **final, **norm}
    yield Sample("no decay", (query, key, value, torch.zeros_like(g), beta), begin)
    # g is not differentiated in two: no state is there that it could change, so its gradient is what rounding makes it.
    query1, key1, value1, g1, beta1 = (leaf(x[:, :1]) for x in (query, key, value, g, beta))
    yield Sample("one token", (query1, key1, value1, g1.detach(), beta1), {**final, **norm})
    yield Sample("forgets everything", (query, key, value, g.detach() - 100, beta), begin)
    yield Sample("writes nothing", (query, key, value, g, torch.zeros_like(beta)), begin)
    yield Sample("writes everything", (query, key, value, g, torch.ones_like(beta)), begin)
    yield Sample("decay in the dtype of query", (query, key, value, leaf(g.to(dtype)), beta), norm)
    given = query, key, value, g, beta
    yield Sample("strided", tuple(leaf(strided(x.detach())) for x in given), norm)
    # Heads before tokens in memory, as attention kernels want them.
    yield Sample("transposed", tuple(leaf(x.transpose(1, 2).contiguous().transpose(1, 2)) for x in given))
    yield Sample("expanded", tuple(leaf(x[:1].expand_as(x)) for x in given), norm)
    # Slices of one projection, as the model makes them.
    query, key, value = draw.normal(2, 9, 8, 8).tensor_split((2, 4), dim=2)
    yield Sample("one projection", (leaf(query), leaf(key), leaf(value), g, beta), norm)


def problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    batch: int,
    tokens: int,
    key_heads: int,
    value_heads: int,
    size: int,
    packed: int = 0,
) -> Sample:
    """`packed` is how many sequences of about one length the row holds, 0 where there is one a row."""
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    query, key = (draw.normal(batch, tokens, key_heads, size) for _ in range(2))
    value = draw.normal(batch, tokens, value_heads, size)
    g = -0.1 * draw.normal(batch, tokens, value_heads, dtype=torch.float32).exp()
    beta = draw.normal(batch, tokens, value_heads).sigmoid()
    keywords: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if packed:
        ends = [tokens * number // packed for number in range(packed + 1)]
        keywords["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return Sample("problem", tuple(map(leaf, (query, key, value, g, beta))), keywords)


def flops(*, batch: int, tokens: int, key_heads: int, value_heads: int, size: int, packed: int = 0) -> int:
    # Per token and value head, in chunks of C: keys with keys and with queries 4 C D, two triangular systems 2 C D,
    # attention with what is written 2 C D; the state is read twice and written once, 6 D D.
    return batch * tokens * value_heads * (8 * _CHUNK * size + 6 * size * size)


_QWEN3_NEXT = {"key_heads": 16, "value_heads": 32, "size": 128}


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    heads = [draw.normal(2, 6, 2, 8) for _ in range(3)]
    gates = -draw.normal(2, 6, 2).abs(), draw.normal(2, 6, 2).sigmoid()
    packed = torch.tensor((0, 3, 6), device=device)
    yield Sample("packed in a batch of two", (*heads, *gates), {"cu_seqlens": packed})
    one = tuple(tensor[:1] for tensor in (*heads, *gates))
    yield Sample("sequences that end early", one, {"cu_seqlens": packed - packed // 6})
    state = draw.normal(1, 2, 8, 8, dtype=torch.float32)
    yield Sample("a state for one of two", (*heads, *gates), {"initial_state": state})


CONTRACTS = (
    OpContract(
        op="chunk_gated_delta_rule",
        variant="standard",
        summary="linear attention with decay and the delta rule, in chunks; packed sequences stay apart",
        reference=chunk_gated_delta_rule,
        samples=samples,
        refused=refused,
        stored=(1,),
        # The reference rounds results alone. A fused kernel may keep in the dtype what it multiplies next: normalised
        # query and key, the inverse of the triangular system, what is written and what is read, the state, and
        # attention; and then its result. That is eight in a row, which the matrix products average. The longest sums
        # are over 1025 tokens or features. The noise is for the gradient of a state that has been forgotten, which
        # float32 cannot hold.
        tolerances=tolerances(roundings=8, terms=1025, noise=1),
        rows=dict.fromkeys(("query", "key", "value", "g", "beta", "initial_state"), 0),
        packed=dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-next-80b-a3b": {"batch": 2, "tokens": 8192, **_QWEN3_NEXT},
                "qwen3-next-80b-a3b, packed": {"batch": 1, "tokens": 16384, **_QWEN3_NEXT, "packed": 16},
                "equal heads": {"batch": 2, "tokens": 8192, "key_heads": 32, "value_heads": 32, "size": 128},
            },
            flops=flops,
            # None large: the reference keeps some twenty float32 tensors of the size of value.
        ),
    ),
)
