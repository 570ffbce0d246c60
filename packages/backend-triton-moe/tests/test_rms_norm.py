"""Root mean square normalisation: rows of every length and layout, each as if it were alone."""

import pytest
import torch
from opslot import KernelUnavailable
from opslot.ops.rms_norm import rms_norm as reference
from opslot.testing import poisoned_memory

pytest.importorskip("triton", reason="there is no triton for this platform")

from opslot_backends.triton_moe import rms_norm as module

kernel = module.rms_norm
EPS = 1e-5


def results(function, x, weight, eps=EPS, incoming=None):
    leaves = [tensor for tensor in (x, weight) if tensor.requires_grad]
    out = function(x, weight, eps)
    return [out, *torch.autograd.grad(out, leaves, out.detach().cos() if incoming is None else incoming)]


def assert_as_the_reference(x, weight, eps=EPS, incoming=None):
    pairs = zip(results(kernel, x, weight, eps, incoming), results(reference, x, weight, eps, incoming), strict=True)
    for got, expected in pairs:
        assert got.dtype == expected.dtype
        limit = 4e-3 if got.dtype == torch.float16 else 2e-5
        largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit * largest)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.fixture(params=[8192, 32], ids=["whole rows", "blocks of 32"])
def block(request, monkeypatch):
    monkeypatch.setattr(module, "_WHOLE", request.param)
    monkeypatch.setattr(module, "_TILE", 64)


@pytest.mark.parametrize("shape", [(7, 64), (5, 33), (2, 3, 100), (3, 1), (17,), (0, 20)], ids=str)
def test_rows_of_every_length(shape, block, interpreter):
    # With a tiny eps a row of one element is a sign, whose gradient is nothing but rounding.
    assert_as_the_reference(leaf(*shape), leaf(shape[-1]), eps=0.5)


@pytest.mark.parametrize(("x", "weight"), [("half", "half"), ("half", "float"), ("float", "half")])
def test_the_dtype_of_the_product(x, weight, block, interpreter):
    dtypes = {"half": torch.float16, "float": torch.float32}
    assert_as_the_reference(leaf(5, 40, dtype=dtypes[x]), leaf(40, dtype=dtypes[weight]))


def test_what_is_rounded_before_the_weight_multiplies(interpreter):
    """A weight in float32 shows it: rounded afterwards alone, products differ by more than their own rounding."""
    x, weight = torch.randn(4, 64).half(), torch.full((64,), 3.0)
    assert torch.equal(kernel(x, weight, EPS) / 3, (kernel(x, weight, EPS) / 3).half().float())


@pytest.mark.parametrize("size", [8, 64, 100])
def test_a_row_is_the_same_bits_whatever_stands_beside_it(size, block, interpreter):
    x, weight, incoming = torch.randn(37, size), leaf(size), torch.randn(37, size)
    x[5], x[20] = 1e4, float("nan")
    whole, d_whole, _ = results(kernel, x.clone().requires_grad_(), weight, EPS, incoming)
    for first, last in ((0, 1), (3, 4), (4, 30), (21, 37)):
        out, d_x, _ = results(kernel, x[first:last].clone().requires_grad_(), weight, EPS, incoming[first:last])
        assert torch.equal(out.nan_to_num(), whole[first:last].nan_to_num())
        assert torch.equal(d_x.nan_to_num(), d_whole[first:last].nan_to_num())


def test_one_row_of_nan_leaves_the_others_gradients_alone(block, interpreter):
    x, weight = torch.randn(9, 40), leaf(40)
    x[4] = float("nan")
    _, d_x, d_weight = results(kernel, x.requires_grad_(), weight, EPS, torch.ones(9, 40))
    assert d_x.isnan().any(-1).tolist() == [row == 4 for row in range(9)]
    assert d_weight.isnan().all()


@pytest.mark.parametrize("warps", [4, 40, 400])
def test_in_however_many_shares_the_weights_gradient_is_summed(warps, block, interpreter, monkeypatch):
    monkeypatch.setattr(module, "_WARPS", warps)
    assert_as_the_reference(leaf(150, 24), leaf(24))


def test_the_weights_gradient_is_the_same_bits_twice(interpreter):
    x, weight = leaf(300, 24), leaf(24)
    assert torch.equal(*(results(kernel, x, weight)[2] for _ in range(2)))


def views(x):
    """By name: queries within a merged projection, after a transpose, every second row, from a scalar, and more."""
    return {
        "heads of a merged projection": x(2, 5, 8 * 16)[..., 16 : 5 * 16].view(2, 5, 4, 16),
        "heads before tokens": x(2, 5, 8 * 16)[..., : 4 * 16].view(2, 5, 4, 16).transpose(1, 2),
        "a part of each row": x(6, 20)[:, 3:19],
        "every second row": x(12, 16)[::2],
        "one row for all": x(1, 16).expand(6, 16),
        "columns apart": x(6, 32)[:, ::2],
        "columns first": x(16, 6).t(),
        "a single element for all": x(1, 1).expand(6, 16),
        "in one place": x(16).expand(1, 1, 16),
    }


@pytest.mark.parametrize("name", list(views(torch.empty)))
def test_views(name, block, interpreter):
    x = views(torch.randn)[name].detach().requires_grad_()
    assert_as_the_reference(x, leaf(16))
    contiguous = leaf(*x.shape)
    assert_as_the_reference(contiguous, leaf(16), incoming=views(torch.randn)[name])


def test_which_views_are_copied():
    copied = {
        name for name, view in views(torch.empty).items() if module._Rows.of(view).tensor.data_ptr() != view.data_ptr()
    }
    assert copied == {
        "heads before tokens",
        "a part of each row",
        "columns apart",
        "columns first",
        "a single element for all",
    }


@pytest.mark.parametrize("size", [16, 24, 33])
def test_what_triton_knows_of_addresses_depends_on_the_length_of_a_row_alone(size):
    """Otherwise a kernel compiled for one row would sum it in another order than one compiled for many."""
    wide, flat = torch.empty(2, 6, 4 * size + 8), torch.empty(4 * size + 1)
    for view in (
        wide[..., :size],
        wide[:1, :1, :size],
        wide[..., 8 : 8 + size],
        wide[..., : 4 * size].unflatten(-1, (4, size)),
        wide[:1, ..., : 4 * size].unflatten(-1, (4, size)),
        wide[:1, :1, : 4 * size].unflatten(-1, (4, size)),
        flat[:-1].view(4, size),
        flat[1:].view(4, size),
        flat[size : 2 * size],
        flat[size : 2 * size].expand(6, size),
    ):
        tensor, period, outer, inner = module._Rows.of(view)
        assert period >= 1
        if size % 16:
            assert (inner, outer) == (size, 0)
        else:
            assert inner % 16 == outer % 16 == tensor.data_ptr() % 16 == 0


def test_offsets_beyond_int32_are_computed_as_such(interpreter):
    """Two rows that lie further apart than 2**31 elements. Nobody touches the memory in between."""
    x = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 16), (2**31 + 32, 1))
    x.copy_(torch.randn(2, 16))
    rows = module._Rows.of(x)
    assert rows.inner > 2**31
    torch.testing.assert_close(kernel(x, torch.ones(16).half(), EPS), reference(x, torch.ones(16).half(), EPS))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_argument_costs_nothing(frozen, block, interpreter, monkeypatch):
    made = []
    backward = module._backward
    monkeypatch.setattr(module, "_backward", lambda *arguments: made.extend(backward(*arguments)) or made)
    x, weight = leaf(9, 40), leaf(40)
    {"x": x, "weight": weight}[frozen].requires_grad_(False)
    assert_as_the_reference(x, weight)
    assert [tensor.numel() for tensor in made] == ([0, 40] if frozen == "x" else [360, 0])


def test_nothing_is_read_that_nobody_wrote(block, interpreter):
    with poisoned_memory():
        for shape in ((7, 33), (1, 64), (40, 5)):
            assert_as_the_reference(leaf(*shape), leaf(shape[-1]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic, interpreter):
    torch._dynamo.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 6):
        x, weight = leaf(2, rows, 16, dtype=torch.float16), leaf(16)
        for got, expected in zip(results(compiled, x, weight), results(reference, x, weight), strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


def test_tiles_depend_on_the_length_of_a_row_alone():
    for size in (1, 64, 128, 2048, 4096, 5000, 8192, 65536, 10**6):
        rows, columns, warps = module._Blocks.of(size, module._BACKWARD)
        assert rows * columns >= 2048
        assert columns >= min(size, 8192)
        assert 4 <= warps <= 32


@pytest.mark.parametrize("size", [1, 128, 4096, 8192, 16384])
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_compiles_for_rows_of_every_length(size, target, offline, monkeypatch):
    """A program has at most 1,024 threads on either, which the compiler does not look at."""
    monkeypatch.setattr(module, "_THREADS", target[2])
    made = offline(*target)
    results(kernel, leaf(2, size, dtype=torch.bfloat16), leaf(size, dtype=torch.bfloat16))
    expected = ["forward", "gradients", "total"]
    if size > 8192:
        expected[1:2] = ["gradient_of_long_rows", "weight_gradient_of_long_rows"]
    assert [name for name, _ in made] == expected
    assert max(kernel.metadata.num_warps * target[2] for _, kernel in made) <= 1024


def test_refusals():
    with pytest.raises(ValueError, match=r"a weight of \[H\] for rows of H, at least one, got \[4\] for x of \[3, 8\]"):
        kernel(torch.randn(3, 8), torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"got \[1, 8\]"):
        kernel(torch.randn(3, 8), torch.ones(1, 8), EPS)
    for x in (torch.randn(3, 0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="at least one"):
            kernel(x, torch.ones(x.shape[-1:]), EPS)
    with pytest.raises(KernelUnavailable, match=r"computes in float32, got a weight of torch.float64: choose eager"):
        kernel(torch.randn(3, 8), torch.ones(8).double(), EPS)
    with pytest.raises(ValueError, match="x is on cpu, the weight on meta"):
        kernel(torch.randn(3, 8), torch.ones(8, device="meta"), EPS)
