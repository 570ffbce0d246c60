"""cross_entropy_loss: a linear head and the loss of its logits in one, for the next token or for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
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
    from torch.nn.functional import pad

    if shift_labels is None:
        if labels is None:
            raise ValueError("cross_entropy_loss/causal: give labels, or shift_labels")
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits = _logits(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap)
    return _loss(logits, shift_labels, ignore_index, num_items_in_batch)


def token_cls_loss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of the head's logits with each row's own label, as one scalar in float32.

    As cross_entropy_loss/causal in every keyword and every cast, with one difference: `labels` are not shifted, row s
    is judged by labels[s]. `shift_labels` is refused: a trainer makes them for a model that predicts the next token.

    The alias `seq_cls` is VeOmni's name for this loss over tokens. It is not ForSequenceClassificationLoss of
    transformers, which has one label a sequence, regression and multi-label forms, and does not compute in float32.

    Source: transformers 5.24.0, loss/loss_utils.py, ForTokenClassification after the score layer of
    GenericForTokenClassification, whose bias is `bias` and whose dropout stays in the model.
    """
    if shift_labels is not None:
        raise ValueError(
            "cross_entropy_loss/token_cls: shift_labels are those of a model that predicts the next token; here each "
            "row has its own label, so pass labels, or choose cross_entropy_loss/causal"
        )
    if labels is None:
        raise ValueError("cross_entropy_loss/token_cls: give labels, one a row of hidden_states")
    logits = _logits(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap)
    return _loss(logits, labels, ignore_index, num_items_in_batch)


def _logits(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float | None,
    logit_softcap: float | None,
) -> torch.Tensor:
    import torch

    logits = torch.nn.functional.linear(hidden_states, lm_head_weight, bias)
    if logit_scale is not None:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _loss(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, num_items_in_batch: int | torch.Tensor | None
) -> torch.Tensor:
    import torch
    from torch.nn.functional import cross_entropy

    rows, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(rows, target, ignore_index=ignore_index, reduction="mean")
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def head(vocab: int, hidden: int) -> torch.Tensor:
        return _head(draw, vocab, hidden)

    def labels(vocab: int, *shape: int) -> torch.Tensor:
        return _labels(draw, vocab, *shape)

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
    # Exact in every dtype, and beyond what exp holds in float16 and, summed, in float32.
    loud = leaf(16 * torch.eye(32, device=device, dtype=dtype)[draw.ranks(18, 32)[:, 0]].view(2, 9, 32))
    yield Sample("large logits", (loud, leaf(draw.integers(17, 50, 32).to(dtype) - 8), wanted))
    # Labels that 16 bits do not hold.
    yield Sample("large vocabulary", (leaf(draw.normal(1, 3, 8)), head(70001, 8), 70000 - draw.integers(3, 1, 3)))
    everything = {"shift_labels": labels(50, 2, 9).clamp(min=0), "ignore_index": 0, "num_items_in_batch": count}
    everything |= {"bias": leaf(draw.normal(50)), "logit_softcap": 2.0}
    yield Sample("shifted, counted, bias and softcap", (hidden, weight, None), everything)
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


def samples_token_cls(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    hidden, weight, wanted = leaf(draw.normal(2, 9, 32)), _head(draw, 7, 32), _labels(draw, 7, 2, 9)
    bias = leaf(draw.normal(7))
    yield Sample("ordinary", (hidden, weight, wanted), {"bias": bias})
    yield Sample("no bias", (hidden, weight, wanted))
    count = torch.tensor(29, device=device)
    yield Sample("counted batch, int", (hidden, weight, wanted), {"num_items_in_batch": 29, "bias": bias})
    yield Sample("counted batch, tensor", (hidden, weight, wanted), {"num_items_in_batch": count})
    yield Sample("other ignore_index", (hidden, weight, wanted.clamp(min=0)), {"ignore_index": 0, "bias": bias})
    everything = {"logit_scale": 1.7, "logit_softcap": 2.0, "bias": bias, "num_items_in_batch": 11}
    yield Sample("bias, scale and softcap", (hidden, weight, wanted), everything)
    # Exact in every dtype, and beyond what exp holds in float16 and, summed, in float32.
    loud = leaf(16 * torch.eye(32, device=device, dtype=dtype)[draw.ranks(18, 32)[:, 0]].view(2, 9, 32))
    yield Sample("large logits", (loud, leaf(draw.integers(17, 50, 32).to(dtype) - 8), wanted))
    yield Sample("rows and batch", (leaf(draw.normal(18, 32)), weight, wanted))
    yield Sample("pooled rows", (leaf(draw.normal(5, 32)), weight, draw.integers(7, 5)))
    yield Sample("odd sizes", (leaf(draw.normal(1, 7, 1025)), _head(draw, 3, 1025), _labels(draw, 3, 1, 7)))
    yield Sample("many classes", (leaf(draw.normal(1, 5, 24)), _head(draw, 1025, 24), _labels(draw, 1025, 1, 5)))
    yield Sample("many tokens", (leaf(draw.normal(1, 1025, 8)), _head(draw, 5, 8), _labels(draw, 5, 1, 1025)))
    yield Sample("one token", (leaf(draw.normal(1, 1, 16)), _head(draw, 7, 16), draw.integers(7, 1, 1)))
    yield Sample("two classes", (hidden, _head(draw, 2, 32), _labels(draw, 2, 2, 9)))
    yield Sample("one class", (hidden, _head(draw, 1, 32), torch.zeros_like(wanted)))
    yield Sample("strided", (leaf(strided(draw.normal(2, 9, 32))), leaf(strided(draw.normal(7, 32))), strided(wanted)))
    yield Sample("transposed labels", (hidden, weight, wanted.t().contiguous().t()))
    yield Sample("expanded", (leaf(draw.normal(1, 9, 32).expand(2, 9, 32)), weight, wanted[:1].expand(2, 9)))
    ignored = torch.full_like(wanted, -100)
    yield Sample("all ignored", (hidden, weight, ignored))
    yield Sample("all ignored, counted batch", (hidden, weight, ignored), {"num_items_in_batch": 7})
    yield Sample("all ignored, count zero", (hidden, weight, ignored), {"num_items_in_batch": 0})
    empty = leaf(draw.normal(1, 0, 32)), weight, wanted[:1, :0]
    yield Sample("no tokens", empty, {"num_items_in_batch": 3, "bias": bias})


def _head(draw: Draw, vocab: int, hidden: int) -> torch.Tensor:
    return leaf(draw.normal(vocab, hidden, scale=hidden**-0.5))


def _labels(draw: Draw, vocab: int, *shape: int) -> torch.Tensor:
    # About one in four ignored, among them the first.
    wanted = draw.integers(vocab, *shape)
    wanted[draw.integers(4, *shape) == 0] = -100
    wanted.view(-1)[:1] = -100
    return wanted


def problem(
    device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int, vocab: int
) -> Sample:
    draw = Draw(device, dtype, seed, in_place=True)
    arguments = leaf(draw.normal(1, tokens, hidden)), _head(draw, vocab, hidden), draw.integers(vocab, 1, tokens)
    return Sample("problem", arguments, {"num_items_in_batch": tokens})


def flops(*, tokens: int, hidden: int, vocab: int) -> int:
    return 2 * tokens * hidden * vocab


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield Sample("no labels", (draw.normal(2, 4, 8), draw.normal(5, 8), None))


def refused_token_cls(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    hidden, weight, labels = draw.normal(2, 4, 8), draw.normal(5, 8), draw.integers(5, 2, 4)
    yield Sample("no labels", (hidden, weight, None))
    yield Sample("shifted labels", (hidden, weight, labels), {"shift_labels": labels})


CONTRACTS = (
    OpContract(
        op="cross_entropy_loss",
        variant="causal",
        summary="lm_head and next-token cross entropy in one, without keeping the logits",
        reference=cross_entropy_loss,
        samples=samples,
        refused=refused,
        # A logit of up to 4 is rounded after the product, the scale, the division, tanh and the product with the cap,
        # and an absolute error there is a relative one of the probability; then the gradient of the logits and of the
        # inputs are rounded once each. These meet in the sum of eight at the largest element, since it is the target's
        # own "- 1" that dominates a gradient and this has no error. Between equal rows of the head the gradient of a
        # state cancels: what remains are a few roundings of the largest term, a weight of about 3 / sqrt(32) over some
        # ten rows.
        # The sum over 70,001 classes enters by its logarithm, 11, which has an eleventh of its relative error: no more
        # than a sum of 1025 terms.
        tolerances=tolerances(roundings=8, terms=1025, noise=0.25),
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-30b-a3b": {"tokens": 16384, "hidden": 2048, "vocab": 151936},
                "llama3-8b": {"tokens": 8192, "hidden": 4096, "vocab": 128256},
                "gemma2-9b": {"tokens": 8192, "hidden": 3584, "vocab": 256000},
            },
            flops=flops,
            # The logits; narrow rows, so that all else stays small.
            large={"tokens": 16385, "hidden": 256, "vocab": 131072},
        ),
        runs_when="the model gets labels while gradients are recorded; a trainer that computes the loss itself (label "
        "smoothing, compute_loss_func) takes the labels away",
    ),
    OpContract(
        op="cross_entropy_loss",
        variant="token_cls",
        summary="a classifier over tokens and its cross entropy in one; labels are not shifted",
        reference=token_cls_loss,
        samples=samples_token_cls,
        refused=refused_token_cls,
        # As for causal: what the target is changes no rounding.
        tolerances=tolerances(roundings=8, terms=1025, noise=0.25),
        aliases=("cross_entropy_loss/seq_cls",),
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-8b, 9 classes": {"tokens": 16384, "hidden": 4096, "vocab": 9},
                "llama3-8b, 128 classes": {"tokens": 8192, "hidden": 4096, "vocab": 128},
            },
            flops=flops,
            # hidden_states: of so few classes no logits are that many.
            large={"tokens": 2**20 + 8, "hidden": 2048, "vocab": 9},
        ),
        runs_when="the model gets one label a token while gradients are recorded",
    ),
)
