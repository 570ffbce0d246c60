"""rms_norm_gated: both variants are transformers' own classes, and what gates first or elsewhere is caught."""

import pytest
import torch
from opslot.ops.rms_norm_gated import rms_norm_gated, rms_norm_gated_fp32_weight
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]
CLASSES = [
    (rms_norm_gated, "qwen3_next", "Qwen3NextRMSNormGated", "silu"),
    (rms_norm_gated, "qwen3_5", "Qwen3_5RMSNormGated", "silu"),
    (rms_norm_gated, "qwen3_5_moe", "Qwen3_5MoeRMSNormGated", "silu"),
    (rms_norm_gated, "olmo_hybrid", "OlmoHybridRMSNormGated", "silu"),
    (rms_norm_gated, "qwen4_exp", "Qwen4ExpTextRMSNormGated", "silu"),
    (rms_norm_gated, "qwen4_exp", "Qwen4ExpTextRMSNormGated", "sigmoid"),
    (rms_norm_gated, "qwen4_exp", "Qwen4ExpTextRMSNormGated", "swish"),
    (rms_norm_gated_fp32_weight, "kimi_linear", "KimiLinearRMSNormGated", "sigmoid"),
    (rms_norm_gated_fp32_weight, "bailing_hybrid", "BailingHybridRMSNormGated", "sigmoid"),
    (rms_norm_gated_fp32_weight, "glm5_next", "Glm5NextTextRMSNormGated", "sigmoid"),
    (rms_norm_gated_fp32_weight, "lara_mini", "LaraMiniRMSNormGated", "silu"),
]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("norm", "model", "name", "activation"), CLASSES, ids=lambda v: getattr(v, "__name__", v))
def test_is_that_of_transformers(modeling, assert_same, norm, model, name, activation, dtype, weight_dtype):
    module = getattr(modeling(model), name)(48, eps=1e-5, activation=activation).to(weight_dtype)
    assert module.activation == activation
    torch.nn.init.normal_(module.weight)
    x, gate = leaf(14, 48, dtype=dtype), leaf(14, 48, dtype=dtype)
    ours = norm(x, gate, module.weight, 1e-5, activation)
    assert_same(ours, module(x, gate), [x, gate, module.weight])


def test_numbers():
    """The norm of [3, 4], times silu(2.5) or sigmoid(2.5): the gate must not enter the mean."""
    x, gate, weight = torch.tensor([3.0, 4.0]).double(), torch.full((2,), 2.5).double(), torch.tensor([1.0, 2.0])
    for norm in (rms_norm_gated, rms_norm_gated_fp32_weight):
        silu, sigmoid = (norm(x, gate, weight.double(), 1e-12, name).tolist() for name in ("silu", "sigmoid"))
        assert silu == pytest.approx([0.848528 * 2.310354, 2 * 1.131371 * 2.310354], rel=1e-6)
        assert sigmoid == pytest.approx([0.848528 * 0.924142, 2 * 1.131371 * 0.924142], rel=1e-6)


def test_the_order_is_not_that_of_mamba2(modeling):
    x, gate = torch.randn(6, 32), torch.randn(6, 32)
    module = modeling("mamba2").MambaRMSNormGated(32, 32, eps=1e-6)
    assert not torch.allclose(rms_norm_gated(x, gate, module.weight, 1e-6, "silu"), module(x, gate), atol=1e-2)


@pytest.mark.parametrize("norm", [rms_norm_gated, rms_norm_gated_fp32_weight])
@pytest.mark.parametrize("activation", ["gelu", "SiLU", None])
def test_other_activations_are_refused(norm, activation):
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=f"must be silu, swish .the same. or sigmoid, got {activation!r}"):
        norm(x, x, torch.ones(8), 1e-6, activation)


def gates_first(x, gate, weight, eps, activation):
    gated = x * rms_norm_gated(torch.ones_like(x), gate, torch.ones_like(weight), 0.0, activation)
    return rms_norm_gated(gated, torch.full_like(gate, 30.0), weight, eps, "sigmoid")


def always_silu(x, gate, weight, eps, activation):
    return rms_norm_gated(x, gate, weight, eps, "silu")


def gate_in_its_own_dtype(x, gate, weight, eps, activation):
    normal = rms_norm_gated_fp32_weight(x, torch.full_like(gate, 90.0), weight, eps, "sigmoid")
    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    return (normal * act(gate)).to(x.dtype)


@pytest.mark.parametrize(
    ("variant", "wrong", "dtype"),
    [
        ("standard", gates_first, "float32"),
        ("standard", always_silu, "float32"),
        ("fp32_weight", always_silu, "float32"),
        ("fp32_weight", gate_in_its_own_dtype, "bfloat16"),
        ("fp32_weight", rms_norm_gated, "bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_samples_catch(variant, wrong, dtype):
    with pytest.raises(AssertionError, match=rf"rms_norm_gated/{variant}, kernel {wrong.__name__}"):
        check("rms_norm_gated", variant, wrong, dtype=dtype)
