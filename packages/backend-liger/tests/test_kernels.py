"""What holds for every kernel of the backend: its contract, and each claim that its spec makes."""

import importlib
import subprocess
import sys

import opslot
import pytest
import torch
from opslot import Device
from opslot.testing import KernelSuite, check
from opslot_backends.liger import BACKEND
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: it needs triton, which is not everywhere")

SPECS = BACKEND.kernels
# Liger's experts are too slow for the interpreter, and overflow int32 on purpose, which it reports.
INTERPRETED = [spec for spec in SPECS if spec.op != "moe_experts"]


@pytest.mark.gpu
class TestConformance(KernelSuite):
    backend = "liger"
    devices = ("cuda",)


def function_of(spec):
    module, _, name = spec.target.partition(":")
    return getattr(importlib.import_module(module), name)


def small_samples(spec, most):
    """The names of the samples that the interpreter does in a moment: it runs a program for each row or token."""
    contract = opslot.registry().contract(spec.op, spec.variant)
    return [
        sample.name
        for sample in contract.samples("cpu", torch.float32, 0)
        if sample.args[0].numel() // max(1, sample.args[0].shape[-1]) <= most
    ]


@pytest.mark.slow
@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_values_and_gradients_in_the_interpreter(spec, interpreter):
    samples = small_samples(spec, 40 if spec.op != "rotary_pos_emb" else 80)
    assert len(samples) >= 8
    check(spec.op, spec.variant, function_of(spec), checks=("gradients", "frozen"), samples=samples)


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_a_few_samples_in_half_precision_compiled_and_without_side_effects(spec, interpreter):
    function, few = function_of(spec), small_samples(spec, 20)[:3]
    check(spec.op, spec.variant, function, checks=("gradients", "arguments"), samples=few, dtype="float16")
    check(spec.op, spec.variant, function, checks=("arguments", "twice", "double_backward", "state"), samples=few)
    check(spec.op, spec.variant, function, checks=("custom_ops",), samples=few[:1])


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_selective_checkpoints_that_keep_everything(spec, interpreter):
    """Such a checkpoint keeps what each operator returned: memory that a kernel then wrote into among it."""
    contract = opslot.registry().contract(spec.op, spec.variant)
    name = small_samples(spec, 20)[0]
    sample = next(s for s in contract.samples("cpu", torch.float32, 0) if s.name == name)
    leaves = [a for a in sample.args if isinstance(a, torch.Tensor) and a.requires_grad]

    def keep_everything():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    results = []
    for function in (contract.load_reference(), function_of(spec)):
        out = checkpoint(function, *sample.args, use_reentrant=False, context_fn=keep_everything, **sample.kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, [o.detach().cos() for o in outputs])])
    for got, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_compiled_in_one_graph(spec, interpreter):
    contract = opslot.registry().contract(spec.op, spec.variant)
    name = small_samples(spec, 20)[0]
    sample = next(s for s in contract.samples("cpu", torch.float32, 0) if s.name == name)
    torch._dynamo.reset()
    compiled = torch.compile(function_of(spec), fullgraph=True, backend="aot_eager")
    leaves = [a for a in sample.args if isinstance(a, torch.Tensor) and a.requires_grad]
    results = []
    for function in (contract.load_reference(), compiled):
        out = function(*sample.args, **sample.kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        incoming = [o.detach().cos() for o in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, incoming)])
    for got, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("cosines", "sines"), [("half", "half"), ("float", "half"), ("half", "float")])
@pytest.mark.parametrize("keys", ["float", "half"])
def test_tables_in_a_narrower_dtype_round_neither_q_nor_k(cosines, sines, keys, interpreter):
    contract = opslot.registry().contract("rotary_pos_emb", "full")
    angle = torch.randn(1, 5, 4).repeat(1, 1, 2)
    cos, sin = getattr(angle.cos(), cosines)(), getattr(angle.sin(), sines)()
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), getattr(torch.randn(1, 1, 5, 8), keys)().requires_grad_()
    kernel = importlib.import_module("opslot_backends.liger.rotary_pos_emb").rotary_pos_emb
    results = []
    for function in (kernel, contract.load_reference()):
        outs = function(q, k, cos, sin)
        results.append([*outs, *torch.autograd.grad(outs, (q, k), [out.detach().cos() for out in outs])])
    for x, got, expected in zip((q, k) * 2, *results, strict=True):
        exact = x.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-5 if exact else 4e-3, atol=1e-6 if exact else 4e-3)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shapes_without_data(spec):
    """On the meta device nothing runs: shapes and dtypes are those of the reference."""
    contract = opslot.registry().contract(spec.op, spec.variant)
    if spec.op == "moe_experts":
        pytest.skip("liger's experts ask how many tokens each expert has")
    samples = [s for s in contract.samples("meta", torch.float32, 0) if s.name != "tables of any numbers"]
    for sample in samples[:6]:
        outs = [f(*sample.args, **sample.kwargs) for f in (function_of(spec), contract.load_reference())]
        for got, expected in zip(*(o if isinstance(o, tuple) else (o,) for o in outs), strict=True):
            assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device), sample.name


def test_the_backend_is_data():
    code = (
        "import sys, opslot_backends.liger as b\n"
        "loaded = [m for m in ('torch', 'triton', 'liger_kernel', 'numpy') if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_loading_and_running_them_logs_nothing():
    """Liger logs an error for each implementation that cannot be imported, when its own dispatch looks for one."""
    code = (
        "import logging, opslot, torch\n"
        "from opslot.testing import triton_interpreter\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "known = opslot.registry()\n"
        "from opslot_backends.liger import BACKEND\n"
        "for spec in BACKEND.kernels: known.load(known.offer(spec.op, spec.variant, 'liger'))\n"
        "from opslot_backends.liger import cross_entropy_loss, rms_norm\n"
        "with triton_interpreter():\n"
        "    rms_norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)\n"
        "    cross_entropy_loss.token_cls(torch.ones(2, 8), torch.ones(5, 8), torch.tensor([0, 1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_rocm_by_spec_and_nothing_else():
    for spec in SPECS:
        assert spec.unmet(Device("rocm", "gfx942")) == ()
        assert spec.unmet(Device("cuda", "sm_90")) == ()
        assert "needs a cuda or rocm device" in spec.unmet(Device("npu", "Ascend910B3"))[0]


def test_what_veomni_calls_it_is_the_same_kernel():
    known = opslot.registry()
    for spec in SPECS:
        assert known.offer(spec.op, spec.variant, "liger_kernel").spec == spec
