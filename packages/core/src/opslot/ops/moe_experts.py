"""moe_experts: the routed experts of a mixture-of-experts layer, with one gated activation per variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def moe_experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Send every token through the experts its router chose and add up what they return.

        out[t] = sum over k of weights[t, k] * down[e] @ (silu(gate) * up),  gate, up = halves of gate_up[e] @ hidden[t]

    hidden_states is [T, H], top_k_index [T, K] of integers, top_k_weights [T, K] of any floating dtype; gate_up is
    [E, 2I, H] with the gate first, down [E, H, I]. The result is [T, H] in the dtype of hidden_states.

    Index E, one past the last expert, means "not mine" (expert parallelism): it adds 0, and its routing weight gets
    gradient 0. An expert may be chosen twice for one token, and counts twice. An expert that no token chose gets a
    gradient of zeros, also when there are no tokens at all. Indices other than [T, K] are refused.

    Source: transformers 5.24.0, models/qwen3_moe, Qwen3MoeExperts.forward (the "eager" experts implementation).
    """
    import torch
    from torch.nn.functional import linear, silu

    _check_choices("standard", top_k_index, top_k_weights)
    out = torch.zeros_like(hidden_states)
    for expert in range(gate_up.shape[0]):
        position, token = torch.where(top_k_index.t() == expert)
        gate, up = linear(hidden_states[token], gate_up[expert]).chunk(2, dim=-1)
        result = linear(silu(gate) * up, down[expert]) * top_k_weights[token, position, None]
        out.index_add_(0, token, result.to(out.dtype))
    return out


def moe_experts_clamped(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Routed experts as in moe_experts/standard, with gate and up clamped before the activation.

        out[t] = sum over k of weights[t, k] * down[e] @ (silu(min(gate, limit)) * clamp(up, -limit, limit))

    The gate is clamped from above only. Shapes, dtypes, index E and empty experts are as in moe_experts/standard.
    `limit` is positive, and what lies exactly at it still gets its gradient, as from torch.clamp.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4Experts.forward and _apply_gate.
    """
    import torch
    from torch.nn.functional import linear, silu

    _check_choices("clamped", top_k_index, top_k_weights)
    _check_limit("clamped", limit)
    out = torch.zeros_like(hidden_states)
    for expert in range(gate_up.shape[0]):
        position, token = torch.where(top_k_index.t() == expert)
        gate, up = linear(hidden_states[token], gate_up[expert]).chunk(2, dim=-1)
        active = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        result = linear(active, down[expert]) * top_k_weights[token, position, None]
        out.index_add_(0, token, result.to(out.dtype))
    return out


def moe_experts_gpt_oss(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Routed experts of gpt-oss: biases, weights stored the other way round, gate and up in alternating columns.

        gate, up = even and odd columns of hidden[t] @ gate_up[e] + gate_up_bias[e]
        gate, up = min(gate, limit), min(max(up, -limit), limit)
        out[t] = sum over k of weights[t, k] * ((up + 1) * gate * sigmoid(alpha * gate) @ down[e] + down_bias[e])

    hidden_states is [T, H], top_k_index [T, K] of integers, top_k_weights [T, K] of any floating dtype; gate_up is
    [E, H, 2I], gate_up_bias [E, 2I], down [E, I, H], down_bias [E, H]. The result is [T, H] in the dtype of
    hidden_states. gpt-oss has alpha 1.702 and limit 7; limit must be above zero. The routing weight multiplies the bias
    too. Index E adds 0, no bias either; upstream's loop refuses such an index although it has a branch for it, and its
    grouped_mm takes it under expert parallelism.

    Source: transformers 5.24.0, models/gpt_oss, GptOssExperts.forward and _apply_gate.
    """
    import torch

    _check_choices("gpt_oss", top_k_index, top_k_weights)
    _check_limit("gpt_oss", limit)
    out = torch.zeros_like(hidden_states)
    for expert in range(gate_up.shape[0]):
        position, token = torch.where(top_k_index.t() == expert)
        columns = hidden_states[token] @ gate_up[expert] + gate_up_bias[expert]
        gate, up = columns[..., ::2].clamp(max=limit), columns[..., 1::2].clamp(-limit, limit)
        active = (up + 1) * (gate * torch.sigmoid(gate * alpha))
        result = (active @ down[expert] + down_bias[expert]) * top_k_weights[token, position, None]
        out.index_add_(0, token, result.to(out.dtype))
    return out


def _check_choices(variant: str, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> None:
    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            f"moe_experts/{variant}: top_k_index and top_k_weights must both be [T, K], "
            f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )


def _check_limit(variant: str, limit: float) -> None:
    if limit is None or not limit > 0:
        raise ValueError(
            f"moe_experts/{variant}: limit must be a positive number, got {limit!r}; moe_experts/standard has none"
        )


# Draws hidden_states, and the arguments after the routing, for so many experts of a hidden and an inner size.
_Hidden = Callable[[int, int], "torch.Tensor"]
_Weights = Callable[[int, int, int], "tuple[torch.Tensor | float, ...]"]


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)

    def weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor | float, ...]:
        gate_up = draw.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        return leaf(gate_up), leaf(draw.normal(experts, hidden, inner, scale=inner**-0.5))

    return _samples(draw, draw.normal, weights)


# Clamped values have no gradient, so none may lie where a rounding decides on which side of the limit it is. The first
# feature of every token is +1 or -1 and has weight -4, 0 or 4; all others together add less than 0.3 to 0.4 a standard
# deviation. So gates and ups lie around multiples of 4, and the limit is 2: five standard deviations from them.
_LIMIT = 2.0


def _loud(draw: Draw, *shape: int) -> torch.Tensor:
    return (4 * (draw.integers(3, *shape) - 1)).to(draw.dtype)


def _hidden_for_limit(draw: Draw) -> _Hidden:
    def hidden_states(tokens: int, hidden: int) -> torch.Tensor:
        values = draw.normal(tokens, hidden)
        values[:, 0] = (2 * draw.integers(2, tokens) - 1).to(draw.dtype)
        return values

    return hidden_states


def samples_clamped(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)

    def weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor | float, ...]:
        gate_up = draw.normal(experts, 2 * inner, hidden, scale=0.3 * hidden**-0.5)
        gate_up[..., 0] = _loud(draw, experts, 2 * inner)
        return leaf(gate_up), leaf(draw.normal(experts, hidden, inner, scale=inner**-0.5)), _LIMIT

    return _samples(draw, _hidden_for_limit(draw), weights)


def samples_gpt_oss(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)

    def weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor | float, ...]:
        gate_up = draw.normal(experts, hidden, 2 * inner, scale=0.3 * hidden**-0.5)
        gate_up[:, 0] = _loud(draw, experts, 2 * inner)
        gate_up_bias = _loud(draw, experts, 2 * inner) + draw.normal(experts, 2 * inner, scale=0.2)
        down = draw.normal(experts, inner, hidden, scale=inner**-0.5)
        return leaf(gate_up), leaf(gate_up_bias), leaf(down), leaf(draw.normal(experts, hidden)), 1.702, _LIMIT

    for number, sample in enumerate(_samples(draw, _hidden_for_limit(draw), weights)):
        yield sample
        if number == 0:
            yield Sample("another alpha", (*sample.args[:-2], 1.0, _LIMIT))


def _samples(draw: Draw, hidden_states: _Hidden, weights: _Weights) -> Iterator[Sample]:
    import torch

    def routed(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        # They need not add up to 1: OLMoE's do not.
        chosen = draw.ranks(tokens, experts)[:, :top_k]
        return chosen, leaf(draw.normal(tokens, top_k).sigmoid())

    def case(
        name: str, tokens: int, hidden: int, inner: int, experts: int, top_k: int, index: torch.Tensor | None = None
    ) -> Sample:
        chosen, routing = routed(tokens, experts, top_k)
        chosen = chosen if index is None else index.to(draw.device)
        return Sample(name, (leaf(hidden_states(tokens, hidden)), chosen, routing, *weights(experts, hidden, inner)))

    yield case("ordinary", 33, 32, 24, experts=8, top_k=2)
    yield case("seventeen experts", 40, 16, 8, experts=17, top_k=4)
    yield case("many experts", 40, 16, 8, experts=129, top_k=9)
    yield case("one expert", 9, 16, 8, experts=1, top_k=1)
    yield case("every expert chosen", 12, 16, 8, experts=4, top_k=4)
    yield case("odd sizes", 7, 1025, 3, experts=2, top_k=1)
    yield case("odd inner size", 1025, 8, 5, experts=3, top_k=2)
    yield case("one token", 1, 16, 8, experts=4, top_k=2)
    yield case("no tokens", 0, 16, 8, experts=4, top_k=2)
    yield case("empty experts", 6, 16, 8, experts=5, top_k=1, index=torch.tensor([[3], [1], [3], [3], [1], [3]]))
    yield case(
        "chosen twice", 5, 16, 8, experts=3, top_k=2, index=torch.tensor([[1, 1], [0, 2], [2, 2], [1, 0], [0, 0]])
    )
    some = torch.tensor([[0, 4], [4, 4], [2, 1], [4, 3], [0, 1], [4, 4], [3, 0]])
    yield case("some not mine", 7, 16, 8, experts=4, top_k=2, index=some)
    yield case("none mine", 5, 16, 8, experts=4, top_k=2, index=torch.full((5, 2), 4))

    (chosen, routing), shared = routed(15, 4, 2), weights(4, 16, 8)
    yield Sample(
        "float32 routing weights",
        (
            leaf(hidden_states(15, 16)),
            chosen,
            leaf(routing.to(torch.promote_types(draw.dtype, torch.float32))),
            *shared,
        ),
    )
    yield Sample(
        "strided",
        (leaf(strided(hidden_states(15, 16))), chosen.t().contiguous().t(), leaf(strided(routing)), *shared),
    )
    yield Sample("expanded", (leaf(hidden_states(1, 16).expand(15, 16)), chosen, routing, *shared))
    # Matrices stored the other way round, as gpt-oss has them and the others do not.
    stored = [_stored_transposed(w) if isinstance(w, torch.Tensor) else w for w in shared]
    yield Sample("transposed weights", (leaf(hidden_states(15, 16)), chosen, routing, *stored))
    yield Sample("int32 indices", (leaf(hidden_states(15, 16)), chosen.int(), routing, *shared))


def _stored_transposed(weight: torch.Tensor) -> torch.Tensor:
    return leaf(weight.transpose(-1, -2).contiguous().transpose(-1, -2))


def problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    skewed: int = 0,
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    gate_up = leaf(draw.normal(experts, 2 * inner, hidden, scale=hidden**-0.5))
    down = leaf(draw.normal(experts, hidden, inner, scale=inner**-0.5))
    return Sample("problem", (*_routed(draw, tokens, hidden, experts, top_k, skewed), gate_up, down))


def problem_clamped(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    skewed: int = 0,
) -> Sample:
    sizes = {"tokens": tokens, "hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k, "skewed": skewed}
    standard = problem(device, dtype, seed, **sizes)
    return Sample(standard.name, (*standard.args, 10.0))


def problem_gpt_oss(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    skewed: int = 0,
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    gate_up = leaf(draw.normal(experts, hidden, 2 * inner, scale=hidden**-0.5))
    gate_up_bias = leaf(draw.normal(experts, 2 * inner, scale=0.1))
    down = leaf(draw.normal(experts, inner, hidden, scale=inner**-0.5))
    weights = gate_up, gate_up_bias, down, leaf(draw.normal(experts, hidden, scale=0.1))
    return Sample("problem", (*_routed(draw, tokens, hidden, experts, top_k, skewed), *weights, 1.702, 7.0))


def _routed(
    draw: Draw, tokens: int, hidden: int, experts: int, top_k: int, skewed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states, top_k_index, top_k_weights of a softmax router; skewed: the first experts get most tokens."""
    import torch

    logits = draw.normal(tokens, experts, dtype=torch.float32)
    if skewed:
        logits += torch.linspace(3, -3, experts, device=draw.device)
    routing, chosen = logits.softmax(-1).topk(top_k, dim=-1)
    routing = routing / routing.sum(-1, keepdim=True)
    return leaf(draw.normal(tokens, hidden)), chosen, leaf(routing.to(draw.dtype))


def flops(*, tokens: int, hidden: int, inner: int, experts: int, top_k: int, skewed: int = 0) -> int:
    return 6 * tokens * top_k * hidden * inner


_ROWS = {"hidden_states": 0, "top_k_index": 0, "top_k_weights": 0}
_QWEN3_30B = {"hidden": 2048, "inner": 768, "experts": 128, "top_k": 8}
# Both hidden_states and gate_up are larger than 2**31 elements.
_LARGE = {"tokens": 2**20 + 8, "hidden": 2048, "inner": 1024, "experts": 513, "top_k": 1}


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    yield from _refused(next(samples(device, dtype, seed)))


def refused_clamped(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(samples_clamped(device, dtype, seed))
    yield from _refused(ordinary)
    yield Sample("a limit of zero", (*ordinary.args[:-1], 0.0))


def refused_gpt_oss(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    ordinary = next(samples_gpt_oss(device, dtype, seed))
    yield from _refused(ordinary)
    yield Sample("a limit of zero", (*ordinary.args[:-1], 0.0))


def _refused(ordinary: Sample) -> Iterator[Sample]:
    hidden, index, routing, *rest = ordinary.args
    yield Sample("choices in one row", (hidden, index.flatten(), routing.detach().flatten(), *rest))
    yield Sample("weights of fewer choices", (hidden, index, routing.detach()[:, :1], *rest))


CONTRACTS = (
    OpContract(
        op="moe_experts",
        variant="standard",
        summary="routed SwiGLU experts over sorted tokens; index E adds nothing",
        reference=moe_experts,
        samples=samples,
        refused=refused,
        # Forward rounds gate_up, silu, its product with up, down, the weighted result and the sum: six. Backward has as
        # many from the incoming gradient, on top of the rounded forward values that it multiplies. They are independent
        # and the matrix products average them, so eight in a row is what the largest element sees. The longest sums are
        # over 1025 features or tokens.
        tolerances=tolerances(roundings=8, terms=1025),
        fields=("moe_implementation",),
        prefix="fused_",
        activation="torch.nn.functional:silu",
        rows=_ROWS,
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-30b-a3b": {"tokens": 8192, **_QWEN3_30B},
                "qwen3-30b-a3b, skewed": {"tokens": 8192, **_QWEN3_30B, "skewed": 1},
                "qwen3-30b-a3b, long": {"tokens": 32768, **_QWEN3_30B},
                "qwen3.5-35b-a3b": {"tokens": 8192, "hidden": 2048, "inner": 512, "experts": 256, "top_k": 8},
                "eight experts": {"tokens": 8192, "hidden": 4096, "inner": 4096, "experts": 8, "top_k": 2},
                "sixty-four experts": {"tokens": 8192, "hidden": 4096, "inner": 2048, "experts": 64, "top_k": 8},
            },
            flops=flops,
            large=_LARGE,
        ),
    ),
    OpContract(
        op="moe_experts",
        variant="clamped",
        summary="routed SwiGLU experts whose gate and up are clamped before the activation",
        reference=moe_experts_clamped,
        samples=samples_clamped,
        refused=refused_clamped,
        # As for standard: clamping rounds nothing.
        tolerances=tolerances(roundings=8, terms=1025),
        fields=("moe_implementation",),
        prefix="fused_",
        activation="torch.nn.functional:silu",
        rows=_ROWS,
        workload=Workload(
            problem=problem_clamped,
            shapes={"deepseek-v4": {"tokens": 8192, "hidden": 4096, "inner": 2048, "experts": 256, "top_k": 6}},
            flops=flops,
            large=_LARGE,
        ),
    ),
    OpContract(
        op="moe_experts",
        variant="gpt_oss",
        summary="routed experts with biases, interleaved gate and up, (up + 1) * gate * sigmoid(alpha * gate)",
        reference=moe_experts_gpt_oss,
        samples=samples_gpt_oss,
        refused=refused_gpt_oss,
        # Beside standard's six, forward rounds both sums with a bias, alpha * gate, its sigmoid and up + 1.
        tolerances=tolerances(roundings=12, terms=1025),
        fields=("moe_implementation",),
        prefix="fused_",
        rows=_ROWS,
        workload=Workload(
            problem=problem_gpt_oss,
            shapes={
                "gpt-oss-20b": {"tokens": 8192, "hidden": 2880, "inner": 2880, "experts": 32, "top_k": 4},
                "gpt-oss-120b": {"tokens": 8192, "hidden": 2880, "inner": 2880, "experts": 128, "top_k": 4},
            },
            flops=flops,
            large=_LARGE,
        ),
    ),
)
