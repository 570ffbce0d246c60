"""cross_entropy_loss/token_cls: transformers' own loss, never shifted; and the workloads of both losses."""

import math

import opslot
import pytest
import torch
from opslot.ops.cross_entropy_loss import cross_entropy_loss, token_cls_loss
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def losses():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.loss import loss_utils

    return loss_utils


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def assert_same(ours, theirs, inputs):
    """Equal bits in the loss, and in every gradient."""
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    mine, yours = (torch.autograd.grad(1.7 * loss, inputs) for loss in (ours, theirs))
    for number, (a, b) in enumerate(zip(mine, yours, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda text, n=number: f"input {n}: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "keywords",
    [{}, {"num_items_in_batch": 13}, {"num_items_in_batch": torch.tensor(13)}, {"ignore_index": 3}],
    ids=lambda keywords: ", ".join(f"{k} {type(v).__name__}" for k, v in keywords.items()) or "plain",
)
def test_is_that_of_transformers(losses, dtype, bias, keywords):
    from transformers import PretrainedConfig

    head = torch.nn.Linear(16, 5, bias=bias, dtype=dtype)
    x, labels = leaf(2, 7, 16, dtype=dtype), torch.randint(5, (2, 7))
    labels[0, :3] = keywords.get("ignore_index", -100)
    theirs = losses.ForTokenClassification(head(x), labels, PretrainedConfig(num_labels=5), **keywords)
    assert_same(token_cls_loss(x, head.weight, labels, bias=head.bias, **keywords), theirs, [x, *head.parameters()])


def test_is_that_of_a_whole_model(losses):
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_labels": 5}
    model = Qwen2ForTokenClassification(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    words, labels = torch.randint(40, (2, 9)), torch.randint(5, (2, 9))
    hidden = model.model(words).last_hidden_state
    ours = token_cls_loss(hidden, model.score.weight, labels, bias=model.score.bias)
    assert torch.equal(ours, model(words, labels=labels).loss)


def test_labels_are_not_shifted():
    """Labels [0, 2] for two rows of three logits."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    loss = token_cls_loss(logits, torch.eye(3), torch.tensor([0, 2]))
    expected = (math.log(math.e + math.e**2 + math.e**3) - 1 + math.log(2 + math.e**5) - 5) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert opslot.registry().contract("cross_entropy_loss", "seq_cls").key == ("cross_entropy_loss", "token_cls")


def test_every_keyword_means_what_it_means_for_causal():
    x, weight, labels = torch.randn(2, 7, 16), torch.randn(5, 16), torch.randint(5, (2, 7))
    for keywords in (
        {"logit_softcap": 2.0},
        {"logit_scale": 0.3},
        {"bias": torch.randn(5), "logit_scale": 0.3, "logit_softcap": 2.0, "num_items_in_batch": 3, "ignore_index": 2},
    ):
        causal = cross_entropy_loss(x, weight, None, shift_labels=labels, **keywords)
        assert torch.equal(token_cls_loss(x, weight, labels, **keywords), causal)
        assert not torch.equal(token_cls_loss(x, weight, labels), causal)


def test_sequence_classification_of_transformers_is_another_function(losses):
    """The same for float32 logits and one class a sequence; half precision is where it computes in half precision."""
    from transformers import PretrainedConfig

    config = PretrainedConfig(num_labels=3, problem_type="single_label_classification")
    weight, labels = torch.randn(3, 16), torch.tensor([0, 2])
    for dtype, same in ((torch.float32, True), (torch.bfloat16, False)):
        pooled = torch.randn(2, 16).to(dtype)
        ours = token_cls_loss(pooled, weight.to(dtype), labels)
        theirs = losses.ForSequenceClassificationLoss(labels, pooled @ weight.to(dtype).t(), config)
        assert (ours.dtype == theirs.dtype) is same
        assert same is torch.equal(ours, theirs)


@pytest.mark.parametrize(("count", "expected"), [(7, 0.0), (torch.tensor(7), 0.0), (None, math.nan)])
def test_nothing_to_count(count, expected):
    x, weight, bias = leaf(2, 5, 8), leaf(3, 8), leaf(3)
    loss = token_cls_loss(x, weight, torch.full((2, 5), -100), num_items_in_batch=count, bias=bias)
    assert loss.item() == pytest.approx(expected, abs=0, nan_ok=True)
    for gradient in torch.autograd.grad(loss, [x, weight, bias]):
        assert not gradient.any()


def test_what_is_refused():
    x, weight, labels = torch.randn(4, 8), torch.randn(3, 8), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ValueError, match="shift_labels are those of a model that predicts the next token"):
        token_cls_loss(x, weight, labels, shift_labels=labels)
    with pytest.raises(ValueError, match="give labels, one a row of hidden_states"):
        token_cls_loss(x, weight, None)


def shifting(hidden_states, lm_head_weight, labels, *, shift_labels=None, **keywords):
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def without_bias(hidden_states, lm_head_weight, labels, *, bias=None, **keywords):
    loss = token_cls_loss(hidden_states, lm_head_weight, labels, **keywords)
    return loss if bias is None else loss + 0 * bias.sum()


def without_count(hidden_states, lm_head_weight, labels, *, num_items_in_batch=None, **keywords):
    return token_cls_loss(hidden_states, lm_head_weight, labels, **keywords)


def without_softcap(hidden_states, lm_head_weight, labels, *, logit_softcap=None, **keywords):
    return token_cls_loss(hidden_states, lm_head_weight, labels, **keywords)


def without_ignore_index(hidden_states, lm_head_weight, labels, *, ignore_index=-100, **keywords):
    return token_cls_loss(hidden_states, lm_head_weight, labels, **keywords)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kernel", [shifting, without_bias, without_count, without_softcap, without_ignore_index], ids=lambda k: k.__name__
)
def test_a_kernel_that_leaves_something_out_is_caught(kernel, dtype):
    with pytest.raises(AssertionError, match="is wrong at"):
        check("cross_entropy_loss", "token_cls", kernel, dtype=dtype)


@pytest.mark.parametrize("variant", ["causal", "token_cls"])
def test_workloads(variant):
    contract = opslot.registry().contract("cross_entropy_loss", variant)
    work, small = contract.workload, {"tokens": 6, "hidden": 16, "vocab": 9}
    sample = work.problem("cpu", torch.bfloat16, 0, **small)
    loss = contract.load_reference()(*sample.args, **sample.kwargs)
    # Logits of variance 1 lose about half a unit to log(vocab).
    assert 0.5 * math.log(9) < loss.item() < 2 * math.log(9)
    assert work.flops(**small) == 2 * 6 * 16 * 9
    assert all(set(shape) == set(small) for shape in (*work.shapes.values(), work.large))
    assert work.large["tokens"] * max(work.large["hidden"], work.large["vocab"]) > 2**31


def test_workload_of_load_balancing_loss():
    contract = opslot.registry().contract("load_balancing_loss", "standard")
    work, small = contract.workload, {"layers": 3, "tokens": 50, "experts": 8, "top_k": 2}
    sample = work.problem("cpu", torch.bfloat16, 0, **small)
    # An even router gives top_k; a random one nearly so.
    assert 2.0 <= float(contract.load_reference()(*sample.args)) < 2.5
    assert all(set(shape) == set(small) for shape in (*work.shapes.values(), work.large))
    assert work.large["tokens"] * work.large["experts"] > 2**31
