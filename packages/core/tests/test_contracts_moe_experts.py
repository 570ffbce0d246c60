"""moe_experts/clamped and gpt_oss: the references are transformers' own maths, and samples catch what is not."""

import inspect

import opslot
import pytest
import torch
from opslot.ops.moe_experts import moe_experts, moe_experts_clamped, moe_experts_gpt_oss
from opslot.testing import check
from torch.nn.functional import linear, silu

DTYPES = [torch.float32, torch.bfloat16]
EXPERTS, HIDDEN, INNER = 5, 16, 12


def assert_same(ours, theirs, inputs):
    """Equal bits in the output, and in every gradient for one random incoming gradient."""
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    incoming = torch.randn_like(ours)
    mine, yours = (torch.autograd.grad(output, inputs, incoming) for output in (ours, theirs))
    for number, (a, b) in enumerate(zip(mine, yours, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda text, n=number: f"input {n}: {text}")


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


@pytest.fixture
def deepseek_v4():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = DeepseekV4Config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, swiglu_limit=0.5
    )
    config._experts_implementation = "eager"
    return filled(DeepseekV4Experts(config))


@pytest.fixture
def gpt_oss():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, swiglu_alpha=1.5, swiglu_limit=0.5
    )
    config._experts_implementation = "eager"
    return filled(GptOssExperts(config))


def filled(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def routed(case):
    index = torch.rand(9, EXPERTS).argsort(-1)[:, :2]
    if case == "with an empty expert":
        index[index == 3] = 4
    elif case == "with sentinels":
        index[::2] = EXPERTS
    elif case == "chosen twice":
        index[:, 1] = index[:, 0]
    return index


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["routed", "with an empty expert", "with sentinels", "chosen twice"])
def test_clamped_is_that_of_deepseek_v4(deepseek_v4, dtype, weights_dtype, case):
    module, index = deepseek_v4.to(dtype), routed(case)
    x, weights = leaf(9, HIDDEN, dtype=dtype), leaf(9, 2, dtype=weights_dtype)
    parameters = list(module.parameters())
    ours = moe_experts_clamped(x, index, weights, *parameters, 0.5)
    assert_same(ours, module(x, index, weights), [x, weights, *parameters])
    unclamped = moe_experts(x, index, weights, *parameters)
    assert not torch.equal(ours, unclamped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["routed", "with an empty expert", "chosen twice"])
def test_gpt_oss_is_that_of_transformers(gpt_oss, dtype, weights_dtype, case):
    module, index = gpt_oss.to(dtype), routed(case)
    x, weights = leaf(9, HIDDEN, dtype=dtype), leaf(9, 2, dtype=weights_dtype)
    parameters = [module.gate_up_proj, module.gate_up_proj_bias, module.down_proj, module.down_proj_bias]
    ours = moe_experts_gpt_oss(x, index, weights, *parameters, 1.5, 0.5)
    assert_same(ours, module(x, index, weights), [x, weights, *parameters])


def test_gpt_oss_sentinels_are_those_of_grouped_mm(gpt_oss):
    """Upstream's loop refuses index E; what it should give is what upstream's grouped_mm gives."""
    index, x, weights = routed("with sentinels"), torch.randn(9, HIDDEN), torch.rand(9, 2)
    with pytest.raises(RuntimeError, match="num_classes"):
        gpt_oss(x, index, weights)
    gpt_oss.config._experts_implementation = "grouped_mm"
    gpt_oss._is_expert_parallel = True  # as its expert parallelism sets it
    parameters = [gpt_oss.gate_up_proj, gpt_oss.gate_up_proj_bias, gpt_oss.down_proj, gpt_oss.down_proj_bias]
    ours = moe_experts_gpt_oss(x, index, weights, *parameters, 1.5, 0.5)
    torch.testing.assert_close(ours, gpt_oss(x, index, weights))
    assert not ours[::2].any()


def one_expert(gate, up):
    """Arguments of one token whose only expert has this gate and up, and the identity after them."""
    x, index, weights = torch.ones(1, 1), torch.zeros(1, 1).long(), torch.ones(1, 1)
    return [t.double() if t.is_floating_point() else t for t in (x, index, weights)], torch.tensor(
        [[[gate], [up]]], dtype=torch.float64
    )


@pytest.mark.parametrize(("gate", "up", "expected"), [(10.0, -10.0, -48.955358), (-10.0, 10.0, -0.003178)])
def test_clamped_numbers(gate, up, expected):
    arguments, gate_up = one_expert(gate, up)
    down = torch.ones(1, 1, 1, dtype=torch.float64)
    assert float(moe_experts_clamped(*arguments, gate_up, down, 7.0)) == pytest.approx(expected, abs=1e-6)


def test_gpt_oss_numbers():
    arguments, gate_up = one_expert(2.0, 3.0)
    one, zeros = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    out = moe_experts_gpt_oss(*arguments, gate_up.transpose(1, 2), zeros, one, zeros[:, :1], 1.702, 7.0)
    # (3 + 1) * 2 * sigmoid(3.404); with silu and no "+ 1" it would be 3 * 2 * sigmoid(2) = 5.284782.
    assert float(out) == pytest.approx(7.742634, abs=1e-6)


def test_no_expert_adds_no_bias():
    index = torch.full((4, 2), 3)
    x, weights = leaf(4, 8), leaf(4, 2)
    parameters = [leaf(3, 8, 12), leaf(3, 12), leaf(3, 6, 8), leaf(3, 8)]
    out = moe_experts_gpt_oss(x, index, weights, *parameters, 1.702, 7.0)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), [x, weights, *parameters]):
        assert not gradient.any()


def test_what_is_refused():
    x, flat, choices = torch.randn(2, 8), torch.zeros(4).long(), torch.rand(2, 2)
    two, gate_up, down = torch.zeros(2, 2).long(), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    with pytest.raises(ValueError, match=r"moe_experts/clamped: .* must both be \[T, K\], got \[4\] and \[2, 2\]"):
        moe_experts_clamped(x, flat, choices, gate_up, down, 7.0)
    for limit in (None, 0.0, -7.0, float("nan")):
        with pytest.raises(ValueError, match="limit must be a positive number, got"):
            moe_experts_clamped(x, two, choices, gate_up, down, limit)
    biases = torch.randn(3, 12), torch.randn(3, 8)
    oss = gate_up.transpose(1, 2), biases[0], down.transpose(1, 2), biases[1]
    with pytest.raises(ValueError, match=r"moe_experts/gpt_oss: .* must both be \[T, K\]"):
        moe_experts_gpt_oss(x, flat, choices, *oss, 1.702, 7.0)
    with pytest.raises(ValueError, match="moe_experts/gpt_oss: limit must be a positive number"):
        moe_experts_gpt_oss(x, two, choices, *oss, 1.702, None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", ["clamped", "gpt_oss"])
def test_no_sample_has_a_value_that_rounding_puts_across_the_limit(variant, seed):
    contract = opslot.registry().contract("moe_experts", variant)
    beyond = []
    for sample in contract.samples("cpu", torch.bfloat16, seed):
        x, gate_up, limit = sample.args[0].double(), sample.args[3].double(), sample.args[-1]
        rows = gate_up if variant == "clamped" else gate_up.transpose(1, 2)
        values = torch.einsum("th,eih->tei", x, rows)
        if variant == "gpt_oss":
            values = values + sample.args[4].double()
        # Eight roundings of bfloat16, as in the tolerance.
        assert ((values.abs() - limit).abs() > 8 * 2**-8 * limit).all()
        beyond.append((values.abs() > limit).double().mean())
    assert 0.4 < sum(beyond[:5]) / 5 < 0.9


def experts(x, index, weights, gate_up, down, activate):
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        position, token = torch.where(index.t() == expert)
        active = activate(*linear(x[token], gate_up[expert]).chunk(2, dim=-1))
        out.index_add_(0, token, (linear(active, down[expert]) * weights[token, position, None]).to(out.dtype))
    return out


WRONG_CLAMPS = {
    "no clamp": lambda gate, up, limit: silu(gate) * up,
    "gate clamped from both sides": lambda gate, up, limit: silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit),
    "up clamped from above": lambda gate, up, limit: silu(gate.clamp(max=limit)) * up.clamp(max=limit),
    "clamped after silu": lambda gate, up, limit: silu(gate).clamp(max=limit) * up.clamp(-limit, limit),
    "up and gate exchanged": lambda gate, up, limit: silu(up.clamp(max=limit)) * gate.clamp(-limit, limit),
    "product clamped": lambda gate, up, limit: (silu(gate) * up).clamp(-limit, limit),
}


@pytest.mark.parametrize("fault", WRONG_CLAMPS)
def test_a_wrong_clamp_is_caught(fault):
    def kernel(hidden_states, top_k_index, top_k_weights, gate_up, down, limit):
        activate = WRONG_CLAMPS[fault]
        return experts(
            hidden_states, top_k_index, top_k_weights, gate_up, down, lambda gate, up: activate(gate, up, limit)
        )

    with pytest.raises(AssertionError, match="is wrong at"):
        check("moe_experts", "clamped", kernel, dtype="bfloat16")


# Each a line of the reference's source, and what a careless kernel has instead.
WRONG_GPT_OSS = {
    "halves": (
        "columns[..., ::2].clamp(max=limit), columns[..., 1::2].clamp(",
        "columns.chunk(2, -1)[0].clamp(max=limit), columns.chunk(2, -1)[1].clamp(",
    ),
    "no + 1": ("(up + 1)", "up"),
    "alpha of one": ("gate * alpha", "gate"),
    "no bias": (" + gate_up_bias[expert]", " + 0 * gate_up_bias[expert]"),
    "bias not weighted": (
        "(active @ down[expert] + down_bias[expert]) * top_k_weights[token, position, None]",
        "(active @ down[expert]) * top_k_weights[token, position, None] + down_bias[expert]",
    ),
    "fixed limit": ("max=limit", "max=7.0"),
}


@pytest.mark.parametrize("fault", WRONG_GPT_OSS)
def test_a_wrong_gpt_oss_is_caught(fault):
    import opslot.ops.moe_experts as module

    right, wrong = WRONG_GPT_OSS[fault]
    source = inspect.getsource(moe_experts_gpt_oss)
    assert right in source
    namespace = dict(vars(module))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), namespace)
    with pytest.raises(AssertionError, match="is wrong at"):
        check("moe_experts", "gpt_oss", namespace["moe_experts_gpt_oss"], dtype="bfloat16")


@pytest.mark.parametrize("variant", ["standard", "clamped", "gpt_oss"])
def test_workloads(variant):
    contract = opslot.registry().contract("moe_experts", variant)
    work = contract.workload
    small = {"tokens": 6, "hidden": 16, "inner": 8, "experts": 4, "top_k": 2}
    for shape in (small, {**small, "skewed": 1}):
        sample = work.problem("cpu", torch.bfloat16, 0, **shape)
        out = contract.load_reference()(*sample.args)
        assert (out.shape, out.dtype) == ((6, 16), torch.bfloat16)
        assert work.flops(**shape) == 6 * 6 * 2 * 16 * 8
    assert all(set(shape) - {"skewed"} == set(small) for shape in (*work.shapes.values(), work.large))
    large = work.large
    assert min(large["tokens"] * large["hidden"], large["experts"] * 2 * large["inner"] * large["hidden"]) > 2**31
