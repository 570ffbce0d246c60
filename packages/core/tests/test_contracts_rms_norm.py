"""rms_norm: every variant is transformers' own class, and none passes for another where they differ."""

import pytest
import torch
from opslot.ops.rms_norm import (
    rms_norm,
    rms_norm_fp32_weight,
    rms_norm_unweighted,
    rms_norm_unweighted_fp32,
    rms_norm_zero_centered,
)
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]
WEIGHTED = [
    (rms_norm, "llama", "LlamaRMSNorm"),
    (rms_norm, "deepseek_v3", "DeepseekV3RMSNorm"),
    (rms_norm_fp32_weight, "gpt_oss", "GptOssRMSNorm"),
    (rms_norm_fp32_weight, "deepseek_v4", "DeepseekV4RMSNorm"),
    (rms_norm_fp32_weight, "olmo2", "Olmo2RMSNorm"),
    (rms_norm_fp32_weight, "olmo3", "Olmo3RMSNorm"),
    (rms_norm_fp32_weight, "helium", "HeliumRMSNorm"),
    (rms_norm_zero_centered, "qwen3_5", "Qwen3_5RMSNorm"),
    (rms_norm_zero_centered, "qwen3_next", "Qwen3NextRMSNorm"),
    (rms_norm_zero_centered, "gemma", "GemmaRMSNorm"),
    (rms_norm_zero_centered, "gemma2", "Gemma2RMSNorm"),
    (rms_norm_zero_centered, "gemma3", "Gemma3RMSNorm"),
]
UNWEIGHTED = [
    (rms_norm_unweighted, "deepseek_v4", "DeepseekV4UnweightedRMSNorm"),
    (rms_norm_unweighted, "glm5_next", "Glm5NextTextUnweightedRMSNorm"),
    (rms_norm_unweighted_fp32, "nanochat", "NanoChatRMSNorm"),
    (rms_norm_unweighted_fp32, "llama4", "Llama4TextL2Norm"),
    (rms_norm_unweighted_fp32, "hrm_text", "HrmTextRMSNorm"),
]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("norm", "model", "name"), WEIGHTED, ids=lambda value: getattr(value, "__name__", value))
def test_weighted_norms_are_those_of_transformers(modeling, assert_same, norm, model, name, dtype, weight_dtype):
    module = getattr(modeling(model), name)(48, eps=1e-5).to(weight_dtype)
    torch.nn.init.normal_(module.weight)
    x = leaf(3, 7, 48, dtype=dtype)
    assert_same(norm(x, module.weight, 1e-5), module(x), [x, module.weight])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("norm", "model", "name"), UNWEIGHTED, ids=lambda value: getattr(value, "__name__", value))
def test_unweighted_norms_are_those_of_transformers(modeling, assert_same, norm, model, name, dtype):
    x = leaf(3, 7, 48, dtype=dtype)
    assert_same(norm(x, 1e-5), getattr(modeling(model), name)(eps=1e-5)(x), [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_is_a_buffer_of_ones_is_none(modeling, assert_same, dtype):
    x = leaf(3, 48, dtype=dtype)
    module = modeling("falcon_mamba").FalconMambaWeightlessRMSNorm(48, eps=1e-5)
    assert_same(rms_norm_unweighted_fp32(x, 1e-5), module(x), [x])


def test_names_alone_do_not_make_a_variant(modeling):
    """What the docstrings say is another function is one."""
    x = torch.randn(5, 64).bfloat16()
    weight = torch.full((64,), 15.8125).bfloat16()
    centred = modeling("muse_spark").MuseSparkTextCenteredRMSNorm(64, eps=1e-6)
    centred.weight = torch.nn.Parameter(weight)
    assert not torch.equal(centred(x), rms_norm_zero_centered(x, weight, 1e-6))
    assert modeling("hy_v4").HYV4UnweightedRMSNorm(1e-6)(x).shape == (5, 1)


def test_numbers():
    x, expected = torch.tensor([3.0, 4.0]), torch.tensor([0.848528, 1.131371])
    for norm, arguments in (
        (rms_norm_fp32_weight, (torch.ones(2), 1e-12)),
        (rms_norm_zero_centered, (torch.zeros(2), 1e-12)),
        (rms_norm_unweighted, (1e-12,)),
        (rms_norm_unweighted_fp32, (1e-12,)),
    ):
        torch.testing.assert_close(norm(x, *arguments), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("weight", "factor"), [(0.00390625, 1.00390625), (15.8125, 16.8125)])
def test_one_is_added_in_float32(weight, factor):
    out = rms_norm_zero_centered(torch.ones(2), torch.full((2,), weight).bfloat16(), 0.0)
    assert out.tolist() == [factor, factor]


def test_variants_differ_where_they_round():
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(64).bfloat16()
    assert not torch.equal(rms_norm(x, weight, 1e-6), rms_norm_fp32_weight(x, weight, 1e-6))
    assert not torch.equal(rms_norm_unweighted(x, 1e-6), rms_norm_unweighted_fp32(x, 1e-6))
    assert rms_norm(x, weight.float(), 1e-6).dtype is torch.float32
    assert rms_norm_fp32_weight(x, weight.float(), 1e-6).dtype is torch.bfloat16
    assert rms_norm_zero_centered(x, weight.float(), 1e-6).dtype is torch.bfloat16


def one_in_the_weights_dtype(x, weight, eps):
    return rms_norm_fp32_weight(x, 1.0 + weight, eps)


def no_one_at_all(x, weight, eps):
    return rms_norm_fp32_weight(x, weight, eps)


def mean_of_the_absolute(x, eps):
    return (x.float() / (x.float().abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize(
    ("variant", "wrong", "dtype"),
    [
        ("standard", rms_norm_fp32_weight, "bfloat16"),
        ("standard", rms_norm_zero_centered, "float32"),
        ("fp32_weight", rms_norm, "bfloat16"),
        ("zero_centered", one_in_the_weights_dtype, "bfloat16"),
        ("zero_centered", no_one_at_all, "float32"),
        ("unweighted", mean_of_the_absolute, "float32"),
        ("unweighted_fp32", rms_norm_unweighted, "bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_samples_catch(variant, wrong, dtype):
    with pytest.raises(AssertionError, match=rf"rms_norm/{variant}, kernel {wrong.__name__}"):
        check("rms_norm", variant, wrong, dtype=dtype)
