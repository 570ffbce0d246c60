"""moe_experts/standard: the routed experts of a mixture-of-experts layer, with SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample
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

    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            "moe_experts/standard: top_k_index and top_k_weights must both be [T, K], "
            f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )
    out = torch.zeros_like(hidden_states)
    for expert in range(gate_up.shape[0]):
        position, token = torch.where(top_k_index.t() == expert)
        gate, up = linear(hidden_states[token], gate_up[expert]).chunk(2, dim=-1)
        result = linear(silu(gate) * up, down[expert]) * top_k_weights[token, position, None]
        out.index_add_(0, token, result.to(out.dtype))
    return out


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up = draw.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        return leaf(gate_up), leaf(draw.normal(experts, hidden, inner, scale=inner**-0.5))

    def routed(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        # They need not add up to 1: OLMoE's do not.
        chosen = draw.ranks(tokens, experts)[:, :top_k]
        return chosen, leaf(draw.normal(tokens, top_k).sigmoid())

    def case(
        name: str, tokens: int, hidden: int, inner: int, experts: int, top_k: int, index: torch.Tensor | None = None
    ) -> Sample:
        chosen, routing = routed(tokens, experts, top_k)
        chosen = chosen if index is None else index.to(device)
        return Sample(name, (leaf(draw.normal(tokens, hidden)), chosen, routing, *weights(experts, hidden, inner)))

    yield case("ordinary", 33, 32, 24, experts=8, top_k=2)
    yield case("seventeen experts", 40, 16, 8, experts=17, top_k=4)
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

    chosen, routing = routed(15, 4, 2)
    gate_up, down = weights(4, 16, 8)
    yield Sample(
        "float32 routing weights",
        (leaf(draw.normal(15, 16)), chosen, leaf(routing.to(torch.promote_types(dtype, torch.float32))), gate_up, down),
    )
    yield Sample(
        "strided",
        (leaf(strided(draw.normal(15, 16))), chosen.t().contiguous().t(), leaf(strided(routing)), gate_up, down),
    )
    yield Sample("expanded", (leaf(draw.normal(1, 16).expand(15, 16)), chosen, routing, gate_up, down))
    # Weights stored the other way round, as gpt-oss keeps them.
    stored = (
        leaf(gate_up.transpose(1, 2).contiguous().transpose(1, 2)),
        leaf(down.transpose(1, 2).contiguous().transpose(1, 2)),
    )
    yield Sample("transposed weights", (leaf(draw.normal(15, 16)), chosen, routing, *stored))
    yield Sample("int32 indices", (leaf(draw.normal(15, 16)), chosen.int(), routing, gate_up, down))


CONTRACT = OpContract(
    op="moe_experts",
    variant="standard",
    summary="routed SwiGLU experts over sorted tokens; index E adds nothing",
    reference=moe_experts,
    samples=samples,
    # Forward rounds gate_up, silu, its product with up, down, the weighted result and the sum: six. Backward has as
    # many from the incoming gradient, on top of the rounded forward values that it multiplies. They are independent
    # and the matrix products average them, so eight in a row is what the largest element sees. The longest sums are
    # over 1025 features or tokens.
    tolerances=tolerances(roundings=8, terms=1025),
    fields=("moe_implementation",),
    prefix="fused_",
    activation="torch.nn.functional:silu",
)
