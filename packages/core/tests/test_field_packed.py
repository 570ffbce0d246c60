"""Faults of packed sequences that users reported in public, with their numbers: the contracts' references have none.

Named after the classes of docs/field-faults.md.
"""

from itertools import pairwise

import pytest
import torch
from opslot.ops.causal_conv1d import causal_conv1d
from opslot.ops.chunk_gated_delta_rule import chunk_gated_delta_rule

# Each op as a function of one tensor and the boundaries, with the dimension along which its tokens lie.
CONV_WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def convolve(x, cu_seqlens=None):
    """Eight channels, a kernel of four tokens: [B, C, T]."""
    return causal_conv1d(x, CONV_WEIGHT, None, "silu", cu_seqlens=cu_seqlens)


def remember(x, cu_seqlens=None):
    """Two heads of four: [B, T, 8], from which queries, keys, values, decays and betas are made."""
    heads = x.unflatten(-1, (2, 4))
    decay, beta = -x[..., :2].abs(), x[..., 2:4].sigmoid()
    return chunk_gated_delta_rule(
        heads, heads.flip(-1), heads * 2, decay, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
    )[0]


OPS = pytest.mark.parametrize(("op", "dim"), [(convolve, 2), (remember, 1)], ids=["conv", "delta rule"])


def tokens(dim, number=6):
    shape = [1, 8, 8]
    shape[dim] = number
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@OPS
@pytest.mark.parametrize("ends", [(0, 3, 6), (0, 3, 3, 6)], ids=str)
def test_c11_packed_is_apart(op, dim, ends):
    """State of one sample ran into the next, since only the convolution was told of the boundaries."""
    x = tokens(dim)
    packed = op(x, torch.tensor(ends))
    apart = [op(x.narrow(dim, start, end - start)) for start, end in pairwise(ends) if end > start]
    assert torch.equal(packed, torch.cat(apart, dim))
    assert not torch.equal(packed, op(x)), "without boundaries the second sample sees the first"


@OPS
def test_c11_a_change_in_one_sample_is_not_seen_by_the_other(op, dim):
    x, ends = tokens(dim).requires_grad_(), torch.tensor([0, 3, 6])
    before = op(x, ends)
    changed = x.detach().clone()
    changed.narrow(dim, 0, 3).add_(1)
    assert torch.equal(op(changed, ends).narrow(dim, 3, 3), before.narrow(dim, 3, 3))
    (gradient,) = torch.autograd.grad(before.narrow(dim, 3, 3).sum(), x)
    assert not gradient.narrow(dim, 0, 3).any()
    assert gradient.narrow(dim, 3, 3).any()


def test_c11_tokens_are_cut_and_not_channels():
    """A fallback cut dimension 1 of [B, C, T]; here that would give other shapes, or nothing."""
    x = tokens(2, 5)
    assert convolve(x, torch.tensor([0, 2, 5])).shape == x.shape
    with pytest.raises(ValueError, match="end with 5 tokens"):
        convolve(x, torch.tensor([0, 4, 8]))


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_c01_the_convolution_applies_what_it_is_told(activation):
    x = tokens(2)
    out, linear = causal_conv1d(x, CONV_WEIGHT, None, activation), causal_conv1d(x, CONV_WEIGHT)
    assert torch.equal(out, linear if activation is None else torch.nn.functional.silu(linear))
