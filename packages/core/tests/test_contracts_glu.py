"""glu: every variant is transformers' own MLP between its projections, and none passes for another."""

import math

import opslot
import pytest
import torch
from opslot.ops import BACKEND
from opslot.ops.glu import geglu_tanh, gelu_tanh, glu, swiglu_clamped
from opslot.testing import check
from torch.nn.functional import gelu, silu

DTYPES = [torch.float32, torch.bfloat16]
GEGLU = [("gemma", "Gemma"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3")]


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("model", "name"), GEGLU)
def test_geglu_is_that_of_transformers(modeling, assert_same, model, name, dtype):
    module = modeling(model)
    config = getattr(module, f"{name}{'Text' if model == 'gemma3' else ''}Config")(hidden_size=16, intermediate_size=24)
    mlp = getattr(module, f"{name}MLP")(config).to(dtype)
    x = leaf(3, 16, dtype=dtype, scale=4)
    ours = mlp.down_proj(geglu_tanh(mlp.gate_proj(x), mlp.up_proj(x)))
    assert_same(ours, mlp(x), [x, *mlp.parameters()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("model", "name", "config"),
    [
        ("deepseek_v4", "DeepseekV4MLP", {"moe_intermediate_size": 24}),
        ("glm5_next", "Glm5NextTextMLP", {"intermediate_size": 24}),
    ],
)
def test_clamped_is_that_of_transformers(modeling, assert_same, model, name, config, dtype):
    module = modeling(model)
    config_class = module.DeepseekV4Config if model == "deepseek_v4" else module.Glm5NextTextConfig
    mlp = getattr(module, name)(config_class(hidden_size=16, swiglu_limit=0.75, **config)).to(dtype)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = leaf(9, 16, dtype=dtype)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert (gate > 0.75).any()
    assert (up.abs() > 0.75).any()
    assert_same(mlp.down_proj(swiglu_clamped(gate, up, 0.75)), mlp(x), [x, *mlp.parameters()])


def test_numbers():
    def double(number):
        return torch.tensor(number, dtype=torch.float64)

    assert float(geglu_tanh(double(2.5), double(1.0))) == pytest.approx(2.484916, abs=1e-6)  # the exact one: 2.484476
    assert float(swiglu_clamped(double(10.0), double(-10.0), 7.0)) == pytest.approx(-48.955358, abs=1e-6)
    assert float(swiglu_clamped(double(-10.0), double(10.0), 7.0)) == pytest.approx(-0.003178, abs=1e-6)


def test_a_gradient_passes_on_the_limit_and_not_beyond():
    gate = torch.tensor([1.0, 2.0, 3.0, -9.0], requires_grad=True)
    up = torch.tensor([2.0, -2.0, 3.0, -3.0], requires_grad=True)
    d_gate, d_up = torch.autograd.grad(swiglu_clamped(gate, up, 2.0).sum(), [gate, up])
    assert (d_gate != 0).tolist() == [True, True, False, True]
    assert (d_up != 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("limit", [0, -7.0, math.nan, None, "7"])
def test_limits_that_are_none_are_refused(limit):
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"limit must be a number greater than zero, got"):
        swiglu_clamped(x, x, limit)


class MLP(torch.nn.Module):
    slot = opslot.OpSlot("glu", "geglu_tanh", activation="act")

    def __init__(self, act):
        super().__init__()
        self.act = act


@pytest.fixture
def known(make_kernel):
    registry = opslot.Registry()
    registry.add(BACKEND, "opslot")
    kernel = make_kernel("ours", op="glu", variant="geglu_tanh", target=geglu_tanh)
    registry.add(opslot.Backend(api=1, kernels=(kernel,)), "here")
    return registry


@pytest.mark.parametrize("act", [torch.nn.GELU(approximate="tanh"), gelu_tanh], ids=["module", "function"])
def test_gelu_in_its_tanh_form_is_the_activation(known, act):
    module = MLP(act)
    opslot.bind(module, {"glu": "ours"}, registry=known)
    assert module.slot.kernel is not None


@pytest.mark.parametrize("act", [torch.nn.GELU(), torch.nn.SiLU()], ids=str)
def test_another_activation_is_refused(known, act):
    with pytest.raises(opslot.OpslotError, match=r"is not the 'opslot\.ops\.glu:gelu_tanh' of the contract"):
        opslot.bind(MLP(act), {"glu": "ours"}, registry=known)


def exact_gelu(gate, up):
    return gelu(gate) * up


def activates_up(gate, up):
    return silu(up) * gate


def no_clamp(gate, up, limit):
    return glu(gate, up)


def clamps_after(gate, up, limit):
    """As step3p7 does."""
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def clamps_the_gate_below(gate, up, limit):
    return silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)


def clamps_up_above_only(gate, up, limit):
    return silu(gate.clamp(max=limit)) * up.clamp(max=limit)


def drops_the_gradient_on_the_limit(gate, up, limit):
    top = torch.full_like(gate, limit)
    return silu(torch.where(gate < limit, gate, top)) * up.clamp(-limit, limit)


def passes_the_gradient_beyond_the_limit(gate, up, limit):
    return silu(gate - (gate - gate.clamp(max=limit)).detach()) * up.clamp(-limit, limit)


def always_ten(gate, up, limit):
    return swiglu_clamped(gate, up, 10.0)


@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        ("swiglu", geglu_tanh),
        ("swiglu", activates_up),
        ("geglu_tanh", exact_gelu),
        ("geglu_tanh", glu),
        ("swiglu_clamped", no_clamp),
        ("swiglu_clamped", clamps_after),
        ("swiglu_clamped", clamps_the_gate_below),
        ("swiglu_clamped", clamps_up_above_only),
        ("swiglu_clamped", drops_the_gradient_on_the_limit),
        ("swiglu_clamped", passes_the_gradient_beyond_the_limit),
        ("swiglu_clamped", always_ten),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_samples_catch(variant, wrong):
    with pytest.raises(AssertionError, match=rf"glu/{variant}, kernel {wrong.__name__}"):
        check("glu", variant, wrong)
