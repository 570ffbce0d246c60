"""What a bound kernel refuses at the call: tensors on devices or of dtypes that its spec does not take."""

import copy
import inspect
import types

import opslot
import pytest
import torch
from opslot import Backend, Device, DeviceKind, KernelUnavailable, Priority, Requires, bind
from opslot._limits import forward_only
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = Device("cpu", "x86_64")
H200 = Device("cuda", "sm_90", "NVIDIA H200")


def loaded(known, make_kernel, **fields):
    known.add(Backend(api=1, kernels=(make_kernel("limited", **fields),)), "limits", "1.0")
    return known.load(known.offer("scale", "standard", "limited"))


def test_a_kernel_without_limits_is_not_wrapped(known, make_kernel):
    kernel = loaded(known, make_kernel, requires=Requires(packages=("packaging",), modules=("json",)))
    assert kernel is known.offer("scale", "standard", "limited").spec.target


@pytest.mark.parametrize(
    "fields",
    [{"requires": Requires(devices=("cpu",))}, {"requires": Requires(archs=("*",))}, {"dtypes": ("float32",)}],
    ids=str,
)
def test_a_limited_kernel_keeps_its_name_and_signature(known, make_kernel, fields):
    kernel = loaded(known, make_kernel, **fields)
    target = known.offer("scale", "standard", "limited").spec.target
    assert kernel is not target
    assert inspect.unwrap(kernel) is target
    assert inspect.signature(kernel) == inspect.signature(target)
    assert torch.equal(kernel(torch.ones(2), torch.ones(2), factor=3.0), torch.full((2,), 3.0))


def test_a_model_that_was_moved_says_so_with_the_knob(known, scale_class):
    model = scale_class()
    bind(model, {"scale": "cuda"}, device=H200, registry=known)
    with pytest.raises(KernelUnavailable) as caught:
        model(torch.ones(4))
    here = known.describe("cpu")
    assert str(caught.value) == (
        "kernel scale/standard:cuda of acme was called with a float32 tensor on cpu: needs a cuda device, this is "
        f"{here}. Move or cast the tensor, or bind another kernel, scale: eager (usable there: eager, fast, slow)"
    )


def test_an_architecture_is_a_limit_too(known, make_kernel):
    kernel = loaded(known, make_kernel, requires=Requires(archs=("sm_90",)))
    with pytest.raises(KernelUnavailable, match="needs architecture sm_90, this is cpu"):
        kernel(torch.ones(2), torch.ones(2))


def on(device, dtype=torch.bfloat16):
    """A tensor that says it is on `device`, and holds no data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(2, dtype=dtype, device=device)


def probed(known, make_kernel, monkeypatch, *archs, hip=None):
    """The kernel `limited` for sm_90 and up, in a process that sees GPUs of these architectures."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: archs[index])
    gcn = types.SimpleNamespace(gcnArchName="gfx942:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gcn)
    requires = Requires(devices=("cuda",), archs=("sm_90..",))
    return loaded(known, make_kernel, requires=requires, target=lambda x, weight, factor=2.0: "ran")


def test_each_device_of_a_mixed_host_is_judged(known, make_kernel, monkeypatch):
    kernel = probed(known, make_kernel, monkeypatch, (9, 0), (8, 6))
    assert kernel(on("cuda:0"), None) == "ran"
    with pytest.raises(
        KernelUnavailable, match=r"on cuda:1: needs architecture sm_90\.\., this is cuda \(sm_86, GPU\)"
    ):
        kernel(on("cuda:1"), None)


def test_the_cuda_tensors_of_a_rocm_torch_are_not_taken(known, make_kernel, monkeypatch):
    kernel = probed(known, make_kernel, monkeypatch, (9, 4), hip="7.1.0")
    with pytest.raises(KernelUnavailable, match=r"on cuda:0: needs a cuda device, this is rocm \(gfx942, GPU\)"):
        kernel(on("cuda:0"), None)


def test_tensors_without_data_pass_for_a_device_that_is_not_here(known, make_kernel, monkeypatch):
    kernel = probed(known, make_kernel, monkeypatch)
    assert kernel(on("cuda:0"), None) == kernel(torch.empty(2, device="meta"), None) == "ran"


def test_a_device_of_a_third_party_kind(known, make_kernel):
    """Its torch type is that of another kind: only the probe tells them apart."""
    mine = DeviceKind(name="acme", torch_type="cpu", probe=lambda index: ("a1", "Acme One"))
    registry = opslot.Registry()
    registry.add(Backend(api=1, contracts=known.contracts()[1:], device_kinds=(mine,)), "acme")
    kernel = loaded(registry, make_kernel, requires=Requires(devices=("acme",), archs=("a1",)))
    assert torch.equal(kernel(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    other = loaded(known, make_kernel, requires=Requires(devices=("acme",)))
    with pytest.raises(KernelUnavailable, match="needs a acme device, this is cpu"):
        other(torch.ones(2), torch.ones(2))


def test_a_device_that_no_kind_knows(known, make_kernel):
    registry = opslot.Registry()
    registry.add(Backend(api=1, contracts=known.contracts()[1:]), "bare")
    kernel = loaded(registry, make_kernel, requires=Requires(devices=("cuda",)))
    with pytest.raises(KernelUnavailable, match=r"on cpu: no installed backend knows devices of torch type 'cpu'"):
        kernel(torch.ones(2), torch.ones(2))


HALF, FULL = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "refused"),
    [
        ((HALF, HALF), {}, None),
        ((HALF, FULL), {}, None),  # fp32 weights, statistics or tables beside bf16 activations
        ((FULL, HALF), {}, "float32"),
        ((torch.ones(2, dtype=torch.int64), HALF), {}, None),
        ((torch.ones(2, dtype=torch.int64), FULL), {}, "float32"),
        (((HALF, FULL), FULL), {}, None),
        (([FULL], HALF), {}, "float32"),
        ((None,), {"weight": FULL}, "float32"),
        ((), {"x": HALF, "weight": FULL}, None),
        ((), {"x": HALF.double(), "weight": HALF}, "float64"),
        ((1, 2.0), {}, None),
    ],
)
def test_the_first_floating_tensor_decides(known, make_kernel, args, kwargs, refused):
    kernel = loaded(known, make_kernel, dtypes=("bfloat16", "float16"), target=lambda x=1, weight=2, factor=2.0: "ran")
    if refused is None:
        assert kernel(*args, **kwargs) == "ran"
    else:
        with pytest.raises(
            KernelUnavailable, match=f"a {refused} tensor on cpu: takes bfloat16 or float16, not {refused}"
        ):
            kernel(*args, **kwargs)


class Autocasting(torch.nn.Module):
    """fp32 parameters, and activations of whatever dtype autocast gives the product."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(4, 4, bias=False), scale

    def forward(self, x):
        return self.scale(self.linear(x))


@pytest.mark.parametrize(("dtypes", "passes"), [((), True), (("bfloat16", "float32"), True), (("float32",), False)])
def test_autocast_is_refused_only_where_the_kernel_does_not_take_its_dtype(
    known, make_kernel, scale_class, dtypes, passes
):
    known.add(Backend(api=1, kernels=(make_kernel("limited", dtypes=dtypes),)), "limits")
    model = Autocasting(scale_class())
    bind(model, {"scale": "limited"}, device="cpu", registry=known)
    assert model(torch.ones(4)).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if passes:
            model(torch.ones(4)).sum().backward()
            assert model.linear.weight.grad is not None
        else:
            with pytest.raises(KernelUnavailable, match="a bfloat16 tensor on cpu: takes float32, not bfloat16"):
                model(torch.ones(4))


def test_a_kernel_without_backward_keeps_both_limits(known, make_kernel):
    kernel = loaded(known, make_kernel, dtypes=("float32",), backward=False)
    with pytest.raises(KernelUnavailable, match="has no backward"):
        kernel(torch.ones(2, requires_grad=True), torch.ones(2))
    with pytest.raises(KernelUnavailable, match="takes float32"):
        kernel(HALF, HALF)
    assert torch.equal(kernel(FULL, FULL), torch.full((2,), 2.0))


@pytest.fixture
def limited_model(known, make_kernel, scale_class):
    requires = Requires(devices=("cpu",))
    kernel = make_kernel("limited", requires=requires, dtypes=("float32", "bfloat16"), priority=Priority.NATIVE)
    known.add(Backend(api=1, kernels=(kernel,)), "limits")
    model = torch.nn.Sequential(scale_class(), scale_class())
    bind(model, {"scale": "limited"}, device="cpu", registry=known)
    return model


def test_limits_compile_in_one_graph_and_never_again(limited_model):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(limited_model, backend=counter, fullgraph=True)
    counts = []
    for x in (torch.ones(4), torch.ones(4), torch.zeros(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(4)):
        assert torch.equal(compiled(x), limited_model(x))
        counts.append(counter.frame_count)
    assert counts == [1, 1, 1, 2, 2]  # once a dtype, as without limits
    assert counter.op_count == 8  # two products a layer: nothing of the check is in the graphs


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_outside_the_limits_says_so(limited_model, fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(limited_model, backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match="takes float32 or bfloat16, not float16") as caught:
        compiled(torch.ones(4, dtype=torch.float16))
    assert fullgraph or isinstance(caught.value, KernelUnavailable)


def test_a_copied_model_keeps_its_limits(limited_model):
    with pytest.raises(KernelUnavailable, match="not float16"):
        copy.deepcopy(limited_model)(torch.ones(4, dtype=torch.float16))


def test_keywords_are_looked_at_in_the_order_of_the_contract(known, make_kernel):
    kernel = loaded(known, make_kernel, dtypes=("bfloat16",))
    half, full = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    kernel(weight=full, x=half)
    with pytest.raises(KernelUnavailable, match="float32 tensor"):
        kernel(weight=half, x=full)


@pytest.fixture
def deterministic_mode():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("limits", [{}, {"dtypes": ("float32",)}, {"backward": False}], ids=str)
def test_what_does_not_claim_to_be_deterministic_does_as_torch_does(known, make_kernel, deterministic_mode, limits):
    kernel = loaded(known, make_kernel, deterministic=False, **limits)
    assert inspect.unwrap(kernel) is known.offer("scale", "standard", "limited").spec.target
    assert torch.equal(kernel(FULL, FULL), torch.full((2,), 2.0))
    deterministic_mode(True)
    with pytest.raises(KernelUnavailable) as caught:
        kernel(FULL, FULL)
    assert str(caught.value) == (
        "kernel scale/standard:limited of limits does not claim to be deterministic, and "
        "torch.use_deterministic_algorithms(True) is set. Choose scale: eager, or a kernel that claims it "
        "(`opslot explain scale` shows them); with warn_only=True it runs"
    )
    deterministic_mode(True, warn_only=True)
    with pytest.warns(UserWarning, match="limited of limits does not claim to be deterministic"):
        assert torch.equal(kernel(FULL, FULL), torch.full((2,), 2.0))


def test_what_claims_to_be_deterministic_is_left_alone(known, make_kernel, deterministic_mode):
    deterministic_mode(True)
    kernel = loaded(known, make_kernel, deterministic=True)
    assert kernel is known.offer("scale", "standard", "limited").spec.target


@pytest.mark.parametrize("fullgraph", [True, False])
def test_determinism_costs_no_graph_and_is_noticed_in_compiled_code(
    known, make_kernel, scale_class, deterministic_mode, fullgraph
):
    torch._dynamo.reset()
    kernel = make_kernel("loose", deterministic=False)
    known.add(Backend(api=1, kernels=(kernel,)), "limits")
    model = torch.nn.Sequential(scale_class(), scale_class())
    bind(model, {"scale": "loose"}, device="cpu", registry=known)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
    compiled(torch.ones(4))
    compiled(torch.ones(4))
    assert (counter.frame_count, counter.op_count) == (1, 4)
    deterministic_mode(True)
    with pytest.raises(RuntimeError, match="loose of limits does not claim to be deterministic"):
        compiled(torch.ones(4))
    deterministic_mode(True, warn_only=True)
    with pytest.warns(UserWarning, match="loose of limits does not claim to be deterministic"):
        compiled(torch.ones(4))
    deterministic_mode(False)
    compiled(torch.ones(4))
    assert not fullgraph or counter.frame_count == 2  # where it breaks, around the raise, there are more


def test_a_gradient_inside_a_tuple_is_one_too():
    forward = forward_only(lambda logits, top_k: logits[0].sum(), "kernel x")
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(KernelUnavailable, match="kernel x has no backward"):
        forward((torch.ones(2), leaf), 2)
    with torch.no_grad():
        assert forward((leaf,), 2) == 2
