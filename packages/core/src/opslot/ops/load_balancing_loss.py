"""load_balancing_loss/standard: the auxiliary loss that keeps experts evenly used (Switch Transformer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def load_balancing_loss(
    gate_logits: tuple[torch.Tensor, ...] | None,
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor | int:
    """The share of tokens that choose an expert times its mean probability, summed and scaled by num_experts.

        loss = E * sum over e of (choices of e / N) * (sum of softmax(logits)[:, e] / N)

    gate_logits is a tuple, one tensor [T, E] a layer, of the router's raw logits: probabilities here would go through
    softmax twice. A token chooses its top_k largest probabilities. N counts the tokens of all layers, so a perfectly
    even router gives top_k. Only the probabilities carry a gradient. The result is a float32 scalar.

    attention_mask holds one weight a token, [B, S] with B * S = T or [T]; the same for every layer. A mask of any other
    size or rank is refused: flattened, a [B, 1, S, S] mask would be read as weights of the wrong tokens. If no token
    counts the loss is NaN, as upstream. Anything but a tuple of at least one layer gives 0, as upstream.

    Source: transformers 5.24.0, models/qwen3_moe, load_balancing_loss_func.
    """
    import torch

    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    device = gate_logits[0].device
    compute = torch.promote_types(gate_logits[0].dtype, torch.float32)
    chosen = torch.zeros(num_experts, dtype=compute, device=device)
    probability = torch.zeros(num_experts, dtype=compute, device=device)
    total: torch.Tensor | float = 0.0
    for logits in gate_logits:
        weights = _token_weights(attention_mask, logits.shape[0], device, compute)
        probabilities = torch.nn.functional.softmax(logits.to(device), dim=-1)
        _, selected = torch.topk(probabilities, top_k, dim=-1)
        chosen = chosen + torch.zeros_like(chosen).scatter_add_(
            0, selected.reshape(-1), weights.repeat_interleave(top_k)
        )
        probability = probability + (probabilities.to(compute) * weights.unsqueeze(-1)).sum(dim=0)
        total = total + weights.sum()
    return torch.sum((chosen / total) * (probability / total)) * num_experts


def _token_weights(
    attention_mask: torch.Tensor | None, tokens: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    import torch

    if attention_mask is None:
        return torch.ones(tokens, dtype=dtype, device=device)
    if attention_mask.dim() > 2 or attention_mask.numel() != tokens:
        raise ValueError(
            f"load_balancing_loss/standard: attention_mask must be [B, S] with B * S = {tokens}, the tokens of every "
            f"layer, or [{tokens}]; got {list(attention_mask.shape)}"
        )
    return attention_mask.reshape(-1).to(device=device, dtype=dtype)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def logits(tokens: int, experts: int) -> torch.Tensor:
        # Distinct in every dtype, also after softmax: which experts are the largest must not depend on rounding.
        step = min(0.5, 8 / experts)
        return ((draw.ranks(tokens, experts) - experts / 2) * step).to(dtype) + draw.normal(tokens, 1)

    def layers(count: int, tokens: int, experts: int) -> tuple[torch.Tensor, ...]:
        return tuple(leaf(logits(tokens, experts)) for _ in range(count))

    mask = torch.ones(3, 7, dtype=torch.int64, device=device)
    mask[0, 4:] = 0
    mask[2, :2] = 0
    yield Sample("ordinary", (layers(3, 21, 8), 8, 2))
    yield Sample("masked", (layers(3, 21, 8), 8, 2, mask))
    yield Sample("boolean mask", (layers(2, 21, 8), 8, 3), {"attention_mask": mask.bool()})
    yield Sample("weighted tokens", (layers(2, 21, 8), 8, 2, draw.normal(3, 7).abs()))
    yield Sample("flat mask", (layers(1, 21, 4), 4, 1, mask.reshape(-1)))
    yield Sample("expanded mask", (layers(1, 21, 4), 4, 1, mask[:1].expand(3, 7)))
    yield Sample("seventeen experts", (layers(1, 65, 17), 17, 4))
    yield Sample("many experts", (layers(9, 20, 129), 129, 9))
    yield Sample("odd sizes", (layers(2, 1025, 3), 3, 1))
    yield Sample("one expert", (layers(2, 5, 1), 1, 1))
    # Every expert is chosen by every token, so the loss is constant and its gradient zero.
    yield Sample("every expert chosen", (layers(2, 9, 4), 4, 4))
    yield Sample("one token", (layers(1, 1, 8), 8, 2))
    yield Sample("layers of different length", ((leaf(logits(9, 4)), leaf(logits(5, 4))), 4, 2))
    yield Sample("strided", ((leaf(strided(logits(9, 4))), leaf(logits(9, 4).t().contiguous().t())), 4, 2))
    yield Sample("one layer frozen", ((logits(9, 4), leaf(logits(9, 4))), 4, 2))
    yield Sample("all tokens masked", ((logits(21, 4),), 4, 2, torch.zeros_like(mask)))
    yield Sample("no logits", (None, 4, 2))


def problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, layers: int, tokens: int, experts: int, top_k: int
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    return Sample("problem", (tuple(leaf(draw.normal(tokens, experts)) for _ in range(layers)), experts, top_k))


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    layers = draw.normal(6, 4), draw.normal(6, 4)
    yield Sample("a mask of four dimensions", (layers, 4, 2, torch.ones(2, 1, 3, 3, device=device)))
    yield Sample("a mask of other tokens", (layers, 4, 2, torch.ones(2, 4, device=device)))


CONTRACTS = (
    OpContract(
        op="load_balancing_loss",
        variant="standard",
        summary="E * sum over experts of (share of choices) * (mean probability)",
        reference=load_balancing_loss,
        samples=samples,
        refused=refused,
        # Probabilities are rounded, then the gradient p * (g - sum p g) of their softmax, whose two terms partly
        # cancel. Where they cancel wholly what remains is a rounding of p * g, and g is at most E * (E / N) with N >=
        # 10 tokens.
        tolerances=tolerances(roundings=6, terms=1025, noise=1),
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-30b-a3b": {"layers": 48, "tokens": 8192, "experts": 128, "top_k": 8},
                "qwen3-30b-a3b, long": {"layers": 48, "tokens": 32768, "experts": 128, "top_k": 8},
                "mixtral-8x7b": {"layers": 32, "tokens": 8192, "experts": 8, "top_k": 2},
            },
            large={"layers": 1, "tokens": 2**24 + 8, "experts": 128, "top_k": 8},
        ),
        runs_when="the model returns router logits (output_router_logits=True) while gradients are recorded",
    ),
)
