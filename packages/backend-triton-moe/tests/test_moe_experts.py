"""The experts in Triton's interpreter: the contract's samples, and what no sample has."""

import opslot
import pytest
import torch
from opslot.testing import check, poisoned_memory
from opslot_backends.triton_moe import _grouped, _tiling, moe_experts
from opslot_backends.triton_moe._tiling import Blocks
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS = {
    "standard": moe_experts.moe_experts,
    "clamped": moe_experts.moe_experts_clamped,
    "gpt_oss": moe_experts.moe_experts_gpt_oss,
}
# Those that the interpreter does in a few seconds.
QUICK = ("one token", "no tokens", "empty experts", "chosen twice", "some not mine", "none mine")
LAYOUTS = ("one expert", "every expert chosen", "float32 routing weights", "strided", "expanded", "transposed weights")
SLOW = ("ordinary", "seventeen experts", "odd sizes", "int32 indices")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where what no check of the contract looks at is looked at: in the interpreter, and on a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return request.param


def sample_of(variant, name="chosen twice", device="cpu", dtype=torch.float32):
    samples = opslot.registry().contract("moe_experts", variant).samples(device, dtype, 0)
    return next(sample for sample in samples if sample.name == name)


def results(function, arguments):
    """The output and all gradients for an incoming gradient that is not constant."""
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    out = function(*arguments)
    return [out, *torch.autograd.grad(out, leaves, out.detach().cos())]


def assert_as_the_reference(variant, arguments):
    reference = opslot.registry().contract("moe_experts", variant).load_reference()
    for got, expected in zip(results(FUNCTIONS[variant], arguments), results(reference, arguments), strict=True):
        # Sums of some hundred numbers of a few units, in another order.
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("sample", QUICK)
@pytest.mark.parametrize("variant", FUNCTIONS)
def test_values_and_gradients(variant, sample, interpreter):
    with poisoned_memory():
        check("moe_experts", variant, FUNCTIONS[variant], checks=("gradients",), samples=(sample,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "sample"), [*(("standard", s) for s in (*LAYOUTS, *SLOW)), ("clamped", SLOW[0]), ("gpt_oss", SLOW[0]),
                            ("gpt_oss", "odd sizes"), ("gpt_oss", "another alpha")]
)  # fmt: skip
def test_more_values_and_gradients(variant, sample, interpreter):
    check("moe_experts", variant, FUNCTIONS[variant], checks=("gradients",), samples=(sample,))


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_frozen_arguments_and_side_effects(variant, interpreter):
    """`twice` is the test of what backward writes over."""
    checks = ("arguments", "twice", "no_grad", "refusals")
    if variant == "gpt_oss":  # which has most of them
        checks = (*checks, "frozen", "double_backward", "state")
    check("moe_experts", variant, FUNCTIONS[variant], checks=checks, samples=("one token",))


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_half_precision(variant, interpreter):
    check("moe_experts", variant, FUNCTIONS[variant], checks=("gradients",), samples=("chosen twice",), dtype="float16")


def test_autocast_leaves_the_gradient_of_a_bias_exact(device):
    arguments = sample_of("gpt_oss", "some not mine", device=device).args
    contract = opslot.registry().contract("moe_experts", "gpt_oss")
    found = []
    for function in (contract.load_reference(), FUNCTIONS["gpt_oss"]):
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
        with torch.autocast(device, dtype=torch.float16):
            out = function(*arguments)
        found.append(
            [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), device=device).view_as(out))]
        )
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        assert (got.dtype, got.shape) == (torch.float32, expected.shape)
        # float16 rounds to 2**-11, some ten times one after the other, of the largest; the last is of no half's making.
        limit = 1e-6 if number == len(found[0]) - 1 else 10 * 2**-11
        assert float((got - expected).detach().abs().max()) <= limit * float(expected.detach().abs().max())


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_autocast_casts_weights_also_for_tokens_in_its_dtype(variant, device):
    hidden, *rest = sample_of(variant, "some not mine", device=device).args
    arguments = (hidden.detach().half().requires_grad_(), *rest)
    reference = opslot.registry().contract("moe_experts", variant).load_reference()
    with torch.autocast(device, dtype=torch.float16):
        found = [results(function, arguments) for function in (reference, FUNCTIONS[variant])]
    for expected, got in zip(*found, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        # float16 rounds to 2**-11, some ten times one after the other, of the largest.
        assert float((got - expected).detach().abs().max()) <= 10 * 2**-11 * float(expected.detach().abs().max())


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        return operator(*arguments, **keywords or {})


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_a_second_backward_that_is_watched_reads_nothing_that_the_first_wrote(variant, device):
    arguments = sample_of(variant, device=device).args
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    out = FUNCTIONS[variant](*arguments)
    first = torch.autograd.grad(out, leaves, out.detach().cos(), retain_graph=True)
    with _Watching():
        second = torch.autograd.grad(out, leaves, out.detach().cos())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_backward_after_one_that_failed_halfway(device, monkeypatch):
    """As one that ran out of memory, and is called again with less held elsewhere."""
    arguments = sample_of("standard", device=device).args
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    expected = results(FUNCTIONS["standard"], arguments)[1:]
    out = FUNCTIONS["standard"](*arguments)

    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(_grouped, "weight_gradient", full)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(out, leaves, out.detach().cos())
    got = torch.autograd.grad(out, leaves, out.detach().cos())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", FUNCTIONS)
def test_a_backward_that_is_captured_alone_can_be_replayed(variant):
    """Each replay finds what forward kept, and so does a backward after them."""
    arguments = sample_of(variant, device="cuda", dtype=torch.bfloat16).args
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    expected = results(FUNCTIONS[variant], arguments)[1:]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # on which backward runs too
        out = FUNCTIONS[variant](*arguments)
        incoming = out.detach().cos()
    with torch.cuda.graph(graph, stream=stream):
        captured = torch.autograd.grad(out, leaves, incoming, retain_graph=True)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    after = torch.autograd.grad(out, leaves, incoming)
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_operators_and_one_graph(variant, interpreter):
    check("moe_experts", variant, FUNCTIONS[variant], checks=("custom_ops",), samples=("one token",))
    torch._dynamo.reset()
    arguments = sample_of(variant).args
    compiled = torch.compile(FUNCTIONS[variant], fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled, arguments), results(FUNCTIONS[variant], arguments), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_a_backward_that_is_watched_writes_over_nothing(variant, device):
    """Selective checkpointing keeps what an operator returned, among it what backward writes over elsewhere."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def keep_everything():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    def checkpointed(*arguments):
        return checkpoint(FUNCTIONS[variant], *arguments, use_reentrant=False, context_fn=keep_everything)

    arguments = sample_of(variant, device=device).args
    for got, expected in zip(results(checkpointed, arguments), results(FUNCTIONS[variant], arguments), strict=True):
        assert torch.equal(got, expected)


def test_addresses_that_no_descriptor_takes(interpreter):
    def shifted(tensor):
        return torch.cat((torch.zeros(1), tensor.detach().flatten()))[1:].view(tensor.shape).requires_grad_()

    hidden, index, weights, gate_up, down = sample_of("standard").args
    arguments = shifted(hidden), index, weights, shifted(gate_up), shifted(down)
    assert any(tensor.data_ptr() % 16 for tensor in (arguments[0], *arguments[3:]))
    found = [results(FUNCTIONS["standard"], each) for each in (arguments, sample_of("standard").args)]
    assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))


@pytest.mark.parametrize("wrong", [-1, -7, 5, 1000])
def test_an_index_that_is_no_expert_adds_nothing(wrong, interpreter):
    hidden, index, *rest = sample_of("standard", "some not mine").args
    out = moe_experts.moe_experts(hidden, torch.where(index == 4, wrong, index), *rest)
    assert torch.equal(out, moe_experts.moe_experts(hidden, index, *rest))


def test_the_check_stops_at_an_index_that_is_no_expert(interpreter, monkeypatch):
    hidden, index, *rest = sample_of("standard", "some not mine").args
    monkeypatch.setenv("OPSLOT_CHECK_ROUTING", "1")
    moe_experts.moe_experts(hidden, index, *rest)
    with pytest.raises(ValueError, match=r"top_k_index\[0, 1\] is -1"):
        moe_experts.moe_experts(hidden, torch.where(index == 4, -1, index), *rest)


def test_nan_of_a_token_stays_with_its_experts(device):
    """Rows of padding read the first token, whose NaN must reach neither other tokens nor other experts."""
    hidden, index, weights, gate_up, down = sample_of("standard", "empty experts", device=device).args
    poisoned = hidden.detach().clone()
    poisoned[0] = float("nan")
    out, _, _, d_gate_up, d_down = results(
        moe_experts.moe_experts, (poisoned.requires_grad_(), index, weights, gate_up, down)
    )
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
    mine = int(index[0, 0])
    others = [e for e in range(gate_up.shape[0]) if e != mine]
    assert d_gate_up[mine].isnan().any()
    assert d_gate_up[others].isfinite().all()
    assert d_down[others].isfinite().all()


@pytest.mark.parametrize("variant", ["clamped", "gpt_oss"])
def test_what_lies_at_the_limit_has_its_gradient(variant, device):
    hidden, index, weights, gate_up, *rest = sample_of(variant, device=device).args
    limit = rest[-1]
    first = torch.zeros_like(hidden, requires_grad=False)
    first[:, 0] = 1
    # Whole numbers around the limit, so that no rounding decides on which side of it they lie.
    stored = torch.zeros_like(gate_up, requires_grad=False)
    feature = stored[:, 0] if variant == "gpt_oss" else stored[..., 0]
    feature[:] = torch.tensor([limit, -limit, limit + 1, -limit - 1, 1]).repeat(feature.shape[1])[: feature.shape[1]]
    if variant == "gpt_oss":
        rest[0] = torch.zeros_like(rest[0]).requires_grad_()
    assert_as_the_reference(variant, (first.requires_grad_(), index, weights, stored.requires_grad_(), *rest))


@pytest.mark.parametrize("variant", ["clamped", "gpt_oss"])
def test_the_limit_hides_no_nan(variant, device):
    """A GPU's minimum of NaN and a number is the number unless it is told otherwise."""
    hidden, *rest = sample_of(variant, device=device).args
    poisoned = hidden.detach().clone()
    poisoned[0] = float("nan")
    assert FUNCTIONS[variant](poisoned, *rest)[0].isnan().all()
    assert_as_the_reference(variant, (poisoned.requires_grad_(), *rest))


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "columns"), [(64, 64), (128, 16)])
@pytest.mark.parametrize("variant", FUNCTIONS)
def test_other_tiles_and_several_blocks_of_each_size(variant, tile, columns, interpreter, monkeypatch):
    """Padding that no product of rows reads is left unwritten: here it is poisoned."""
    monkeypatch.setattr(_tiling, "tile", lambda x, choices, experts: tile)
    monkeypatch.setattr(
        _tiling, "blocks", lambda kernel, *_: Blocks(tile if kernel != "weight_gradient" else 32, columns, 32, 1, 1)
    )
    problem = opslot.registry().contract("moe_experts", variant).workload.problem
    shape = {"tokens": 150, "hidden": 72, "inner": 40, "experts": 3, "top_k": 2}
    with poisoned_memory():
        assert_as_the_reference(variant, problem("cpu", torch.float32, 0, **shape).args)


def test_shapes_that_do_not_belong_together_are_refused():
    hidden, index, weights, gate_up, down = sample_of("standard").args
    for wrong, message in (
        ((hidden[:4], index, weights, gate_up, down), "for choices of 5 tokens"),
        ((hidden, index, weights, gate_up[:2], down), r"gate_up \[E, 2I, H\]"),
        ((hidden, index, weights, gate_up[:, :6], down), r"gate_up \[E, 2I, H\]"),
        ((hidden, index, weights, gate_up, down.mT), r"down \[E, H, I\]"),
        ((hidden, index.float(), weights, gate_up, down), "must be of integers, got torch.float32"),
        ((hidden, index, weights, gate_up.half(), down), "gate_up of torch.float16"),
        ((hidden, index, weights, gate_up, down.to("meta")), "other arguments on meta"),
        ((hidden[None], index, weights, gate_up, down), r"hidden_states must be \[T, H\]"),
        ((hidden[:, :0], index, weights, gate_up[..., :0], down[:, :0]), r"hidden_states must be \[T, H\]"),
        ((hidden.double(), index, weights, gate_up, down), "got torch.float64: choose eager"),
    ):
        with pytest.raises((ValueError, opslot.KernelUnavailable), match=message):
            moe_experts.moe_experts(*wrong)


def test_no_tokens_with_an_index_that_cannot_hold_the_number_of_experts(interpreter):
    x, weights = torch.zeros(0, 8), torch.zeros(0, 2)
    index = torch.zeros(0, 2, dtype=torch.uint8)
    out = moe_experts.moe_experts(x, index, weights, torch.ones(300, 8, 8), torch.ones(300, 8, 4))
    assert out.shape == (0, 8)


def test_the_output_is_contiguous_also_where_sizes_were_padded(interpreter):
    sample = sample_of("standard", "odd inner size").args
    hidden, index, weights, gate_up, down = (a[:3] if number < 3 else a for number, a in enumerate(sample))
    out = moe_experts.moe_experts(hidden[:, :7], index, weights, gate_up[..., :7], down[:, :7])
    assert out.is_contiguous()


def test_a_hidden_state_that_was_watched_is_not_written_over(device):
    """A mode that was there in forward alone may have kept what the operator returned."""
    kept = []

    class Keeping(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if "experts" in str(function):
                kept.append((out[1], out[1].clone()))
            return out

    arguments = sample_of("standard", device=device).args
    with Keeping():
        out = moe_experts.moe_experts(*arguments)
    out.sum().backward()
    ((hidden, before),) = kept
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_on_the_meta_device_shapes_are_those_of_the_reference(variant):
    contract = opslot.registry().contract("moe_experts", variant)
    for sample in contract.samples("meta", torch.bfloat16, 0):
        if "mine" in sample.name or sample.name in ("empty experts", "chosen twice"):
            continue  # their indices lie on the CPU
        got = FUNCTIONS[variant](*sample.args)
        assert (got.shape, got.dtype) == (sample.args[0].shape, sample.args[0].dtype), sample.name
