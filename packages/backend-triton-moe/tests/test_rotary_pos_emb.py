"""Rotation of neighbours: queries and keys that differ, read from where they lie."""

import pytest
import torch
from opslot import KernelUnavailable
from opslot.ops.rotary_pos_emb import interleaved_rotary_pos_emb as reference
from opslot.testing import poisoned_memory

pytest.importorskip("triton", reason="there is no triton for this platform")

from opslot_backends.triton_moe import rotary_pos_emb as module

kernel = module.rotary_pos_emb_interleaved


def tables(batch, tokens, width, dtype=torch.float32):
    """Of any numbers: nothing says that they are cosines and sines, or that their second halves are read."""
    return torch.randn(batch, tokens, width).to(dtype), torch.randn(batch, tokens, width).to(dtype)


def heads(batch, count, tokens, width, dtype=torch.float32):
    return torch.randn(batch, count, tokens, width).to(dtype).requires_grad_()


def results(function, q, k, cos, sin, unsqueeze_dim=1):
    outputs = function(q, k, cos, sin, unsqueeze_dim)
    leaves = [x for x in (q, k) if x.requires_grad]
    trained = [out for out in outputs if out.requires_grad]
    return [*outputs, *torch.autograd.grad(trained, leaves, [out.detach().cos() for out in trained])]


def assert_as_the_reference(*arguments):
    for got, expected in zip(results(kernel, *arguments), results(reference, *arguments), strict=True):
        assert got.dtype == expected.dtype
        limit = 5e-3 if torch.float16 in [x.dtype for x in arguments[:4]] else 1e-5
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def test_what_it_computes(interpreter):
    """The pairs (1, 2) and (3, 4), a quarter turn each: (-2, 1) and (-4, 3), their first elements first."""
    x, cos, sin = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    for out in kernel(x, 10 * x, cos, sin):
        assert torch.equal(out / out[0, 0, 0, 2], torch.tensor([-2.0, -4, 1, 3]).view(1, 1, 1, 4))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 2), (4, 9), (8, 1)])
def test_numbers_of_heads(queries, keys, unsqueeze_dim, interpreter, monkeypatch):
    monkeypatch.setattr(module, "_TILE", 64)
    q, k = heads(2, queries, 7, 8), heads(2, keys, 7, 8)
    if unsqueeze_dim == 2:
        q, k = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k))
    assert_as_the_reference(q, k, *tables(2, 7, 8), unsqueeze_dim)


@pytest.mark.parametrize("width", [2, 6, 20, 64])
@pytest.mark.parametrize("tokens", [1, 33])
def test_sizes_that_fill_no_tile(width, tokens, interpreter, monkeypatch):
    monkeypatch.setattr(module, "_TILE", 256)
    assert_as_the_reference(heads(2, 3, tokens, width), heads(2, 1, tokens, width), *tables(1, tokens, width))


@pytest.mark.parametrize("cos", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sin", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("k", [torch.float32, torch.float16], ids=str)
def test_dtypes_that_differ(cos, sin, k, interpreter):
    q, k = heads(1, 2, 5, 8, torch.float16), heads(1, 1, 5, 8, k)
    assert_as_the_reference(q, k, tables(1, 5, 8, cos)[0], tables(1, 5, 8, sin)[1])


def test_each_sequence_has_its_own_table(interpreter):
    (q, k), (cos, sin) = (heads(2, 2, 5, 8), heads(2, 1, 5, 8)), tables(2, 5, 8)
    before = kernel(q, k, cos, sin)
    after = kernel(q, k, torch.stack((cos[0], cos[1] + 1)), sin)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[0], b[0])
        assert not torch.equal(a[1], b[1])


def layouts(x):
    b, h, s, d = x.shape
    wide = torch.full((b, h, s, 3 * d), float("nan"))
    wide[..., d : 2 * d] = x
    apart = torch.full((b, h, s, d, 2), float("nan"))
    apart[..., 0] = x
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "a part of wider heads": wide[..., d : 2 * d],
        "columns apart": apart[..., 0],
        "from one head": x[:, :1].expand(b, h, s, d),
    }


@pytest.mark.parametrize("name", list(layouts(torch.randn(1, 1, 1, 2))))
def test_layouts(name, interpreter):
    q, k = (layouts(torch.randn(2, count, 5, 8))[name].detach().requires_grad_() for count in (3, 2))
    cos, sin = tables(2, 5, 8)
    assert_as_the_reference(q, k, cos, sin)
    assert_as_the_reference(q, k, cos[:1].expand(2, -1, -1), sin[..., :1].expand(-1, -1, 8))
    assert_as_the_reference(q, k, cos.transpose(0, 1).contiguous().transpose(0, 1), sin)


def test_nothing_is_copied_that_lies_in_rows(interpreter, monkeypatch):
    contiguous = torch.Tensor.contiguous
    copied = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x, **keywords: copied.append(x) or contiguous(x, **keywords))
    made = layouts(torch.randn(2, 3, 5, 8))
    for name in ("transposed", "a part of wider heads", "from one head"):
        copied.clear()
        results(kernel, made[name].detach().requires_grad_(), heads(2, 1, 5, 8), *tables(1, 5, 8))
        assert not copied, name


def test_one_launch_each_way_for_both(interpreter, monkeypatch):
    launched = []
    function = module._kernels.rotate

    class Watched:
        def __getitem__(self, grid):
            launched.append(grid)
            return function[grid]

    monkeypatch.setattr(module._kernels, "rotate", Watched())
    results(kernel, heads(2, 3, 5, 8), heads(2, 1, 5, 8), *tables(1, 5, 8))
    assert launched == [(2, 2), (2, 2)]


def test_the_second_halves_of_the_tables_are_not_read(interpreter):
    q, k, (cos, sin) = heads(1, 2, 5, 8), heads(1, 1, 5, 8), tables(1, 5, 8)
    expected = kernel(q, k, cos, sin)
    cos[..., 4:] = sin[..., 4:] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(kernel(q, k, cos, sin), expected, strict=True))


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_queries_or_keys(frozen, interpreter):
    pair = [heads(1, 2, 5, 8), heads(1, 1, 5, 8)]
    pair[frozen].requires_grad_(False)
    assert_as_the_reference(*pair, *tables(1, 5, 8))
    assert [out.requires_grad for out in kernel(*pair, *tables(1, 5, 8))] == [frozen == 1, frozen == 0]


def test_no_tokens_and_no_heads(interpreter):
    assert_as_the_reference(heads(2, 3, 0, 8), heads(2, 1, 0, 8), *tables(2, 0, 8))
    assert_as_the_reference(heads(2, 3, 5, 8), heads(2, 0, 5, 8), *tables(2, 5, 8))


def test_nothing_is_read_that_nobody_wrote(interpreter):
    with poisoned_memory():
        assert_as_the_reference(heads(2, 3, 5, 6), heads(2, 1, 5, 6), *tables(1, 5, 6))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic, interpreter):
    torch._dynamo.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 9):
        arguments = heads(2, 3, tokens, 8), heads(2, 1, tokens, 8), *tables(1, tokens, 8)
        for got, expected in zip(results(compiled, *arguments), results(reference, *arguments), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("width", [2, 64, 80])
def test_compiles_for_heads_of_every_width(width, offline):
    made = offline("cuda", 90, 32)
    results(kernel, *(heads(1, count, 5, width, torch.bfloat16) for count in (9, 1)), *tables(1, 5, width))
    assert [name for name, _ in made] == ["rotate", "rotate"]


def test_learnt_tables():
    (q, k), (cos, sin) = (heads(1, 2, 5, 8), heads(1, 1, 5, 8)), tables(1, 5, 8)
    for which in (cos, sin):
        which.requires_grad_()
        with pytest.raises(KernelUnavailable, match="no gradient of cos and sin; to learn them choose eager"):
            kernel(q, k, cos, sin)
        which.requires_grad_(False)


def test_tables_that_could_be_learnt_without_gradients(interpreter):
    (q, k), (cos, sin) = (heads(1, 2, 5, 8), heads(1, 1, 5, 8)), tables(1, 5, 8)
    with torch.no_grad():
        for got, expected in zip(kernel(q, k, cos.requires_grad_(), sin), reference(q, k, cos, sin), strict=True):
            torch.testing.assert_close(got, expected)


def test_refusals():
    (q, k), (cos, sin) = (heads(2, 2, 5, 8), heads(2, 1, 5, 8)), tables(1, 5, 8)
    for dim in (-3, 0, 3):
        with pytest.raises(ValueError, match=f"unsqueeze_dim is 1 for .* or 2 for .*, got {dim}"):
            kernel(q, k, cos, sin, dim)
    for other in (heads(2, 1, 6, 8), heads(1, 1, 5, 8), heads(2, 1, 5, 6), k[0]):
        with pytest.raises(ValueError, match="differ in their number of heads alone"):
            kernel(q, other, cos, sin)
    with pytest.raises(ValueError, match="the last an even one"):
        kernel(q[..., :7], k[..., :7], cos[..., :7], sin[..., :7])
    for table in (*tables(1, 4, 8)[:1], *tables(1, 5, 4)[:1], *tables(3, 5, 8)[:1], cos[0]):
        with pytest.raises(ValueError, match=r"must be \[B or 1, S, 8\].* for 5 tokens in 2 sequences"):
            kernel(q, k, table, sin)
        with pytest.raises(ValueError, match=r"must be \[B or 1, S, 8\]"):
            kernel(q, k, cos, table)
    with pytest.raises(ValueError, match="q is on cpu, k on cpu, cos on meta, sin on cpu"):
        kernel(q, k, cos.to("meta"), sin)


def test_float64_beside_queries_of_another_dtype():
    """The result would be of float64, and no more exact than float32."""
    (q, k), (cos, sin) = (heads(2, 2, 5, 8), heads(2, 1, 5, 8)), tables(1, 5, 8)
    with pytest.raises(KernelUnavailable, match=r"got k of torch\.float64: choose eager"):
        kernel(q, k.double(), cos, sin)
    with pytest.raises(KernelUnavailable, match=r"got cos and sin of torch\.float64: choose eager"):
        kernel(q, k, cos.double(), sin.double())
