"""bind(..., probe=True): a kernel that is wrong here is not bound, and says what was wrong with it."""

import opslot
import pytest
import torch
from opslot import BindError, KernelSpec, OpSlot, bind, bound
from opslot.ops.rms_norm import rms_norm


class Norm(torch.nn.Module):
    rms_norm_op = OpSlot("rms_norm", "standard")

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, x):
        kernel = self.rms_norm_op.kernel
        return rms_norm(x, self.weight, 1e-6) if kernel is None else kernel(x, self.weight, 1e-6)


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = Norm(dtype), Norm(dtype)


def offset(x, weight, eps):
    return rms_norm(x, 1 + weight, eps)


def half_gradient(x, weight, eps):
    return rms_norm(x, 0.5 * weight + 0.5 * weight.detach(), eps)


def wrong_in_half_only(x, weight, eps):
    return rms_norm(x, weight, eps) * (1 if x.dtype is torch.float32 else 1.5)


def eps_outside_the_root(x, weight, eps):
    return weight * (x / (x.square().mean(-1, keepdim=True).sqrt() + eps))


def raises(x, weight, eps):
    raise RuntimeError("no kernel image")


@pytest.fixture
def known():
    """A registry of its own with the core's contracts and the kernels of this file."""
    registry = opslot.Registry()
    registry.add(opslot.ops.BACKEND, "opslot")
    for kernel in (offset, half_gradient, eps_outside_the_root, wrong_in_half_only, raises, rms_norm):
        registry.register(KernelSpec(op="rms_norm", name=kernel.__name__, target=kernel, deterministic=True))
    return registry


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("offset", r"output 0 is wrong at 1152 of 1152 elements: max error \S+, tolerance"),
        ("half_gradient", r"the gradient of weight \(probed\) is wrong"),
        ("eps_outside_the_root", "output 0 is wrong"),
    ],
)
def test_a_wrong_kernel_is_not_bound(known, kernel, problem):
    model = Model()
    words = "^first: kernel process-local:.* for rms_norm/standard failed its probe, so nothing was bound: .*"
    with pytest.raises(BindError, match=words + problem) as caught:
        bind(model, {"rms_norm": kernel}, probe=True, registry=known)
    assert f"rms_norm/standard, kernel process-local:{kernel}" in str(caught.value)
    assert "Choose rms_norm: eager" in str(caught.value)
    assert model.first.rms_norm_op.kernel is model.second.rms_norm_op.kernel is None


def test_right_kernels_are_bound_and_each_is_probed_once(known, monkeypatch):
    calls = []

    def counted(x, weight, eps):
        calls.append(x.dtype)
        return rms_norm(x, weight, eps)

    known.register(KernelSpec(op="rms_norm", name="counted", target=counted))
    binding = bind(Model(), {"rms_norm": "counted"}, probe=True, registry=known)
    assert [row.kernel for row in binding.rows] == ["counted", "counted"]
    assert 0 < len(calls) < 50
    assert set(calls) == {torch.float32}


def test_the_dtype_is_that_of_the_module(known):
    bind(Model(), {"rms_norm": "wrong_in_half_only"}, probe=True, registry=known)
    with pytest.raises(BindError, match="bfloat16 on cpu"):
        bind(Model(torch.bfloat16), {"rms_norm": "wrong_in_half_only"}, probe=True, registry=known)


def test_the_configuration_asks_for_it_and_the_argument_wins(known):
    ops = {"rms_norm": "offset", "probe": True}
    with pytest.raises(BindError, match="probe"), bound(Model(), ops, registry=known):
        pass
    bind(Model(), ops, probe=False, registry=known)
    bind(Model(), {"rms_norm": "offset"}, registry=known)
    with pytest.raises(opslot.ConfigError, match="probe must be true or false, got 'yes'"):
        bind(Model(), {"probe": "yes"}, registry=known)


def test_another_binding_stays_when_a_probe_fails(known):
    model = Model()
    bind(model, {"rms_norm": "rms_norm"}, registry=known)
    with pytest.raises(BindError, match="probe"):
        bind(model, {"rms_norm": "offset"}, probe=True, registry=known)
    assert model.first.rms_norm_op.kernel is rms_norm


def test_what_a_kernel_raises_is_the_reason(known):
    with pytest.raises(
        BindError, match=r"failed its probe, so nothing was bound: RuntimeError: no kernel image"
    ) as caught:
        bind(Model(), {"rms_norm": "raises"}, probe=True, registry=known)
    assert "while checking rms_norm/standard, kernel process-local:raises" in "".join(caught.value.__cause__.__notes__)


def test_a_lost_gradient_is_seen_under_no_grad_too(known):
    with torch.no_grad(), pytest.raises(BindError, match="the gradient of weight"):
        bind(Model(), {"rms_norm": "half_gradient"}, probe=True, registry=known)


def test_a_device_that_is_not_here_cannot_be_probed(known):
    with pytest.raises(BindError, match=r"a probe runs the kernels, and cuda \(sm_90\) is not here"):
        bind(Model(), {"rms_norm": "rms_norm"}, device=opslot.Device("cuda", "sm_90"), probe=True, registry=known)


def test_the_random_state_is_left_alone(known):
    before = torch.get_rng_state()
    bind(Model(), {"rms_norm": "rms_norm"}, probe=True, registry=known)
    assert torch.equal(before, torch.get_rng_state())
