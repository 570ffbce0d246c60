"""rms_norm, rotary_pos_emb, glu and load_balancing_loss: what their contracts leave open."""

import pytest
import torch
from opslot.ops import load_balancing_loss as balance
from opslot.ops import rotary_pos_emb as rotary
from opslot_backends.torch import load_balancing_loss as load_balancing
from opslot_backends.torch.glu import swiglu
from opslot_backends.torch.load_balancing_loss import load_balancing_loss
from opslot_backends.torch.rms_norm import rms_norm
from opslot_backends.torch.rotary_pos_emb import rotary_pos_emb
from torch.utils._python_dispatch import TorchDispatchMode


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def saved_shapes(function, *arguments):
    given = {tensor.untyped_storage().data_ptr() for tensor in arguments if isinstance(tensor, torch.Tensor)}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in given:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*arguments)
    return kept


def test_what_is_kept_for_backward():
    assert saved_shapes(rms_norm, leaf(4, 16), leaf(16), 1e-6) == [(4, 1)]
    assert saved_shapes(swiglu, leaf(4, 16), leaf(4, 16)) == []
    assert (
        saved_shapes(rotary_pos_emb, leaf(1, 2, 3, 4), leaf(1, 2, 3, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4))
        == []
    )


def test_rotary_tables_that_are_learnt_get_their_gradient():
    arguments = leaf(2, 3, 5, 8), leaf(2, 1, 5, 8), leaf(2, 5, 8), leaf(2, 5, 8)
    ours, theirs = rotary_pos_emb(*arguments), rotary.rotary_pos_emb(*arguments)
    incoming = [torch.randn_like(output) for output in ours]
    gradients = torch.autograd.grad(ours, arguments, incoming), torch.autograd.grad(theirs, arguments, incoming)
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += not function._schema.name.startswith(("aten::detach", "aten::view", "aten::split"))
        return function(*args, **(kwargs or {}))


def test_load_balancing_takes_no_more_operations_for_more_layers():
    def operations(layers):
        logits = tuple(leaf(9, 4) for _ in range(layers))
        with Count() as count:
            torch.autograd.grad(load_balancing_loss(logits, 4, 2, torch.ones(1, 9)), logits)
        return count.calls

    assert operations(48) == operations(2) < 50


@pytest.mark.parametrize("mask", [None, torch.tensor([[1.0, 0.0, 1.0, 0.5]])])
def test_load_balancing_in_groups_of_layers(monkeypatch, mask):
    """Many layers of many tokens do not go through memory at once."""
    logits = tuple(leaf(4, 4) for _ in range(5))
    if mask is None:
        logits = (*logits, leaf(9, 4))
    whole = load_balancing_loss(logits, 4, 2, mask)
    exact = torch.autograd.grad(whole, logits)
    for limit, groups in ((1, len(logits)), (32, 3 if mask is not None else 4), (70, 2)):
        monkeypatch.setattr(load_balancing, "_GROUP", limit)
        assert len(load_balancing._groups(logits)) == groups
        loss = load_balancing_loss(logits, 4, 2, mask)
        torch.testing.assert_close(loss, whole)
        for mine, other in zip(torch.autograd.grad(loss, logits), exact, strict=True):
            torch.testing.assert_close(mine, other)


def test_load_balancing_masks_that_are_refused():
    for shape in ((1, 1, 4, 4), (1, 5), (2, 1, 2), (3,)):
        with pytest.raises(ValueError, match=r"attention_mask as \[B, S\] or \[B \* S\]"):
            load_balancing_loss((torch.randn(4, 4),), 4, 1, torch.ones(shape))


def test_load_balancing_of_nothing():
    for nothing in (None, (), [torch.randn(3, 4)]):
        assert load_balancing_loss(nothing, 4, 2) == balance.load_balancing_loss(nothing, 4, 2) == 0


def test_load_balancing_survives_logits_far_from_zero():
    logits = (leaf(9, 4) * 3 + 1e4,)
    torch.testing.assert_close(load_balancing_loss(logits, 4, 2), balance.load_balancing_loss(logits, 4, 2))
