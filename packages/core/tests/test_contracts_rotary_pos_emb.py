"""rotary_pos_emb: every variant is transformers' own function, and none passes for another."""

import pytest
import torch
from opslot.ops.rotary_pos_emb import (
    half_table_rotary_pos_emb,
    interleaved_rotary_pos_emb,
    partial_rotary_pos_emb,
    rotary_pos_emb,
)
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]
# With the width of the tables for heads of 16.
FUNCTIONS = [
    (rotary_pos_emb, "llama", "apply_rotary_pos_emb", 16),
    (rotary_pos_emb, "gemma3", "apply_rotary_pos_emb", 16),
    (partial_rotary_pos_emb, "qwen3_next", "apply_rotary_pos_emb", 4),
    (partial_rotary_pos_emb, "qwen3_5", "apply_rotary_pos_emb", 4),
    (partial_rotary_pos_emb, "glm4_moe", "apply_rotary_pos_emb", 8),
    (partial_rotary_pos_emb, "gpt_neox", "apply_rotary_pos_emb", 4),
    (partial_rotary_pos_emb, "phi3", "apply_rotary_pos_emb", 12),
    (interleaved_rotary_pos_emb, "deepseek_v3", "apply_rotary_pos_emb_interleave", 16),
    (interleaved_rotary_pos_emb, "glm_moe_dsa", "apply_rotary_pos_emb_interleave", 16),
    (interleaved_rotary_pos_emb, "mistral4", "apply_rotary_pos_emb_interleave", 16),
    (interleaved_rotary_pos_emb, "longcat_flash", "apply_rotary_pos_emb_interleave", 16),
    (half_table_rotary_pos_emb, "gpt_oss", "apply_rotary_pos_emb", 8),
]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(("ours", "model", "name", "width"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", v))
def test_is_that_of_transformers(modeling, assert_same, ours, model, name, width, unsqueeze_dim, dtype, table_dtype):
    q, k = leaf(2, 5, 4, 16, dtype=dtype), leaf(2, 5, 2, 16, dtype=dtype)
    order = (0, 2, 1, 3) if unsqueeze_dim == 1 else (0, 1, 2, 3)
    arguments = q.permute(order), k.permute(order), *torch.randn(2, 2, 5, width).to(table_dtype)
    theirs = getattr(modeling(model), name)(*arguments, unsqueeze_dim=unsqueeze_dim)
    assert_same(ours(*arguments, unsqueeze_dim), theirs, [q, k])


@pytest.mark.parametrize(
    ("rotate", "width", "expected"),
    [
        (rotary_pos_emb, 4, [-3.0, -4.0, 1.0, 2.0]),
        (partial_rotary_pos_emb, 2, [-2.0, 1.0, 3.0, 4.0]),
        # Left in place, the pairs would give -2, 1, -4, 3.
        (interleaved_rotary_pos_emb, 4, [-2.0, -4.0, 1.0, 3.0]),
        (half_table_rotary_pos_emb, 2, [-3.0, -4.0, 1.0, 2.0]),
    ],
)
def test_numbers(rotate, width, expected):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    for out in rotate(x, x, torch.zeros(1, 1, width), torch.ones(1, 1, width)):
        assert out.flatten().tolist() == expected


@pytest.mark.parametrize(("width", "dim"), [(32, 128), (20, 80), (16, 64)])
def test_what_is_not_rotated_stays_bit_for_bit(width, dim):
    q, k = torch.randn(1, 2, 3, dim), torch.randn(1, 1, 3, dim)
    out = partial_rotary_pos_emb(q, k, *torch.randn(2, 1, 3, width))
    for before, after in zip((q, k), out, strict=True):
        assert torch.equal(before[..., width:], after[..., width:])
        assert not torch.equal(before[..., :width], after[..., :width])


def test_interleaved_reads_the_first_half_of_its_tables():
    q, k, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), *torch.randn(2, 1, 3, 8)
    before = interleaved_rotary_pos_emb(q, k, cos, sin)
    cos[..., 4:], sin[..., 4:] = torch.nan, torch.nan
    after = interleaved_rotary_pos_emb(q, k, cos, sin)
    assert all(map(torch.equal, before, after))


def pairs_in_place(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[-1] // 2

    def interleave(x):
        return torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)

    return tuple(map(interleave, interleaved_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)))


def other_direction(rotate):
    def rotated(q, k, cos, sin, unsqueeze_dim=1):
        return rotate(q, k, cos, -sin, unsqueeze_dim)

    return rotated


def swapped_halves_of_the_table(q, k, cos, sin, unsqueeze_dim=1):
    return interleaved_rotary_pos_emb(q, k, cos.flip(-1), sin.flip(-1), unsqueeze_dim)


def last_elements(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.flip(-1) for x in partial_rotary_pos_emb(q.flip(-1), k.flip(-1), cos, sin, unsqueeze_dim))


def heads_first_whatever_was_asked(q, k, cos, sin, unsqueeze_dim=1):
    return half_table_rotary_pos_emb(q, k, cos, sin)


VARIANTS = {
    "full": rotary_pos_emb,
    "partial": partial_rotary_pos_emb,
    "interleaved": interleaved_rotary_pos_emb,
    "half_table": half_table_rotary_pos_emb,
}


@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        *((variant, other) for variant in VARIANTS for other in VARIANTS.values() if other is not VARIANTS[variant]),
        *((variant, other_direction(rotate)) for variant, rotate in VARIANTS.items()),
        ("partial", last_elements),
        ("interleaved", pairs_in_place),
        ("interleaved", swapped_halves_of_the_table),
        ("half_table", heads_first_whatever_was_asked),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_the_samples_catch(variant, wrong):
    if (variant, wrong) == ("full", partial_rotary_pos_emb):
        check("rotary_pos_emb", variant, wrong)  # With tables as wide as the head it is the same function.
        return
    # Tables of another width raise in torch, which the check passes through with a note.
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check("rotary_pos_emb", variant, wrong)
    assert f"rotary_pos_emb/{variant}" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
