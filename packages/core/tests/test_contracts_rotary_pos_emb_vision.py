"""rotary_pos_emb_vision: transformers' own function, in float32 whatever the dtype."""

import pytest
import torch
from opslot.ops.rotary_pos_emb import rotary_pos_emb
from opslot.ops.rotary_pos_emb_vision import rotary_pos_emb_vision
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["packed", "batched"])
@pytest.mark.parametrize("model", ["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v"])
def test_is_that_of_transformers(modeling, assert_same, model, batch, dtype, table_dtype):
    q, k = leaf(*batch, 9, 4, 16, dtype=dtype), leaf(*batch, 9, 4, 16, dtype=dtype)
    arguments = q, k, *torch.randn(2, *batch, 9, 16).to(table_dtype)
    theirs = modeling(model).apply_rotary_pos_emb_vision(*arguments)
    assert_same(rotary_pos_emb_vision(*arguments), theirs, [q, k])


def test_numbers():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16().view(1, 1, 4)
    out, _ = rotary_pos_emb_vision(x, x, torch.zeros(1, 4), torch.ones(1, 4))
    assert out.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]
    # In bfloat16 the table would be 1.
    x, cos, sin = torch.full((1, 1, 2), 384.0).bfloat16(), torch.full((1, 2), 1 + 3 / 1024), torch.zeros(1, 2)
    assert rotary_pos_emb_vision(x, x, cos, sin)[0].flatten().tolist() == [386.0, 386.0]


def test_the_dtype_is_that_of_each():
    q, k = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 2, 8)
    out = rotary_pos_emb_vision(q, k, *torch.randn(2, 3, 8))
    assert [tensor.dtype for tensor in out] == [torch.bfloat16, torch.float32]


def in_the_dtype(q, k, cos, sin):
    return rotary_pos_emb(q, k, cos.to(q.dtype), sin.to(q.dtype), -2)


def not_rounded_back(q, k, cos, sin):
    return rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float(), -2)


def neighbours(q, k, cos, sin):
    def rotate(x):
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return (x.float() * cos.unsqueeze(-2) + turned.float() * sin.unsqueeze(-2)).to(x.dtype)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("wrong", [in_the_dtype, not_rounded_back, neighbours])
def test_the_samples_catch(wrong):
    with pytest.raises(AssertionError, match=rf"rotary_pos_emb_vision/full, kernel {wrong.__name__}"):
        check("rotary_pos_emb_vision", "full", wrong, dtype="bfloat16")
