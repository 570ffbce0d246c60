"""The loop over chunks around Liger's kernel: what its own loop gets wrong."""

import pytest
import torch

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: it needs triton, which is not everywhere")

from opslot.ops.cross_entropy_loss import cross_entropy_loss as reference
from opslot_backends.liger import cross_entropy_loss as module

pytestmark = pytest.mark.usefixtures("interpreter")


def problem(rows=11, hidden=8, vocabulary=13):
    x, weight, bias = torch.randn(rows, hidden), torch.randn(vocabulary, hidden), torch.randn(vocabulary)
    labels = torch.randint(vocabulary, (rows,))
    labels[::4] = -100
    return x, weight, bias, labels


def gradients(function, x, weight, bias, labels, frozen=(), **keywords):
    leaves = {
        name: tensor.clone().requires_grad_(name not in frozen)
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias))
    }
    loss = function(leaves["x"], leaves["weight"], None, shift_labels=labels, bias=leaves["bias"], **keywords)
    (3 * loss).backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def assert_same(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert (got[1][name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(got[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keywords", [{}, {"logit_scale": 0.7, "logit_softcap": 2.0, "num_items_in_batch": 31}])
@pytest.mark.parametrize("elements", [1, 39, 10**9], ids=["a row a chunk", "three rows a chunk", "one chunk"])
def test_the_number_of_chunks_changes_nothing(elements, keywords, monkeypatch):
    monkeypatch.setattr(module, "_LOGITS", elements)
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    arguments = problem()
    assert_same(gradients(module.causal, *arguments, **keywords), gradients(reference, *arguments, **keywords))


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("bias",), ("x", "bias"), ("x", "weight"), ("weight", "bias")])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(frozen):
    # Liger's own function gives a head that trains alone no gradient.
    arguments = problem()
    assert_same(gradients(module.causal, *arguments, frozen=frozen), gradients(reference, *arguments, frozen=frozen))


def test_ignored_rows_may_hold_anything():
    x, weight, bias, labels = problem()
    expected = gradients(module.causal, x, weight, bias, labels)
    x[labels == -100] = 1e4
    got = gradients(module.causal, x, weight, bias, labels)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1]["weight"], expected[1]["weight"])


def test_the_slices_cover_all_rows_once(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_ROWS", 4)
    for rows in (0, 1, 5, 16, 33):
        for elements in (1, 100, 10**6):
            monkeypatch.setattr(module, "_LOGITS", elements)
            covered = [row for part in module._slices(rows, 10) for row in range(rows)[part]]
            assert covered == list(range(rows))
