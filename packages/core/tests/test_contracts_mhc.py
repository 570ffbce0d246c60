"""mhc/pre, mhc/post and mhc/head: transformers' DeepSeek V4 hyper-connections, bit for bit, and known numbers."""

import math

import opslot
import pytest
import torch
from opslot.ops.mhc import mhc_head, mhc_post, mhc_pre
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def upstream():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


@pytest.fixture
def config(upstream):
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=8,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        vocab_size=16,
        hc_mult=3,
        hc_sinkhorn_iters=7,
        hc_eps=1e-3,
        rms_norm_eps=1e-5,
    )


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def assert_same(ours, theirs, inputs):
    """Equal bits in outputs, and in every gradient for one random incoming gradient."""
    ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (ours, theirs))
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.dtype == yours.dtype
        torch.testing.assert_close(mine, yours, rtol=0, atol=0)
    incoming = [torch.randn_like(output) for output in ours]
    mine = torch.autograd.grad(ours, inputs, incoming, retain_graph=True)
    yours = torch.autograd.grad(theirs, inputs, incoming, retain_graph=True)
    for a, b in zip(mine, yours, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_pre_is_that_of_transformers(upstream, config, dtype, stored):
    module = randomised(upstream.DeepseekV4HyperConnection(config)).to(stored)
    streams, parameters = leaf(2, 5, 3, 24, dtype=dtype), [module.fn, module.scale, module.base]
    ours = mhc_pre(streams, *parameters, 1e-5, 7, 1e-3)
    assert_same(ours, module(streams), [streams, *parameters])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_head_is_that_of_transformers(upstream, config, dtype, stored):
    module = randomised(upstream.DeepseekV4HyperHead(config)).to(stored)
    streams, parameters = leaf(2, 5, 3, 24, dtype=dtype), [module.hc_fn, module.hc_scale, module.hc_base]
    assert_same(mhc_head(streams, *parameters, 1e-5, 1e-3), module(streams), [streams, *parameters])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pre_and_post_are_the_decoder_layer_of_transformers(upstream, config, dtype):
    """The whole layer, with projections in the place of attention and experts: post is written out inside it."""

    class Attention(torch.nn.Linear):
        def forward(self, hidden_states, **keywords):
            return super().forward(hidden_states), None

    class MLP(torch.nn.Linear):
        def forward(self, hidden_states, input_ids=None):
            return super().forward(hidden_states)

    layer = upstream.DeepseekV4DecoderLayer(config, 0)
    layer.self_attn, layer.mlp = Attention(24, 24, dtype=dtype), MLP(24, 24, dtype=dtype)
    randomised(layer)

    def ours(streams):
        blocks = (
            (layer.attn_hc, layer.input_layernorm, layer.self_attn),
            (
                layer.ffn_hc,
                layer.post_attention_layernorm,
                lambda x: (layer.mlp(x), None),
            ),
        )
        for connection, norm, block in blocks:
            post, comb, collapsed = mhc_pre(streams, connection.fn, connection.scale, connection.base, 1e-5, 7, 1e-3)
            streams = mhc_post(block(norm(collapsed))[0], streams, post, comb)
        return streams

    streams = leaf(2, 5, 3, 24, dtype=dtype)
    assert_same(ours(streams), layer(streams), [streams, *layer.parameters()])


def test_numbers():
    """Zero weights: every stream counts a half (plus hc_eps) going in and once coming out, and all mix evenly."""
    streams = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
    post, comb, collapsed = mhc_pre(streams, torch.zeros(8, 4), torch.ones(3), torch.zeros(8), 1e-6, 20, 0.0)
    assert post.tolist() == [[[1.0, 1.0]]]
    assert comb.tolist() == [[[[0.5, 0.5], [0.5, 0.5]]]]
    assert collapsed.tolist() == [[[2.0, 3.0]]]
    assert mhc_post(collapsed, streams, post, comb).tolist() == [[[[4.0, 6.0], [4.0, 6.0]]]]
    assert mhc_head(streams, torch.zeros(2, 4), torch.ones(1), torch.zeros(2), 1e-6, 0.5).tolist() == [[[4.0, 6.0]]]


def test_columns_come_first_and_last():
    """Rows of comb sum to 1 before Sinkhorn; after it columns do exactly and rows nearly."""
    base = torch.cat([torch.zeros(4), torch.tensor([math.log(3.0), 0.0, 0.0, 0.0])])
    arguments = torch.randn(1, 1, 2, 4), torch.zeros(8, 8), torch.ones(3), base, 1e-6
    _, comb, _ = mhc_pre(*arguments, 1, 0.0)
    expected = torch.tensor([[0.75 / 1.25, 0.25 / 0.75], [0.5 / 1.25, 0.5 / 0.75]])
    torch.testing.assert_close(comb[0, 0], expected)
    _, comb, _ = mhc_pre(*arguments, 20, 0.0)
    torch.testing.assert_close(comb.sum(-2), torch.ones(1, 1, 2))
    torch.testing.assert_close(comb.sum(-1), torch.ones(1, 1, 2))


def test_post_sums_over_the_old_streams():
    comb = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # old stream 0 goes into new stream 1
    residual = torch.tensor([[[[5.0], [7.0]]]])
    assert mhc_post(torch.zeros(1, 1, 1), residual, torch.zeros(1, 1, 2), comb).tolist() == [[[[0.0], [5.0]]]]


def test_weights_stay_in_float32_and_streams_in_their_dtype():
    streams = torch.randn(1, 3, 4, 8).bfloat16()
    post, comb, collapsed = mhc_pre(streams, torch.randn(24, 32), torch.ones(3), torch.zeros(24), 1e-6, 20, 1e-6)
    assert (post.dtype, comb.dtype, collapsed.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_no_iteration_is_refused():
    with pytest.raises(ValueError, match="mhc/pre: sinkhorn_iters must be at least 1, got 0"):
        mhc_pre(torch.randn(1, 1, 2, 4), torch.zeros(8, 8), torch.ones(3), torch.zeros(8), 1e-6, 0, 1e-6)


def transposed(output, residual, post, comb):
    return mhc_post(output, residual, post, comb.transpose(-1, -2))


def rows_last(streams, fn, scale, base, norm_eps, sinkhorn_iters, hc_eps):
    post, comb, collapsed = mhc_pre(streams, fn, scale, base, norm_eps, sinkhorn_iters, hc_eps)
    return post, comb / (comb.sum(dim=-1, keepdim=True) + hc_eps), collapsed


def one_epsilon(streams, fn, scale, base, norm_eps, sinkhorn_iters, hc_eps):
    return mhc_pre(streams, fn, scale, base, norm_eps, sinkhorn_iters, norm_eps)


def weights_in_the_dtype(streams, fn, scale, base, norm_eps, sinkhorn_iters, hc_eps):
    post, comb, collapsed = mhc_pre(streams, fn, scale, base, norm_eps, sinkhorn_iters, hc_eps)
    return post.to(streams.dtype), comb.to(streams.dtype), collapsed


def head_without_epsilon(streams, fn, scale, base, norm_eps, hc_eps):
    return mhc_head(streams, fn, scale, base, norm_eps, 0.0)


@pytest.mark.parametrize(
    ("variant", "kernel", "dtype"),
    [
        ("post", transposed, "bfloat16"),
        ("pre", rows_last, "float32"),
        ("pre", one_epsilon, "bfloat16"),
        ("pre", weights_in_the_dtype, "bfloat16"),
        ("head", head_without_epsilon, "bfloat16"),
    ],
)
def test_wrong_kernels_are_caught(variant, kernel, dtype):
    with pytest.raises(AssertionError, match=f"mhc/{variant}, kernel {kernel.__name__}"):
        check("mhc", variant, kernel, dtype=dtype)


@pytest.mark.parametrize("variant", ["pre", "post", "head"])
def test_the_workload_is_a_problem_of_the_contract(variant):
    contract = opslot.registry().contract("mhc", variant)
    shape = {"tokens": 6, "hidden": 10}
    sample = contract.workload.problem("cpu", torch.bfloat16, 0, **shape)
    result = contract.load_reference()(*sample.args, **sample.kwargs)
    last = result[-1] if isinstance(result, tuple) else result
    assert last.shape[:2] == (1, 6)
    assert last.shape[-1] == 10
    assert contract.workload.flops(**shape) == {"pre": 11520, "post": 1920, "head": 1920}[variant]
