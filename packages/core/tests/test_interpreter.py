"""Triton kernels on the CPU: right ones pass, planted mistakes are named, and afterwards nothing has changed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from opslot.testing import check, poisoned_memory, triton_interpreter

triton = pytest.importorskip("triton", reason="there is no triton for this platform")
pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy, which the core does not need")

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.libdevice import tanh  # noqa: E402


@pytest.fixture
def interpreter():
    with triton_interpreter():
        yield


@triton.jit
def rms_norm_forward(x, weight, out, rstd, rows, hidden, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < hidden)
    at = row[:, None] * hidden + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = libdevice.rsqrt(tl.sum(values * values, axis=1) / hidden + eps.to(tl.float32))
    tl.store(rstd + row, scale, mask=row < rows)
    normed = (values * scale[:, None]).to(x.dtype.element_ty)
    tl.store(out + at, normed * tl.load(weight + column, mask=column < hidden, other=0.0)[None, :], mask=inside)


@triton.jit
def rms_norm_backward(
    x, weight, grad, rstd, grad_x, grad_weight, rows, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    multiplier = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.cdiv(rows, ROWS)):
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < hidden)
        at = row[:, None] * hidden + column[None, :]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(incoming * normed.to(x.dtype.element_ty).to(tl.float32), axis=0)
        weighted = incoming * multiplier[None, :]
        mean = tl.sum(weighted * normed, axis=1)[:, None] / hidden
        tl.store(grad_x + at, scale * (weighted - normed * mean), mask=inside)
    tl.store(grad_weight + column, of_weight, mask=column < hidden)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
        out = torch.empty_like(rows, dtype=torch.promote_types(x.dtype, weight.dtype))
        rstd = torch.empty(len(rows))
        sizes = {"ROWS": 128, "BLOCK": triton.next_power_of_2(rows.shape[1])}
        rms_norm_forward[(triton.cdiv(len(rows), 128),)](rows, weight, out, rstd, *rows.shape, eps, **sizes)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.sizes = sizes
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, rstd = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(rows), torch.empty_like(weight)
        given = grad.reshape(rows.shape).contiguous()
        rms_norm_backward[(1,)](rows, weight, given, rstd, of_x, of_weight, *rows.shape, **ctx.sizes)
        return of_x.view(grad.shape), of_weight, None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_norm_forward_and_backward_keeps_its_contract(interpreter, dtype):
    with poisoned_memory():
        check("rms_norm", "standard", lambda x, weight, eps: RMSNorm.apply(x, weight, eps), dtype=dtype)


@triton.jit
def shifted(values, shift):
    return tl.exp(values - shift)


@triton.jit
def softmax_rows(x, out, columns, stride, BLOCK: tl.constexpr, KEEP_OUTSIDE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = (at < columns) | KEEP_OUTSIDE
    values = tl.load(x + row * stride + at, mask=inside, other=-float("inf"))
    values = shifted(values, tl.max(values, axis=0))
    tl.store(out + row * columns + at, values / tl.sum(values, axis=0), mask=at < columns)


def softmax(x, keep_outside=False):
    out = torch.empty(x.shape, dtype=x.dtype)
    block = triton.next_power_of_2(x.shape[1])
    softmax_rows[(len(x),)](x, out, x.shape[1], x.stride(0), BLOCK=block, KEEP_OUTSIDE=keep_outside)
    return out


@pytest.mark.parametrize("columns", [1, 3, 8, 1025])
def test_a_masked_softmax_with_a_function_of_its_own(interpreter, columns):
    x = torch.randn(5, 2 * columns, generator=torch.Generator().manual_seed(0))[:, :columns]
    # One rounding each for the exponential, the sum and the division, of values up to 1.
    torch.testing.assert_close(softmax(x), x.softmax(-1), rtol=1e-6, atol=1e-6)


@triton.jit
def matmul_tiles(a, b, out, M, N, K, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, K, TILE):
        inner = start + tl.arange(0, TILE)
        left = tl.load(a + rows[:, None] * K + inner[None, :], mask=(rows[:, None] < M) & (inner[None, :] < K), other=0)
        right = tl.load(
            b + inner[:, None] * N + columns[None, :], mask=(inner[:, None] < K) & (columns[None, :] < N), other=0
        )
        total = tl.dot(left, right, total)
    at = out + rows[:, None] * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matmul(interpreter, dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(33, 70, generator=generator, dtype=torch.float64).to(dtype)
    b = torch.randn(70, 17, generator=generator, dtype=torch.float64).to(dtype)
    out = torch.empty(33, 17, dtype=dtype)
    matmul_tiles[(triton.cdiv(33, 16), triton.cdiv(17, 16))](a, b, out, 33, 17, 70, TILE=16)
    exact = a.double() @ b.double()
    # 70 products of up to 10 are added in float32; the result is rounded once.
    limit = 70 * 10 * torch.finfo(torch.float32).eps + float(exact.abs().max()) * torch.finfo(dtype).eps / 2
    assert float((out.double() - exact).abs().max()) <= limit


def never(*args, **kwargs):
    raise AssertionError("nothing is to be timed")


@triton.autotune(
    configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})],
    key=["size"],
    prune_configs_by={"early_config_prune": lambda configs, named, **_: [c for c in configs if c.kwargs["BLOCK"] > 4]},
    reset_to_zero=["seen"],
    do_bench=never,
)
@triton.heuristics({"EVEN": lambda arguments: arguments["size"] % arguments["BLOCK"] == 0})
@triton.jit
def tuned(x, seen, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, at.to(tl.float32), mask=at < size)
    tl.atomic_add(seen, 1)
    if EVEN:
        tl.atomic_add(seen + 1, BLOCK)


def test_an_autotuned_kernel_runs_its_first_configuration_once_and_remembers_nothing(interpreter):
    x, seen = torch.empty(32), torch.ones(2, dtype=torch.int32)
    tuned.cache[(32, "torch.float32", "torch.int32")] = triton.Config({"BLOCK": 4})
    try:
        tuned[lambda meta: (triton.cdiv(32, meta["BLOCK"]),)](x, seen, 32)
        assert x.tolist() == list(range(32))
        assert seen.tolist() == [2, 32]
        assert [config.kwargs["BLOCK"] for config in tuned.cache.values()] == [4]
    finally:
        tuned.cache.clear()


@triton.jit
def activations(x, out, power, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(out + at, tanh(values))
    tl.store(out + BLOCK + at, libdevice.erf(values))
    tl.store(out + 2 * BLOCK + at, libdevice.pow(tl.abs(values), power))
    tl.store(out + 3 * BLOCK + at, libdevice.round(values))
    tl.store(out + 4 * BLOCK + at, libdevice.isnan(values))
    tl.store(out + 5 * BLOCK + at, tl.extra.cuda.libdevice.log1p(tl.abs(values)))


def test_functions_of_libdevice_by_every_name(interpreter):
    x, out = torch.tensor([-2.5, -0.49999997, 0.5, float("nan")]), torch.empty(6, 4)
    activations[(1,)](x, out, 1.5, BLOCK=4)
    rounded = torch.tensor([-3.0, 0.0, 1.0, float("nan")])
    expected = [x.tanh(), torch.erf(x), x.abs() ** 1.5, rounded, x.isnan().float(), torch.log1p(x.abs())]
    torch.testing.assert_close(out, torch.stack(expected), rtol=3e-7, atol=0, equal_nan=True)


@triton.jit
def no_counterpart(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), libdevice.erfcinv(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def counter(out, count, flag, wide, ratio, STEPS: tl.constexpr):
    for step in range(count):
        tl.store(out + step, step.to(tl.float32) * ratio.to(tl.float32))
    for step in tl.static_range(STEPS):
        tl.store(out + count + step, [10, 20, 30][step])
    if flag:
        tl.store(out + count + STEPS, wide // 1000000000)


def test_counters_and_scalars_are_what_a_compiled_kernel_has(interpreter):
    out = torch.zeros(7)
    counter[(1,)](out, 3, True, 5000000000, 0.1, STEPS=3)
    # 2 * 0.1 in float32, not in the float64 of a Python float.
    assert out.tolist() == [0, *(torch.tensor([1.0, 2.0]) * torch.tensor(0.1)).tolist(), 10, 20, 30, 5]


@triton.jit
def copy(x, out, size, stride, BLOCK: tl.constexpr, TO: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at * stride, mask=at < size)
    tl.store(out + at, values.to(TO), mask=at < size)


def test_a_read_past_the_end_is_found(interpreter):
    with pytest.raises(
        AssertionError, match=r"softmax_rows reads 1 of 4 elements outside .* 0 bytes behind that of x "
    ):
        softmax(torch.ones(1, 3), keep_outside=True)


@pytest.mark.parametrize(
    ("size", "stride", "place", "problem"),
    [
        (6, 1, "out", r"copy writes 1 of 6 elements .* 0 bytes behind that of out \(program \(0, 0, 0\)\)"),
        (5, -1, "x", r"copy reads 4 of 5 elements .* 4 bytes before that of x"),
        (5, 2, "x", r"copy reads 2 of 5 elements .* 4 bytes behind that of x"),
    ],
)
def test_memory_of_others_is_found(interpreter, size, stride, place, problem):
    x, out = torch.ones(6), torch.empty(5)
    with pytest.raises(AssertionError, match=problem):
        copy[(1,)](x[: 5 + (place == "out")].clone() if stride > 1 else x, out, size, stride, BLOCK=8, TO=tl.float32)


@triton.jit
def first_rows(x, out, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * BLOCK + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < BLOCK) & (row < rows)
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)


def test_a_scalar_condition_masks_a_whole_block(interpreter):
    x, out = torch.randn(2, 4), torch.empty(2, 4)
    first_rows[(5,)](x, out, 2, BLOCK=4)
    assert torch.equal(out, x)
    with pytest.raises(AssertionError, match=r"first_rows reads 4 of 4 elements outside .* \(program \(2, 0, 0\)\)"):
        first_rows[(5,)](x, out, 3, BLOCK=4)


def test_memory_that_nobody_wrote_is_seen(interpreter):
    x = torch.ones(4)
    with poisoned_memory():
        out = torch.empty(8)
        copy[(1,)](x, out, 4, 1, BLOCK=8, TO=tl.float32)
    assert out[:4].tolist() == [1] * 4
    assert out[4:].isnan().all()


def test_an_index_beyond_32_bits_is_found_without_the_memory(interpreter):
    x, out = torch.ones(6), torch.empty(5)
    with pytest.raises(AssertionError, match="int32 overflow detected for operation mul"):
        copy[(1,)](x, out, 5, 2**30, BLOCK=8, TO=tl.float32)


def test_bfloat16_is_refused_wherever_it_appears(interpreter):
    with pytest.raises(ValueError, match=r"copy: x is of bfloat16, and .* Test in float32 or float16"):
        copy[(1,)](torch.ones(4, dtype=torch.bfloat16), torch.ones(4), 4, 1, BLOCK=4, TO=tl.float32)
    with pytest.raises(ValueError, match="the kernel converts to bfloat16"):
        copy[(1,)](torch.ones(4), torch.ones(4), 4, 1, BLOCK=4, TO=tl.bfloat16)


def test_what_libdevice_cannot_do_is_refused(interpreter):
    with pytest.raises(NotImplementedError, match=r"libdevice.erfcinv has no counterpart .* has abs, acos"):
        no_counterpart[(1,)](torch.ones(4), BLOCK=4)
    with pytest.raises(TypeError, match=r"libdevice.tanh is for fp32 and fp64, got fp16"):
        activations[(1,)](torch.ones(4, dtype=torch.float16), torch.ones(24), 1.5, BLOCK=4)


def test_a_kernel_of_a_module_that_is_imported_inside_is_a_compiled_one_outside(tmp_path):
    file = tmp_path / "late_kernels.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fill(x, BLOCK: tl.constexpr):\n"
        "    tl.store(x + tl.arange(0, BLOCK), 7.0)\n"
    )
    spec = importlib.util.spec_from_file_location("late_kernels", file)
    module = importlib.util.module_from_spec(spec)
    with triton_interpreter():
        spec.loader.exec_module(module)
        before = set(vars(module))
        x = torch.empty(4)
        module.fill[(1,)](x, BLOCK=4)
        assert x.tolist() == [7] * 4
    assert isinstance(module.fill, triton.JITFunction)
    assert set(vars(module)) == before, "its module has no names that the interpreter put there"


def state():
    """All attributes that the interpreter or opslot touches, and more."""
    from triton.runtime import autotuner, interpreter, jit

    owners = [interpreter, jit.JITFunction, jit.KernelInterface, autotuner.Autotuner, tl, tl.core, tl.math, tl.tensor]
    owners += [tl.dtype, tl.core.tensor_descriptor_base, libdevice, tl.extra.cuda.libdevice, tl.standard]
    owners += [value for value in vars(interpreter).values() if isinstance(value, type)]
    owners += [interpreter.interpreter_builder, sys.modules[__name__]]
    return [(owner, dict(vars(owner))) for owner in owners]


def several_and_then_a_wrong_one():
    softmax(torch.ones(2, 3))
    activations[(1,)](torch.ones(4), torch.empty(6, 4), 1.5, BLOCK=4)
    softmax(torch.ones(1, 3), keep_outside=True)


def test_everything_is_as_it_was_also_after_an_error():
    before, environment = state(), dict(os.environ)
    rewritten = dict(triton.runtime.interpreter.InterpretedFunction.rewritten_fn)
    with pytest.raises(AssertionError, match="outside"), triton_interpreter(), triton_interpreter():
        several_and_then_a_wrong_one()
    for (owner, then), (_, now) in zip(before, state(), strict=True):
        changed = {name for name in then.keys() | now.keys() if then.get(name) is not now.get(name)}
        # Which program ran last is the interpreter's own note.
        assert changed <= {"grid_idx", "grid_dim"}, owner
    assert environment == dict(os.environ)
    assert triton.runtime.interpreter.InterpretedFunction.rewritten_fn == rewritten
    with pytest.raises((RuntimeError, ValueError), match=r"active drivers|cannot be accessed from Triton"):
        softmax(torch.ones(2, 3))


def test_the_compiler_that_is_first_used_afterwards_is_whole():
    code = (
        "from opslot.testing import triton_interpreter\n"
        "with triton_interpreter():\n"
        "    from triton.compiler.code_generator import CodeGenerator\n"
        "import triton.language as tl\n"
        "assert CodeGenerator.builtin_namespace['min'] is tl.core.builtin_min"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_function_is_still_no_kernel(interpreter):
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        shifted(torch.ones(2), 1)


def test_without_triton_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    monkeypatch.delattr(triton.runtime, "interpreter", raising=False)
    with (
        pytest.raises(ImportError, match=r"needs triton and numpy, .* skip: pytest.importorskip"),
        triton_interpreter(),
    ):
        pass


def test_gradients_of_a_whole_chain(interpreter):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.linspace(0.5, 1.5, 5, requires_grad=True)
    got = torch.autograd.grad(RMSNorm.apply(F.silu(x), weight, 1e-6).square().sum(), (x, weight))
    expected = torch.autograd.grad(F.rms_norm(F.silu(x), (5,), weight, 1e-6).square().sum(), (x, weight))
    # Eight operations in float32 on values of a few units.
    torch.testing.assert_close(got, expected, rtol=8e-6, atol=8e-6)
