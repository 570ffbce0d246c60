"""chunk_gated_delta_rule/standard: transformers' own chunks, its definition token by token, and packed sequences."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import opslot
import pytest
import torch
from opslot.ops.chunk_gated_delta_rule import chunk_gated_delta_rule
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def upstream(request):
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    module = import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    # Upstream's own code, whatever package its decorator would rather call.
    return inspect.unwrap(module.torch_chunk_gated_delta_rule)


def tensors(batch, tokens, heads=4, key_heads=2, size=8, value_size=6, dtype=torch.float32):
    made = [
        torch.randn(batch, tokens, key_heads, size),
        torch.randn(batch, tokens, key_heads, size) * size**-0.5,
        torch.randn(batch, tokens, heads, value_size),
        -0.1 * torch.randn(batch, tokens, heads).exp(),
        torch.randn(batch, tokens, heads).sigmoid(),
    ]
    # As the model has it, the decay is never in half precision.
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(wide if number == 3 else dtype).requires_grad_() for number, x in enumerate(made)]


def states(sequences, heads=4, size=8, value_size=6, dtype=torch.float32):
    return torch.randn(sequences, heads, size, value_size, dtype=dtype).requires_grad_()


def gradients(outputs, inputs, incoming):
    return torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("tokens", [1, 64, 130])
@pytest.mark.parametrize("keywords", [{}, {"use_qk_l2norm_in_kernel": True, "output_final_state": True}], ids=str)
def test_is_that_of_transformers(upstream, dtype, heads, tokens, keywords):
    inputs, initial = tensors(2, tokens, heads, dtype=dtype), states(2, heads)
    for state in (None, initial):
        ours, theirs = (f(*inputs, initial_state=state, **keywords) for f in (chunk_gated_delta_rule, upstream))
        if not keywords:
            assert ours[1] is theirs[1] is None
            ours, theirs = ours[:1], theirs[:1]
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.dtype == yours.dtype
            assert torch.equal(mine, yours)
        leaves = inputs if state is None else [*inputs, state]
        incoming = [torch.randn_like(out) for out in ours]
        for number, (mine, yours) in enumerate(
            zip(gradients(ours, leaves, incoming), gradients(theirs, leaves, incoming), strict=True)
        ):
            assert torch.equal(mine, yours), f"input {number}"


def test_transformers_refuses_packed_sequences():
    """Its own code does, which is why packed values have no upstream to be compared with."""
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    if find_spec("fla") is not None:
        pytest.skip("the package is installed and would be called")
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        torch_chunk_gated_delta_rule(*tensors(1, 6), cu_seqlens=torch.tensor([0, 3, 6]))


def token_by_token(query, key, value, g, beta, state, normalise):
    """The definition, as the docstring has it."""
    group = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(group, dim=2) for x in (query, key))
    if normalise:
        query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outs = []
    for t in range(value.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        missing = value[:, t] - torch.einsum("bhd,bhdv->bhv", key[:, t], state)
        state = state + torch.einsum("bhd,bhv->bhdv", key[:, t], beta[:, t, :, None] * missing)
        outs.append(torch.einsum("bhd,bhdv->bhv", query[:, t], state) * query.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("normalise", [True, False])
def test_is_its_definition(tokens, normalise):
    inputs = tensors(2, tokens, dtype=torch.float64)
    leaves = [*inputs, states(2, dtype=torch.float64)]
    keywords = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalise}
    ours = chunk_gated_delta_rule(*inputs, initial_state=leaves[-1], **keywords)
    slow = token_by_token(*leaves, normalise)
    incoming = [torch.randn_like(out) for out in ours]
    pairs = zip((*ours, *gradients(ours, leaves, incoming)), (*slow, *gradients(slow, leaves, incoming)), strict=True)
    for mine, expected in pairs:
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ends", [(0, 3, 6), (0, 3, 3, 6), (0, 0, 6), (0, 64, 65, 150), (0, 6), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_sequences_are_those_of_separate_calls(ends, dtype):
    count = len(ends) - 1
    inputs = tensors(1, ends[-1], dtype=dtype)
    initial = states(count, dtype=torch.promote_types(dtype, torch.float32))
    keywords = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    packed = chunk_gated_delta_rule(*inputs, initial_state=initial, cu_seqlens=torch.tensor(ends), **keywords)
    incoming = [torch.randn_like(out) for out in packed]
    together = gradients(packed, [*inputs, initial], incoming)
    for number, (start, end) in enumerate(pairwise(ends)):
        part = [x[:, start:end].detach().requires_grad_() for x in inputs]
        state = initial[number : number + 1].detach().requires_grad_()
        out, final = apart = chunk_gated_delta_rule(*part, initial_state=state, **keywords)
        assert torch.equal(out, packed[0][:, start:end])
        assert torch.equal(final, packed[1][number : number + 1])
        if start == end:
            assert torch.equal(final, state)
        given = [incoming[0][:, start:end], incoming[1][number : number + 1]]
        *alone, alone_state = gradients(apart, [*part, state], given)
        assert torch.equal(alone_state, together[-1][number : number + 1])
        for mine, whole in zip(alone, together[:-1], strict=True):
            assert torch.equal(mine, whole[:, start:end])


def test_a_sequence_does_not_see_the_one_before():
    inputs, ends = [x.detach() for x in tensors(1, 6)], torch.tensor([0, 3, 6])
    before, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=ends)
    for x, other in zip(inputs, tensors(1, 3), strict=True):
        x[:, :3] = other.detach()
    after, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=ends)
    assert torch.equal(before[:, 3:], after[:, 3:])
    assert not torch.equal(before[:, :3], after[:, :3])


def test_what_is_refused():
    inputs = tensors(2, 6)
    with pytest.raises(ValueError, match="packed sequences lie in a batch of 1, got cu_seqlens and a batch of 2"):
        chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match=r"begin with 0, never fall and end with 6 tokens, got \[0, 3, 5\]"):
        chunk_gated_delta_rule(*tensors(1, 6), cu_seqlens=torch.tensor([0, 3, 5]))
    # One state for two sequences would be shared by broadcasting.
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 4, 8, 6\], .* got \[1, 4, 8, 6\]"):
        chunk_gated_delta_rule(*inputs, initial_state=states(1))
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 4, 8, 6\], .* got \[1, 4, 8, 6\]"):
        chunk_gated_delta_rule(*tensors(1, 6), initial_state=states(1), cu_seqlens=torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="value have a multiple of their heads"):
        chunk_gated_delta_rule(*tensors(2, 6, heads=3))
    with pytest.raises(ValueError, match="of one shape"):
        chunk_gated_delta_rule(inputs[0][..., :4], *inputs[1:])


def leaks(*inputs, initial_state=None, cu_seqlens=None, **keywords):
    """One long sequence from the first state; every sequence is told the state at the very end."""
    count = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    state = (
        initial_state if cu_seqlens is None or initial_state is None else initial_state[:1] + 0 * initial_state.sum()
    )
    out, final = chunk_gated_delta_rule(*inputs, initial_state=state, **keywords)
    return out, final if final is None or cu_seqlens is None else final.expand(count, -1, -1, -1) + 0


def leaves_out(name, otherwise):
    def kernel(*inputs, **keywords):
        return chunk_gated_delta_rule(*inputs, **{**keywords, name: otherwise})

    kernel.__name__ = f"leaves out {name}"
    return kernel


def no_scale(query, *inputs, **keywords):
    return chunk_gated_delta_rule(query * query.shape[-1] ** 0.5, *inputs, **keywords)


def heads_in_turn(query, key, value, *inputs, **keywords):
    times = value.shape[2] // key.shape[2]
    return chunk_gated_delta_rule(query.repeat(1, 1, times, 1), key.repeat(1, 1, times, 1), value, *inputs, **keywords)


def no_gradient_of_decay(query, key, value, g, beta, **keywords):
    out, state = chunk_gated_delta_rule(query, key, value, g.detach(), beta, **keywords)
    return out + 0 * g.sum().to(out.dtype), state


def state_without_gradient(*inputs, initial_state=None, **keywords):
    state = None if initial_state is None else initial_state.detach() + 0 * initial_state.sum()
    return chunk_gated_delta_rule(*inputs, initial_state=state, **keywords)


@pytest.mark.parametrize(
    "kernel",
    [
        leaks,
        leaves_out("use_qk_l2norm_in_kernel", False),
        leaves_out("use_qk_l2norm_in_kernel", True),
        no_scale,
        heads_in_turn,
        no_gradient_of_decay,
        state_without_gradient,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_a_wrong_kernel_is_caught(kernel):
    def called(
        query,
        key,
        value,
        g,
        beta,
        *,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        keywords = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return kernel(query, key, value, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **keywords)

    with pytest.raises(AssertionError, match="is wrong at"):
        check("chunk_gated_delta_rule", "standard", called, dtype="bfloat16")


def test_workload():
    work = opslot.registry().contract("chunk_gated_delta_rule", "standard").workload
    small = {"batch": 1, "tokens": 9, "key_heads": 1, "value_heads": 2, "size": 8}
    for shape in (small, {**small, "packed": 2}):
        sample = work.problem("cpu", torch.bfloat16, 0, **shape)
        out, state = chunk_gated_delta_rule(*sample.args, **sample.kwargs)
        assert (out.shape, state) == ((1, 9, 2, 8), None)
        assert work.flops(**shape) == 9 * 2 * (8 * 64 * 8 + 6 * 64)
    assert sample.kwargs["cu_seqlens"].tolist() == [0, 4, 9]
    assert all(set(shape) - {"packed"} == set(small) for shape in work.shapes.values())
