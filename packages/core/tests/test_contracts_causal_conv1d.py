"""causal_conv1d/standard: transformers' own convolution, and packed sequences that stay apart."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import opslot
import pytest
import torch
from opslot.ops.causal_conv1d import causal_conv1d
from opslot.testing import check
from torch.nn.functional import conv1d, silu

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def upstream(request):
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    module = import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    # Upstream's own code, whatever package its decorator would rather call.
    return inspect.unwrap(module.causal_conv1d_fn)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def gradients(output, inputs, incoming):
    return torch.autograd.grad(output, inputs, incoming)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_is_that_of_transformers(upstream, dtype, weight_dtype, activation, length):
    x = torch.randn(2, length, 24).to(dtype).transpose(1, 2).requires_grad_()
    weight = leaf(24, 4, dtype=weight_dtype)
    for bias in (None, leaf(24, dtype=weight_dtype)):
        inputs = [x, weight] if bias is None else [x, weight, bias]
        ours, theirs = causal_conv1d(x, weight, bias, activation), upstream(x, weight, bias, activation)
        assert ours.dtype == theirs.dtype == dtype
        assert torch.equal(ours, theirs)
        incoming = torch.randn_like(ours)
        for mine, yours in zip(gradients(ours, inputs, incoming), gradients(theirs, inputs, incoming), strict=True):
            assert torch.equal(mine, yours)


def test_transformers_refuses_packed_sequences():
    """Its own code does, which is why packed values have no upstream to be compared with."""
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    if find_spec("causal_conv1d") is not None:
        pytest.skip("the package is installed and would be called")
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        causal_conv1d_fn(torch.randn(1, 8, 6), torch.randn(8, 4), cu_seqlens=torch.tensor([0, 3, 6]))


def test_numbers():
    x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]])
    assert causal_conv1d(x, weight).tolist() == [[[1.0, 12.0, 23.0]]]  # 10 * before + now
    assert causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 1, 3])).tolist() == [[[1.0, 2.0, 23.0]]]
    assert torch.equal(causal_conv1d(x, weight, None, "silu"), silu(causal_conv1d(x, weight)))


@pytest.mark.parametrize("ends", [(0, 3, 6), (0, 3, 3, 6), (0, 0, 6), (0, 1, 2, 6), (0, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_sequences_are_those_of_separate_calls(ends, dtype):
    x, weight, bias = leaf(1, 8, 6, dtype=dtype), leaf(8, 4, dtype=dtype), leaf(8, dtype=dtype)
    packed = causal_conv1d(x, weight, bias, "silu", cu_seqlens=torch.tensor(ends))
    spans = [(start, end) for start, end in pairwise(ends) if start < end]
    apart = [causal_conv1d(x[..., start:end], weight, bias, "silu") for start, end in spans]
    assert torch.equal(packed, torch.cat(apart, dim=-1))
    incoming = torch.randn_like(packed)
    d_x, *d_weights = gradients(packed, [x, weight, bias], incoming)
    sums = [0, 0]
    for (start, end), out in zip(spans, apart, strict=True):
        d_part, *d_parts = gradients(out, [x, weight, bias], incoming[..., start:end])
        assert torch.equal(d_part[..., start:end], d_x[..., start:end])
        sums = [total + part.double() for total, part in zip(sums, d_parts, strict=True)]
    for mine, total in zip(d_weights, sums, strict=True):
        # Gradients of up to four sequences add up in the dtype.
        torch.testing.assert_close(
            mine.double(), total, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )


def test_a_sequence_does_not_see_the_one_before():
    x, weight = torch.randn(1, 8, 6), torch.randn(8, 4)
    cu_seqlens = torch.tensor([0, 3, 6])
    before = causal_conv1d(x, weight, cu_seqlens=cu_seqlens)
    x[..., :3] = torch.randn(1, 8, 3)
    after = causal_conv1d(x, weight, cu_seqlens=cu_seqlens)
    assert torch.equal(before[..., 3:], after[..., 3:])
    assert not torch.equal(before[..., :3], after[..., :3])


@pytest.mark.parametrize(
    ("batch", "ends", "message"),
    [
        (2, torch.tensor([0, 3, 6]), "packed sequences lie in a batch of 1, got cu_seqlens and a batch of 2"),
        (1, torch.tensor([0, 3, 5]), r"begin with 0, never fall and end with 6 tokens, got \[0, 3, 5\]"),
        (1, torch.tensor([1, 3, 6]), "begin with 0"),
        (1, torch.tensor([0, 4, 3, 6]), "never fall"),
        (1, torch.tensor([0]), "begin with 0"),
        (1, torch.tensor([[0, 6]]), r"must be \[N \+ 1\] integers, got \[1, 2\] torch.int64"),
        (1, torch.tensor([0.0, 6.0]), "integers, got"),
    ],
)
def test_wrong_boundaries_are_refused(batch, ends, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(torch.randn(batch, 8, 6), torch.randn(8, 4), cu_seqlens=ends)


def test_other_activations_are_refused():
    for activation in ("gelu", "SiLU", "none", True):
        with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got"):
            causal_conv1d(torch.randn(1, 8, 6), torch.randn(8, 4), None, activation)


def plain(x, weight, bias, activation, act=silu):
    width = weight.shape[1]
    out = conv1d(
        torch.nn.functional.pad(x.to(weight.dtype), (width - 1, 1)), weight.unsqueeze(1), bias, groups=len(weight)
    )
    out = out[..., : x.shape[-1]]
    return (out if activation is None else act(out)).to(x.dtype)


def leaks(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return plain(hidden_states, weight, bias, activation)


def always_silu(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return causal_conv1d(hidden_states, weight, bias, "silu", cu_seqlens=cu_seqlens)


def swish_is_nothing(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    activation = None if activation == "swish" else activation
    return causal_conv1d(hidden_states, weight, bias, activation, cu_seqlens=cu_seqlens)


def backwards(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return causal_conv1d(hidden_states, weight.flip(-1), bias, activation, cu_seqlens=cu_seqlens)


def no_bias(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    out = causal_conv1d(hidden_states, weight, None, activation, cu_seqlens=cu_seqlens)
    return out if bias is None else out + 0 * bias.sum().to(out.dtype)


class _LeakyBackward(torch.autograd.Function):
    """Right values, and the gradient of one long sequence."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, cu_seqlens):
        ctx.save_for_backward(x, weight, bias)
        ctx.activation = activation
        return causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = plain(*leaves, ctx.activation)
        found = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], grad))
        return (*(None if t is None else next(found) for t in leaves), None, None)


def leaks_in_backward(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return _LeakyBackward.apply(hidden_states, weight, bias, activation, cu_seqlens)


@pytest.mark.parametrize(
    "kernel", [leaks, leaks_in_backward, always_silu, swish_is_nothing, backwards, no_bias], ids=lambda k: k.__name__
)
def test_a_wrong_kernel_is_caught(kernel):
    with pytest.raises(AssertionError, match="is wrong at"):
        check("causal_conv1d", "standard", kernel, dtype="bfloat16")


def test_workload():
    small = {"batch": 1, "length": 9, "channels": 8, "width": 4}
    work = opslot.registry().contract("causal_conv1d", "standard").workload
    for shape in (small, {**small, "packed": 2}):
        sample = work.problem("cpu", torch.bfloat16, 0, **shape)
        assert causal_conv1d(*sample.args, **sample.kwargs).shape == (1, 8, 9)
    assert sample.kwargs["cu_seqlens"].tolist() == [0, 4, 9]
    assert all(set(shape) - {"packed"} == set(small) for shape in (*work.shapes.values(), work.large))
    assert work.large["length"] * work.large["channels"] > 2**31
