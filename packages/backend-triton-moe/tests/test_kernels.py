"""What holds for every kernel of the backend: its contract, and each claim that its spec makes."""

import importlib
import os
import subprocess
import sys

import opslot
import pytest
import torch
from opslot import Device
from opslot.testing import KernelSuite, check
from opslot_backends.triton_moe import BACKEND
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("triton", reason="there is no triton for this platform")

SPECS = BACKEND.kernels
# The interpreter is too slow for the experts here; they have a file of their own.
INTERPRETED = [spec for spec in SPECS if spec.op != "moe_experts"]


@pytest.mark.gpu
class TestConformance(KernelSuite):
    backend = "triton_moe"
    devices = ("cuda",)


def function_of(spec):
    module, _, name = spec.target.partition(":")
    return getattr(importlib.import_module(module), name)


def small_samples(spec, most, count=None):
    """The names of the samples that the interpreter does in a moment, each of which the kernel takes."""
    samples = opslot.registry().contract(spec.op, spec.variant).samples("cpu", torch.float32, 0)
    fitting = [s.name for s in samples if s.name != "learnt tables" and max(map(torch.numel, tensors(s.args))) <= most]
    assert len(fitting) >= (count or 5), fitting
    return fitting[:count]


def tensors(arguments):
    flat = [item for argument in arguments for item in (argument if isinstance(argument, tuple) else (argument,))]
    return [item for item in flat if isinstance(item, torch.Tensor)] or [torch.empty(0)]


def sample_of(spec, device="cpu", dtype=torch.float32):
    """The first that is small."""
    name = small_samples(spec, 1200, 1)[0]
    samples = opslot.registry().contract(spec.op, spec.variant).samples(device, dtype, 0)
    return next(sample for sample in samples if sample.name == name)


def results(function, sample):
    out = function(*sample.args, **sample.kwargs)
    outputs = out if isinstance(out, tuple) else (out,)
    leaves = [tensor for tensor in tensors(sample.args) if tensor.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, [o.detach().cos() for o in outputs])]


def assert_as_the_reference(spec, function, sample):
    reference = opslot.registry().contract(spec.op, spec.variant).load_reference()
    for got, expected in zip(results(function, sample), results(reference, sample), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_values_and_gradients_in_the_interpreter(spec, dtype, interpreter):
    samples = small_samples(spec, 10**5)
    check(spec.op, spec.variant, function_of(spec), checks=("gradients", "frozen"), samples=samples, dtype=dtype)


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_a_few_samples_in_half_precision_and_through_operators(spec, interpreter):
    function, few = function_of(spec), small_samples(spec, 1200, 3)
    check(spec.op, spec.variant, function, checks=("gradients", "arguments"), samples=few, dtype="float16")
    check(spec.op, spec.variant, function, checks=("custom_ops",), samples=few[:1])


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_nothing_beside_the_results(spec, interpreter):
    function, few = function_of(spec), small_samples(spec, 1200, 2)
    checks = ("arguments", "twice", "double_backward", "memory", "no_grad", "autocast")
    check(spec.op, spec.variant, function, checks=checks, samples=few)
    check(spec.op, spec.variant, function, checks=("state",), samples=few[:1])


@pytest.mark.slow
@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_layouts_in_the_interpreter(spec, interpreter):
    check(spec.op, spec.variant, function_of(spec), checks=("layouts",), samples=small_samples(spec, 1200, 3))


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_selective_checkpoints_that_keep_everything(spec, interpreter):
    """Such a checkpoint keeps what each operator returned: memory that a kernel then wrote into among it."""

    def keep_everything():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    def checkpointed(*arguments, **keywords):
        function = function_of(spec)
        return checkpoint(function, *arguments, use_reentrant=False, context_fn=keep_everything, **keywords)

    assert_as_the_reference(spec, checkpointed, sample_of(spec))


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_compiled_in_one_graph(spec, interpreter):
    torch._dynamo.reset()
    compiled = torch.compile(function_of(spec), fullgraph=True, backend="aot_eager")
    assert_as_the_reference(spec, compiled, sample_of(spec))


@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_shapes_without_data(spec):
    """On the meta device nothing runs: shapes and dtypes are those of the reference."""
    contract = opslot.registry().contract(spec.op, spec.variant)
    for sample in contract.samples("meta", torch.float16, 0):
        if sample.name in ("learnt tables", "no logits"):
            continue
        outs = [f(*sample.args, **sample.kwargs) for f in (function_of(spec), contract.load_reference())]
        for got, expected in zip(*(o if isinstance(o, tuple) else (o,) for o in outs), strict=True):
            assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device), sample.name


@pytest.mark.parametrize(
    "target",
    [
        ("cuda", 90, 32),
        pytest.param(("cuda", 80, 32), marks=pytest.mark.slow),
        pytest.param(("hip", "gfx942", 64), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", INTERPRETED, ids=str)
def test_compiles_without_a_device(spec, target, offline):
    made = offline(*target)
    results(function_of(spec), sample_of(spec, dtype=torch.bfloat16))
    binaries = [kernel.asm["cubin" if target[0] == "cuda" else "hsaco"] for _, kernel in made]
    assert len(binaries) >= 2
    assert all(binaries)


def test_the_backend_is_data():
    code = (
        "import sys, opslot_backends.triton_moe as b\n"
        "loaded = [m for m in ('torch', 'triton', 'numpy') if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rocm_by_spec_and_nothing_else():
    for spec in SPECS:
        assert spec.unmet(Device("rocm", "gfx942")) == ()
        assert spec.unmet(Device("cuda", "sm_80")) == ()
        assert "needs a cuda or rocm device" in spec.unmet(Device("npu", "Ascend910B3"))[0]
        assert spec.unmet(Device("cuda", "sm_75"))


def test_denied_it_is_not_called_missing():
    """Its kernels have another name than the backend, by which OPSLOT_BACKENDS denies it."""
    code = "import opslot; opslot.registry().offer('moe_experts', 'standard', 'triton')"
    environment = {**os.environ, "OPSLOT_BACKENDS": "-triton_moe"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "backend 'triton_moe' of opslot-backend-triton-moe" in done.stderr
    assert "denied by OPSLOT_BACKENDS='-triton_moe'" in done.stderr
    assert "not installed" not in done.stderr
