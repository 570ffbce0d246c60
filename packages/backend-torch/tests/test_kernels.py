"""What holds for every kernel of the backend: its contract, and each claim that its spec makes."""

import subprocess
import sys

import opslot
import pytest
import torch
from opslot.testing import KernelSuite
from opslot_backends.torch import BACKEND, cross_entropy_loss
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

SPECS = BACKEND.kernels


@pytest.fixture(autouse=True)
def _chunks_of_everything(monkeypatch):
    """chunk_loss leaves the tiny problems of these tests to plain operations: make it do them itself."""
    monkeypatch.setattr(cross_entropy_loss, "_LOGITS_ON_CPU", 0)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.slow
class TestConformance(KernelSuite):
    backend = "torch"
    devices = ("cpu", CUDA)
    dtypes = ("float32", "bfloat16")


def kernel_of(spec):
    return opslot.registry().resolve(spec.op, spec.variant, spec.name)


def samples_of(spec, device, dtype=torch.float32, seed=0):
    contract = opslot.registry().contract(spec.op, spec.variant)
    return {sample.name: sample for sample in contract.samples(device, dtype, seed)}


def leaves_of(sample):
    arguments = [item for value in sample.args for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in arguments if isinstance(item, torch.Tensor) and item.requires_grad]


def run(function, sample):
    """Outputs and gradients."""
    leaves = []

    def fresh(value):
        if isinstance(value, tuple):
            return tuple(fresh(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.detach().requires_grad_(value.requires_grad)
        leaves.extend([tensor] if value.requires_grad else [])
        return tensor

    result = function(*fresh(sample.args), **{key: fresh(value) for key, value in sample.kwargs.items()})
    outputs = [output for output in (result if isinstance(result, tuple) else (result,)) if output is not None]
    if not leaves:
        return outputs
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, incoming)]


def run_forward(function, sample):
    result = function(*sample.args, **sample.kwargs)
    return result if isinstance(result, tuple) else (result,)


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def with_tokens(op, tokens):
    """Arguments that differ from call to call in the number of tokens alone, as the steps of a training run do."""
    torch.manual_seed(tokens)
    if op == "rms_norm":
        arguments = leaf(2, tokens, 8), leaf(8), 1e-6
    elif op == "rotary_pos_emb":
        tables = torch.randn(1, tokens, 8), torch.randn(1, tokens, 8)
        arguments = leaf(2, 4, tokens, 8), leaf(2, 2, tokens, 8), *tables
    elif op == "glu":
        arguments = leaf(2, tokens, 8), leaf(2, tokens, 8)
    elif op == "moe_experts":
        index = torch.rand(tokens, 4).argsort(-1)[:, :2]
        arguments = leaf(tokens, 8), index, leaf(tokens, 2), leaf(4, 24, 8), leaf(4, 8, 12)
    elif op == "cross_entropy_loss":
        arguments = leaf(2, tokens, 8), leaf(11, 8), torch.randint(11, (2, tokens))
        return opslot.Sample("", arguments, {"num_items_in_batch": tokens})
    else:
        arguments = (leaf(2 * tokens, 4), leaf(2 * tokens, 4)), 4, 2, torch.ones(2, tokens)
    return opslot.Sample("", arguments)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_more_compilation_serves_every_number_of_tokens(spec):
    kernel = kernel_of(spec)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernel, fullgraph=True, backend=counter)
    for tokens in (20, 21, 30, 31, 64):
        sample = with_tokens(spec.op, tokens)
        for mine, plain in zip(run(compiled, sample), run(kernel, sample), strict=True):
            torch.testing.assert_close(mine, plain)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiled_by_inductor_gives_the_same(spec):
    kernel = kernel_of(spec)
    sample = next(iter(samples_of(spec, "cpu").values()))
    torch._dynamo.reset()
    for mine, plain in zip(run(torch.compile(kernel, fullgraph=True), sample), run(kernel, sample), strict=True):
        torch.testing.assert_close(mine, plain)


# Reentrant checkpointing differentiates tensors that are arguments of their own, and load_balancing_loss takes a tuple.
@pytest.mark.parametrize(
    ("spec", "use_reentrant"),
    [(s, r) for s in SPECS for r in (False, True) if not (r and s.op == "load_balancing_loss")],
    ids=str,
)
def test_under_activation_checkpointing(spec, use_reentrant):
    kernel, sample = kernel_of(spec), with_tokens(spec.op, 9)

    def gradients(call):
        leaves = leaves_of(sample)
        for tensor in leaves:
            tensor.grad = None
        outputs = call(*sample.args)
        sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        return [tensor.grad for tensor in leaves]

    plain = gradients(kernel)
    again = gradients(lambda *arguments: checkpoint(kernel, *arguments, use_reentrant=use_reentrant))
    for mine, other in zip(again, plain, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_refuses_a_second_derivative(spec):
    """Silently leaving a kernel's share out of one is what torch's once_differentiable allows below a loss."""
    sample = next(iter(samples_of(spec, "cpu").values()))
    outputs = run_forward(kernel_of(spec), sample)
    leaves = [
        t for a in sample.args for t in (a if isinstance(a, tuple) else (a,)) if getattr(t, "requires_grad", False)
    ]
    with pytest.raises(RuntimeError, match=rf"opslot_backends.torch.{spec.op} has no second derivative"):
        torch.autograd.grad(sum(output.sum() for output in outputs), leaves, create_graph=True)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_backward_inside_autocast_keeps_the_dtypes_of_forward(spec):
    sample = next(iter(samples_of(spec, "cpu").values()))
    leaves = leaves_of(sample)
    total = sum(output.sum() for output in run_forward(kernel_of(spec), sample))
    outside = torch.autograd.grad(total, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(total, leaves)
    for mine, other in zip(inside, outside, strict=True):
        assert torch.equal(mine, other)


def test_importing_the_backend_loads_no_torch():
    code = "import sys, opslot_backends.torch; assert 'torch' not in sys.modules; print(len(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_is_found_by_name(spec):
    assert spec.name in opslot.registry().list_available(spec.op, spec.variant, opslot.Device("cpu"))
    assert kernel_of(spec).__module__ == f"opslot_backends.torch.{spec.op}"
    assert spec.summary


def test_auto_takes_every_kernel_but_the_one_that_trades_time_for_memory():
    cpu = opslot.Device("cpu")
    known = opslot.registry()
    chosen = {spec.op for spec in SPECS if known.choose(spec.op, spec.variant, "auto", cpu).offer is not None}
    assert {spec.op for spec in SPECS} - chosen == {"glu"}
