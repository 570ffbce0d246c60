"""cross_entropy_loss/causal: the language model head and the next-token loss in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def cross_entropy_loss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of the head's logits with the next token, as one scalar in float32.

        logits = hidden_states @ lm_head_weight.T + bias      then, in this order and in the dtype of hidden_states:
        logits = logits * logit_scale
        logits = logit_softcap * tanh(logits / logit_softcap)
        loss = sum over counted tokens of -log softmax(logits32)[target] / count

    hidden_states is [..., H], lm_head_weight [V, H], bias [V]. `labels` holds one label a row of hidden_states and is
    shifted here, exactly once and along its last dimension: position s predicts labels[s + 1], the last predicts
    nothing. When `shift_labels` is given it is the target of every row, is not shifted, and `labels` is not read (None
    will do). Labels are flattened, so [B, S] labels go with [B * S, H] rows. Rows whose target is `ignore_index` do
    not count.

    `count` is `num_items_in_batch`, an int or a 0-d tensor, so that micro-batches add up to the batch; without it the
    number of counted rows. With no row to count the mean is NaN, as in torch, and with num_items_in_batch the loss is
    exactly 0; the gradients are zeros either way.

    Source: transformers 5.24.0, loss/loss_utils.py, ForCausalLMLoss after the lm_head of Qwen3MoeForCausalLM; the
    softcap as in Gemma2ForCausalLM, the scale as in CohereForCausalLM.
    """
    import torch
    from torch.nn.functional import cross_entropy, linear, pad

    logits = linear(hidden_states, lm_head_weight, bias)
    if logit_scale is not None:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if shift_labels is None:
        if labels is None:
            raise ValueError("cross_entropy_loss/causal: give labels, or shift_labels")
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), target, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def head(vocab: int, hidden: int) -> torch.Tensor:
        return leaf(draw.normal(vocab, hidden, scale=hidden**-0.5))

    def labels(vocab: int, *shape: int) -> torch.Tensor:
        # About one in four ignored, among them the first.
        wanted = draw.integers(vocab, *shape)
        wanted[draw.integers(4, *shape) == 0] = -100
        wanted.view(-1)[:1] = -100
        return wanted

    hidden, weight, wanted = leaf(draw.normal(2, 9, 32)), head(50, 32), labels(50, 2, 9)
    yield Sample("ordinary", (hidden, weight, wanted))
    yield Sample("counted batch, int", (hidden, weight, wanted), {"num_items_in_batch": 29})
    count = torch.tensor(29, device=device)
    yield Sample("counted batch, tensor", (hidden, weight, wanted), {"num_items_in_batch": count})
    yield Sample("shifted labels", (hidden, weight, None), {"shift_labels": labels(50, 2, 9)})
    yield Sample("both labels", (hidden, weight, wanted), {"shift_labels": labels(50, 2, 9), "num_items_in_batch": 5})
    zeros_ignored = wanted.clamp(min=0)
    yield Sample("other ignore_index", (hidden, weight, zeros_ignored), {"ignore_index": 0})
    yield Sample("bias", (hidden, weight, wanted), {"bias": leaf(draw.normal(50))})
    yield Sample("softcap", (hidden, weight, wanted), {"logit_softcap": 1.5})
    yield Sample("scale", (hidden, weight, wanted), {"logit_scale": 0.0625})
    everything = {"logit_scale": 1.7, "logit_softcap": 2.0, "bias": leaf(draw.normal(50)), "num_items_in_batch": 11}
    yield Sample("bias, scale and softcap", (hidden, weight, wanted), everything)
    yield Sample("rows and batch", (leaf(draw.normal(18, 32)), weight, wanted))
    yield Sample("one sequence", (leaf(draw.normal(9, 32)), weight, labels(50, 9)))
    yield Sample("odd sizes", (leaf(draw.normal(1, 7, 1025)), head(3, 1025), labels(3, 1, 7)))
    yield Sample("odd vocabulary", (leaf(draw.normal(1, 5, 24)), head(1025, 24), labels(1025, 1, 5)))
    yield Sample("many tokens", (leaf(draw.normal(1, 1025, 8)), head(5, 8), labels(5, 1, 1025)))
    yield Sample(
        "one token", (leaf(draw.normal(1, 1, 16)), head(7, 16), None), {"shift_labels": draw.integers(7, 1, 1)}
    )
    yield Sample("vocabulary of one", (hidden, head(1, 32), torch.zeros_like(wanted)))
    yield Sample("strided", (leaf(strided(draw.normal(2, 9, 32))), leaf(strided(draw.normal(50, 32))), strided(wanted)))
    yield Sample("expanded", (leaf(draw.normal(1, 9, 32).expand(2, 9, 32)), weight, wanted[:1].expand(2, 9)))
    ignored = torch.full_like(wanted, -100)
    yield Sample("all ignored", (hidden, weight, ignored))
    yield Sample("all ignored, counted batch", (hidden, weight, ignored), {"num_items_in_batch": 7})
    yield Sample("all ignored, count zero", (hidden, weight, ignored), {"num_items_in_batch": 0})
    # Sequences of one token have no next one.
    yield Sample(
        "nothing to predict", (leaf(draw.normal(3, 1, 32)), weight, labels(50, 3, 1)), {"num_items_in_batch": 3}
    )
    yield Sample("no tokens", (leaf(draw.normal(1, 0, 32)), weight, labels(50, 1, 0)), {"num_items_in_batch": 3})


CONTRACT = OpContract(
    op="cross_entropy_loss",
    variant="causal",
    summary="lm_head and next-token cross entropy in one, without keeping the logits",
    reference=cross_entropy_loss,
    samples=samples,
    # A logit of up to 4 is rounded after the product, the scale, the division, tanh and the product with the cap, and
    # an absolute error there is a relative one of the probability; then the gradient of the logits and of the inputs
    # are rounded once each. These meet in the sum of eight at the largest element, since it is the target's own "- 1"
    # that dominates a gradient and this has no error.
    tolerances=tolerances(roundings=8, terms=1025),
    runs_when="the model gets labels while gradients are recorded; a trainer that computes the loss itself (label "
    "smoothing, compute_loss_func) takes the labels away",
)
