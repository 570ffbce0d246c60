"""opslot.testing must be able to fail: a planted mistake of every kind is found, and named."""

import opslot
import opslot.testing
import pytest
import torch
import torch.nn.functional as F
from opslot import Backend, KernelSpec, OpContract, Registry, Sample, TargetError, Tolerance, UnknownKernel
from opslot.ops.cross_entropy_loss import cross_entropy_loss
from opslot.ops.glu import glu
from opslot.ops.moe_experts import moe_experts
from opslot.ops.rms_norm import rms_norm
from opslot.testing import check, poisoned_memory
from opslot.testing._accuracy import Comparison, _Errors


def swiglu_with(backward, forward=lambda gate, up: F.silu(gate) * up):
    """A SwiGLU kernel with the given backward, a function of (gate, up, incoming gradient)."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return forward(gate, up)

        @staticmethod
        def backward(ctx, grad):
            return backward(*ctx.saved_tensors, grad)

    return lambda gate, up: Planted.apply(gate, up)


def right(gate, up, grad):
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def test_the_harness_for_the_plants_below_is_right():
    check("glu", "swiglu", swiglu_with(right))
    check("glu", "swiglu", swiglu_with(right), dtype="bfloat16", seed=3)


def zero_centred(x, weight, eps):
    return rms_norm(x, 1 + weight, eps)


def in_bfloat16(x, weight, eps):
    return rms_norm(x.bfloat16(), weight.bfloat16(), eps).to(x.dtype)


def in_float32(x, weight, eps):
    return rms_norm(x.float(), weight.float(), eps)


def of_the_wrong_shape(x, weight, eps):
    return rms_norm(x, weight, eps).flatten()


def two_outputs(x, weight, eps):
    return rms_norm(x, weight, eps), x.square().mean(-1)


def detached(x, weight, eps):
    return rms_norm(x, weight.detach(), eps)


def always_recording(x, weight, eps):
    with torch.inference_mode(False), torch.enable_grad():
        return rms_norm(x.clone(), weight.clone().requires_grad_(), eps)


@pytest.mark.parametrize(
    ("kernel", "dtype", "problem"),
    [
        (zero_centred, "float32", "output 0 is wrong"),
        (in_bfloat16, "float32", "output 0 is wrong"),
        (in_float32, "bfloat16", "output 0 has dtype torch.float32, the reference gives torch.bfloat16"),
        (of_the_wrong_shape, "float32", "output 0 has shape"),
        (two_outputs, "float32", "2 outputs, the reference has 1"),
        (detached, "float32", "the gradient of weight .* is missing"),
        (always_recording, "float32", "output 0 under no_grad has requires_grad True"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_values_and_kinds(kernel, dtype, problem):
    with pytest.raises(AssertionError, match=problem) as caught:
        check("rms_norm", "standard", kernel, dtype=dtype)
    assert str(caught.value).startswith(f"rms_norm/standard, kernel {kernel.__name__}, sample ")
    assert f"({dtype} on cpu, seed 0)" in str(caught.value)


def test_the_message_says_how_wrong():
    with pytest.raises(AssertionError, match=r"at 480 of 480 elements: max error 1, tolerance \S+ = 0 \+ \S+ \* \d"):
        check("glu", "swiglu", lambda gate, up: F.silu(gate) * up + 1)


def ignores_num_items(hidden_states, lm_head_weight, labels, *, num_items_in_batch=None, **keywords):
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def shifts_twice(hidden_states, lm_head_weight, labels, *, shift_labels=None, **keywords):
    labels = labels if shift_labels is None else shift_labels
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, shift_labels=None, **keywords)


@pytest.mark.parametrize(
    ("kernel", "sample"), [(ignores_num_items, "counted batch, int"), (shifts_twice, "shifted labels")]
)
def test_keywords_that_a_loss_ignores(kernel, sample):
    with pytest.raises(AssertionError, match=f"sample '{sample}'.*output 0 is wrong"):
        check("cross_entropy_loss", "causal", kernel)


def backward_off_by(factor):
    def backward(gate, up, grad):
        d_gate, d_up = right(gate, up, grad)
        return d_gate * factor, d_up

    return backward


def backward_with_the_first_element_for_all(gate, up, grad):
    return right(gate, up, grad.flatten()[:1].expand(grad.numel()).view(grad.shape) if grad.numel() else grad)


def backward_in_place(gate, up, grad):
    if grad.is_contiguous():
        grad.mul_(up)
        return torch.ops.aten.silu_backward(grad, gate), grad / up * F.silu(gate)
    return right(gate, up, grad)


def backward_that_reads_its_gradient_as_contiguous(gate, up, grad):
    memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    return right(gate, up, memory[: grad.numel()].view(grad.shape) if memory.numel() >= grad.numel() else grad)


def backward_without_up(gate, up, grad):
    return right(gate, up, grad)[0], None


def backward_that_works_once():
    used = set()

    def backward(gate, up, grad):
        again = gate.data_ptr() in used
        used.add(gate.data_ptr())
        return tuple(gradient * (2 if again else 1) for gradient in right(gate, up, grad))

    return backward


@pytest.mark.parametrize(
    ("backward", "problem"),
    [
        (backward_off_by(1.01), "the gradient of gate .* is wrong"),
        (backward_with_the_first_element_for_all, "the gradient of gate .* is wrong"),
        (backward_in_place, "the incoming gradient was changed"),
        (
            backward_that_reads_its_gradient_as_contiguous,
            r"the gradient of gate \(incoming gradient strided\) is wrong",
        ),
        (backward_without_up, "the gradient of up .* is missing"),
        (backward_that_works_once(), "the gradient of gate .* is wrong"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_backward(backward, problem):
    with pytest.raises(AssertionError, match=problem):
        check("glu", "swiglu", swiglu_with(backward))


def test_gradients_that_depend_on_what_else_is_frozen():
    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            d_gate, d_up = right(*ctx.saved_tensors, grad)
            return d_gate, d_up if ctx.needs_input_grad[0] else torch.zeros_like(d_up)

    with pytest.raises(AssertionError, match=r"the gradient of up \(everything else frozen\) is wrong"):
        check("glu", "swiglu", lambda gate, up: Planted.apply(gate, up))


def test_an_input_that_is_changed():
    def kernel(x, weight, eps):
        out = rms_norm(x.clone(), weight, eps)
        x.data.mul_(2)
        return out

    with pytest.raises(AssertionError, match="the argument x was changed by forward"):
        check("rms_norm", "standard", kernel)


def test_a_stride_that_is_taken_for_one():
    def forward(gate, up):
        flat = torch.as_strided(gate, (gate.numel(),), (1,)) if 0 not in gate.stride() else gate.flatten()
        return F.silu(flat.view(gate.shape)) * up

    with pytest.raises(AssertionError, match=r"sample 'halves of one tensor'.*output 0 is wrong"):
        check("glu", "swiglu", swiglu_with(right, forward))


def test_memory_that_nobody_wrote():
    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, index, weights, gate_up, down):
            with torch.enable_grad():
                ctx.inputs = [t.detach().requires_grad_() for t in (x, weights, gate_up, down)]
                ctx.index = index
                ctx.out = moe_experts(ctx.inputs[0], index, *ctx.inputs[1:])
            return ctx.out.detach()

        @staticmethod
        def backward(ctx, grad):
            d_x, d_weights, d_gate_up, d_down = torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True)
            chosen = (
                torch.zeros(len(d_down)).index_fill_(0, ctx.index.flatten().long().clamp(max=len(d_down) - 1), 1).bool()
            )
            uninitialised = torch.empty_like(d_down)
            uninitialised[chosen] = d_down[chosen]
            return d_x, None, d_weights, d_gate_up, uninitialised

    def kernel(hidden_states, top_k_index, top_k_weights, gate_up, down):
        return Planted.apply(hidden_states, top_k_index, top_k_weights, gate_up, down)

    with poisoned_memory(), pytest.raises(AssertionError, match=r"the gradient of down .* is wrong .* max error inf"):
        check("moe_experts", "standard", kernel)


@pytest.fixture
def identity(monkeypatch):
    """A registry that knows one contract, `identity/plain`, for mistakes that no real op makes easy."""

    def reference(x):
        return x.clone()

    def samples(device, dtype, seed):
        yield Sample("one", (torch.arange(6, dtype=dtype).requires_grad_(),))
        yield Sample("whole numbers", (torch.arange(6),))

    known = Registry()
    contract = OpContract(
        op="identity",
        variant="plain",
        summary="the same again",
        reference=reference,
        samples=samples,
        tolerances={"float32": Tolerance(rtol=0, atol=0)},
    )
    spec = KernelSpec(op="identity", variant="plain", name="copy", target=lambda x: x + 0)
    known.add(Backend(api=1, contracts=(contract,), device_kinds=opslot.ops.BACKEND.device_kinds), "here")
    known.register(spec)
    monkeypatch.setattr(opslot.testing._subject, "registry", lambda: known)
    return reference


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (lambda x: x.view_as(x), "output 0 shares memory with the argument x"),
        (lambda x: (x.clone(), x.data.add_(1))[0], "the argument x was changed"),
        (lambda x: x.clone() if x.is_floating_point() else x + 1, "output 0 differs from the reference"),
        (lambda x: x.tolist(), "output 0 is a list, the reference gives a tensor"),
        (lambda x: (x.clone(),), None),
        (lambda x: x.clone(), None),
        ("copy", None),
        ("eager", None),
    ],
)
def test_identity(identity, kernel, problem):
    if problem is None:
        check("identity", "plain", kernel)
    else:
        with pytest.raises(AssertionError, match=problem):
            check("identity", "plain", kernel)


def test_what_cannot_be_checked_says_why(identity):
    with pytest.raises(ValueError, match="identity/plain has tolerances for float32, not for 'float16'"):
        check("identity", "plain", identity, dtype="float16")
    with pytest.raises(TargetError, match="it does not take 'x'"):
        check("identity", "plain", lambda y: y)
    with pytest.raises(UnknownKernel, match="no kernel 'other'"):
        check("identity", "plain", "other")


def test_an_error_in_the_kernel_names_the_sample():
    def kernel(gate, up):
        raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese") as caught:
        check("glu", "swiglu", kernel)
    assert "while checking glu/swiglu" in caught.value.__notes__[0]


def test_poisoned_memory_is_poisoned_inside_only():
    enabled = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_like(torch.ones(10, dtype=torch.bfloat16)).isnan().all()
        assert torch.ones(3).new_empty(7).isnan().all()
        assert (torch.empty(10, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    with pytest.raises(RuntimeError, match="leave early"), poisoned_memory():
        raise RuntimeError("leave early")
    assert torch.are_deterministic_algorithms_enabled() == enabled
    assert torch.utils.deterministic.fill_uninitialized_memory == fill


def a_little_worse(gate, up):
    return glu(gate, up) * (1 + 2**-23)


def test_a_stated_limit_of_accuracy_takes_the_place_of_the_general_one(monkeypatch):
    known = Registry()
    contract = opslot.registry().contract("glu", "swiglu")
    known.add(Backend(api=1, contracts=(contract,), device_kinds=opslot.ops.BACKEND.device_kinds), "here")
    for name, limit in (("none", ()), ("enough", (("float32", 8.0),)), ("half", (("float16", 8.0),))):
        known.register(KernelSpec(op="glu", variant="swiglu", name=name, target=a_little_worse, rms_error=limit))
    monkeypatch.setattr(opslot.testing._subject, "registry", lambda: known)
    check("glu", "swiglu", "enough", checks=("accuracy",), samples=("three dimensions",))
    for name in ("none", "half"):
        with pytest.raises(AssertionError, match=r"RMS error .* times eager's .* allowed 1.05"):
            check("glu", "swiglu", name, checks=("accuracy",), samples=("three dimensions",))


def test_the_largest_error_may_be_as_much_larger_as_all_are_said_to_be():
    def comparison(rms, largest):
        found = Comparison("a sample", "output 0")
        found.eager = found.rounding = _Errors([1.0, 1.02] * 4, [3.0, 3.0] * 4)
        found.kernel = _Errors([rms] * 8, [largest] * 8)
        return found

    assert not comparison(2.4, 14.0).problem(2.5)
    assert "largest error 14.5 over 8 seeds, eager's 3, allowed 14.3" in comparison(2.4, 14.5).problem(2.5)
    assert not comparison(1.0, 5.9).problem()
    for limit in (1.05, 1.01):
        assert "allowed 6 (2 times eager's" in comparison(1.0, 6.1).problem(limit)


def test_samples_by_name():
    seen = []

    def noting(gate, up):
        seen.append(tuple(gate.shape))
        return glu(gate, up)

    check("glu", "swiglu", noting, checks=("values",), samples=("one element", "no rows"))
    assert set(seen) == {(1, 1), (0, 16)}
    with pytest.raises(ValueError, match=r"glu/swiglu has no sample 'on elment'; it has three dimensions, odd sizes"):
        check("glu", "swiglu", noting, samples=("on elment",))


def test_a_product_that_is_written_to_is_found_in_a_selective_checkpoint():
    def in_place(hidden_states, lm_head_weight, labels, **keywords):
        product = (hidden_states.flatten(0, -2) @ lm_head_weight.t()).mul_(0)
        return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords) + product.sum()

    names = ("ordinary",)
    check("cross_entropy_loss", "causal", in_place, checks=("gradients",), samples=names)
    with pytest.raises(AssertionError, match=r"fails in a checkpoint that keeps matrix products: .*mutated"):
        check("cross_entropy_loss", "causal", in_place, checks=("checkpointed",), samples=names)
    check("cross_entropy_loss", "causal", cross_entropy_loss, checks=("checkpointed",), samples=names)
