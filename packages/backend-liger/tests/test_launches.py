"""What Liger's launchers are given, and where: seen in their place, so that it needs no device."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: it needs triton, which is not everywhere")

from opslot.autograd import first_order, matmul_dtype
from opslot_backends.liger import cross_entropy_loss, moe_experts, rotary_pos_emb


@pytest.fixture
def devices(monkeypatch):
    """Whose device is the current one, innermost last."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor.shape)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return current


def losses_of_zero(logits, *_):
    return logits.new_zeros(logits.shape[0]), None, None, None, logits


def test_launches_without_a_device_of_their_own_get_that_of_the_tensors(devices, monkeypatch):
    """As under a device_map, where tensors lie on another device than the current one."""
    launched = []

    def launch(*arguments, **_):
        launched.append(list(devices))
        return losses_of_zero(*arguments)

    monkeypatch.setattr(rotary_pos_emb, "rope_forward", launch)
    monkeypatch.setattr(cross_entropy_loss, "_primitive", lambda: launch)
    monkeypatch.setattr(moe_experts, "_Experts", SimpleNamespace(apply=lambda x, *_: launch(x) and x))
    q, angle = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 4).repeat(1, 1, 2)
    rotary_pos_emb.rotary_pos_emb(q, q, angle.cos(), angle.sin())
    cross_entropy_loss.token_cls(torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 1, 2]))
    choices = torch.zeros(3, 1, dtype=torch.long)
    moe_experts.moe_experts(torch.randn(3, 8), choices, torch.ones(3, 1), torch.randn(2, 6, 8), torch.randn(2, 8, 3))
    assert launched == [[(1, 5, 2, 8)], [(3, 5)], [(3, 8)]]


def test_logits_of_one_chunk_exist_at_one_time(monkeypatch):
    linear, made, alive = torch.nn.functional.linear, [], []

    def counting(*arguments):
        alive.append(sum(logits() is not None for logits in made))
        logits = linear(*arguments)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    monkeypatch.setattr(cross_entropy_loss, "_LOGITS", 10)
    monkeypatch.setattr(cross_entropy_loss, "_LEAST_ROWS", 2)
    monkeypatch.setattr(cross_entropy_loss, "_primitive", lambda: losses_of_zero)
    for trained in (True, False):
        rows = torch.randn(12, 8, requires_grad=trained)
        cross_entropy_loss.token_cls(rows, torch.randn(5, 8, requires_grad=trained), torch.arange(12) % 5)
    assert alive == [0] * 12


def test_a_choice_outside_the_experts_is_nobodys(monkeypatch):
    given = []
    monkeypatch.setattr(moe_experts, "_Experts", SimpleNamespace(apply=lambda *args: given.extend(args) or args[0]))
    choices = torch.tensor([[-1, 1], [2, 0]])
    moe_experts.moe_experts(torch.randn(2, 8), choices, torch.ones(2, 2), torch.randn(2, 6, 8), torch.randn(2, 8, 3))
    assert given[3].tolist() == [[0, 1], [0, 0]]
    assert given[4].tolist() == [[0, 1], [0, 1]]


def test_a_backward_without_an_incoming_gradient():
    """Liger's experts ask to be told of none, instead of zeros."""
    with torch.no_grad():
        assert first_order(lambda ctx, grad: (grad,))(None, None) == (None,)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
        assert matmul_dtype(torch.ones(1)) == torch.bfloat16
