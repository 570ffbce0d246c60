"""The proof that kernels ran, in eager and compiled code."""

import copy
from typing import NamedTuple

import opslot
import pytest
import torch
from opslot import Backend, BindError, OpSlot, bind
from opslot._proof import _marking, _zeros
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def model(scale_class):
    return torch.nn.Sequential(*(scale_class() for _ in range(3)))


@pytest.fixture
def binding(known, model):
    return bind(model, {"scale": "fast"}, device="cpu", registry=known)


def reasons(proof, **kwargs):
    return [miss.reason for miss in proof.misses(**kwargs)]


def step(model, x=None):
    model(torch.ones(4) if x is None else x).sum().backward()


def test_each_module_is_counted_for_itself_and_everything_is_put_back(binding, model):
    slots = [module.scale_op for module in model]
    hooks = [dict(module._forward_pre_hooks) for module in model]
    with binding.proof() as proof:
        step(model)
        model[1](torch.ones(4))
    proof.check()
    assert list(proof.counts().values()) == [(1, 1), (2, 1), (1, 1)]
    assert [module.scale_op for module in model] == slots
    assert [dict(module._forward_pre_hooks) for module in model] == hooks
    step(model)
    assert list(proof.counts().values()) == [(1, 1), (2, 1), (1, 1)]
    assert binding.verify() == ()


def test_gradients_and_results_are_those_without_a_proof(known, scale_class):
    results = []
    for proving in (False, True):
        model = scale_class()
        binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
        x = torch.arange(4.0, requires_grad=True)
        with binding.proof() if proving else torch.enable_grad():
            out = model(x)
            out.sum().backward()
        results.append((out.detach(), x.grad, model.weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


WAYS = [("aot_eager", how, when) for how in ("wrapped", "in place", "regional") for when in ("before", "inside")]


@pytest.mark.parametrize(
    ("backend", "how", "when"), [*WAYS, pytest.param("inductor", "wrapped", "before", marks=pytest.mark.slow)]
)
def test_compiled(binding, model, backend, how, when):
    def compiled():
        if how == "wrapped":
            return torch.compile(model, backend=backend, fullgraph=True)
        for module in model if how == "regional" else [model]:
            module.compile(backend=backend, fullgraph=True)
        return model

    if when == "before":
        runs = compiled()
        step(runs)
    with binding.proof() as proof:
        step(compiled() if when == "inside" else runs)
    proof.check()
    assert list(proof.counts().values()) == [(1, 1)] * 3


def test_a_compiled_model_goes_back_to_the_graph_without_counting(binding, model):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    frames = []
    for proving in (False, True, False):
        with binding.proof() if proving else torch.enable_grad():
            step(compiled)
            step(compiled)
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2]


def test_layers_alike_are_compiled_once_in_a_proof_too(binding, model):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    for module in model:
        module.compile(backend=counter, fullgraph=True)
    with binding.proof() as proof:
        step(model, torch.ones(4, requires_grad=True))
    proof.check()
    assert counter.frame_count == 2  # the input is a leaf, what follows it is not


def test_a_graph_without_guards_is_missed_and_not_passed(binding, model):
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(model, backend="eager", options=options)
    step(compiled)
    with binding.proof() as proof:
        step(compiled)
    with pytest.raises(BindError, match="the kernel was not seen to run as it should in 3 slots") as caught:
        proof.check()
    message = str(caught.value)
    assert "scale/standard -> fast: no kernel of this binding ran" in message
    assert "it ran a graph that does not look at the slots" in message
    assert message.endswith("[{0-2}]")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_at_least_once(binding, model, compiled, reentrant):
    def run(x):
        for module in model:
            x = checkpoint(module, x, use_reentrant=reentrant)
        return x.sum()

    if compiled:
        run = torch.compile(run, backend="aot_eager")
    with binding.proof() as proof:
        run(torch.ones(4, requires_grad=True)).backward()
    proof.check()
    assert all(forward >= 1 and backward == 1 for forward, backward in proof.counts().values())


def test_a_model_may_change_a_result_in_place(binding, model):
    with binding.proof() as proof:
        loss = model(torch.ones(4))
        loss += 1
        loss.sum().backward()
    proof.check()


def test_what_was_missed_and_why(known, model, scale_class):
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    with binding.proof() as proof:
        step(model[0])
        with torch.no_grad():
            model[1](torch.ones(4))
    assert reasons(proof) == [
        "it ran only without gradients (no_grad, inference_mode), so there was no backward",
        "its module was never called",
    ]
    assert str(proof.misses()[1]) == "2 (scale/standard -> fast): its module was never called"
    assert len(proof.misses(backward=False)) == 1
    with binding.proof() as proof:
        model(torch.ones(4))
    assert len(proof.misses()) == 3
    assert all("no gradient came back through its result: backward was not called" in r for r in reasons(proof))
    with binding.proof() as proof:
        pass
    assert all("no kernel of this binding ran" in reason for reason in reasons(proof))
    with binding.proof() as proof:
        step(model)
        model[2] = scale_class()
    proof.check()  # it ran
    with binding.proof() as proof:
        step(model)
    assert reasons(proof) == ["the module was replaced or removed after bind"]


def test_modules_that_are_called_but_not_their_kernel(known, make_contract, make_kernel):
    asked = make_contract("asked", runs_when="the model is asked to")
    known.add(Backend(api=1, contracts=(asked,), kernels=(make_kernel(op="asked"),)), "more")

    class Sometimes(torch.nn.Module):
        plain_op = OpSlot("scale")
        asked_op = OpSlot("asked")

        def forward(self, x, ask=False):
            if ask and torch.is_grad_enabled():
                return self.asked_op(x, x)
            return self.plain_op(x, x) if ask is None else x

    model = torch.nn.ModuleList([Sometimes(), Sometimes()])
    binding = bind(model, {"scale": "fast", "asked": "fast"}, device="cpu", registry=known)
    x = torch.ones(1, requires_grad=True)
    with binding.proof() as proof:
        model[0](x)
        model[1](x, ask=True).backward()
        model[1](x, ask=None).backward()
    assert reasons(proof) == [
        "its module was called, but not the kernel",
        "its module was called, but not the kernel. It runs when the model is asked to; if that is not meant, choose "
        "asked: eager",
    ]
    with binding.proof() as proof:
        with torch.no_grad():
            model[0](x, ask=True)
        model[1](x, ask=True).backward()
        model[1](x, ask=None).backward()
    assert reasons(proof)[1] == (
        "its module was called only without gradients (no_grad), and did not call the kernel. It runs when the model "
        "is asked to; if that is not meant, choose asked: eager"
    )


class Saved(torch.nn.Module):
    """As PEFT's ModulesToSaveWrapper: runs the copy of the active adapter, or the original."""

    __module__ = "peft.utils.other"

    def __init__(self, original):
        super().__init__()
        self.original_module = original.requires_grad_(False)
        self.modules_to_save = torch.nn.ModuleDict()
        self.active = None

    def add(self, adapter):
        self.modules_to_save[adapter] = copy.deepcopy(self.original_module).requires_grad_()
        self.active = adapter

    def forward(self, x):
        return self.original_module(x) if self.active is None else self.modules_to_save[self.active](x)


def test_of_the_modules_that_peft_holds_in_one_place_those_that_ran_are_judged(known, make_kernel, model):
    model[1] = Saved(model[1])
    model[1].add("default")
    choice = {"scale": "slow", "modules": {"1": {"scale": "fast"}}}  # by the name that it has without PEFT
    binding = bind(model, choice, device="cpu", registry=known)
    assert {row.module: row.kernel for row in binding.rows} == {
        "0": "slow",
        "1.original_module": "fast",
        "1.modules_to_save.default": "fast",
        "2": "slow",
    }
    for active in ("default", None):
        model[1].active = active
        with binding.proof() as proof:
            step(model)
        proof.check()
        assert binding.verify() == ()
        assert sorted(proof.counts().values()) == [(0, 0), (1, 1), (1, 1), (1, 1)]
    with binding.proof() as proof:
        step(model[0])
    assert [miss.row.module for miss in proof.misses()] == ["1.original_module", "1.modules_to_save.default", "2"]
    model[1].add("late")  # a copy that holds the kernel, of which the binding knows nothing
    with binding.proof() as proof:
        step(model)
    (reason,) = set(reasons(proof))
    assert (
        reason == "another module was put beside it after bind, as PEFT's modules_to_save do, and may run in its place"
    )


def test_no_gradient_is_due_behind_what_does_not_train(binding, model):
    model[0].weight.requires_grad_(False)
    with binding.proof() as proof:
        step(model)
    proof.check()
    assert list(proof.counts().values()) == [(1, 0), (1, 1), (1, 1)]


def test_a_kernel_that_loses_the_gradient_is_caught(known, make_kernel, scale_class):
    def lost(x, weight, factor=2.0):
        return (x * weight * factor).detach()

    known.register(make_kernel("lost", target=lost))
    model = torch.nn.Sequential(scale_class(), scale_class())
    model[0].scale_op = OpSlot("scale")  # stays out of it
    binding = bind(model[1], {"scale": "lost"}, device="cpu", registry=known)
    with binding.proof() as proof:
        (model(torch.ones(4)) + model[0].weight).sum().backward()
    assert reasons(proof) == [
        "its result carries no gradient although an input requires one: training would stop there"
    ]


def test_a_kernel_without_backward_is_proven_by_its_forward(known, make_kernel, scale_class):
    known.register(make_kernel("infer", backward=False))
    model = scale_class()
    binding = bind(model, {"scale": "infer"}, device="cpu", registry=known)
    with binding.proof() as proof, torch.inference_mode():
        model(torch.ones(4))
    proof.check()
    assert list(proof.counts().values()) == [(1, 0)]


def pair(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * weight, x + weight


class Cut(torch.autograd.Function):
    """x * weight and x + weight, whose backward forgets the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx, first, second):
        (weight,) = ctx.saved_tensors
        return first * weight + second, None


def forgetful(x, weight):
    return Cut.apply(x, weight)


def pair_samples(device, dtype, seed):
    yield opslot.Sample("ones", (torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)))


class Pair(torch.nn.Module):
    pair_op = OpSlot("pair")

    def __init__(self, uses):
        super().__init__()
        self.weight, self.uses = torch.nn.Parameter(torch.ones(4)), uses

    def forward(self, x):
        first, second = self.pair_op.kernel(x, self.weight)
        return self.uses(first, second)


ONE, OTHER = "no gradient came back through its result 0: ", "no gradient came back through its result 1: "
PLAIN, LOST = "its result 1 carries no gradient although x requires one", "no gradient came out for weight, which"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("kernel", "uses", "missed"),
    [
        (pair, lambda a, b: a + b, ""),
        (lambda x, weight: Cut.apply(x, weight.detach()), lambda a, b: a + b, LOST),
        (forgetful, lambda a, b: a + b, LOST),
        (lambda x, weight: (x.detach() * weight, x + weight), lambda a, b: a + b, ""),  # x is reached by another way
        (lambda x, weight: (x * weight, (x + weight).detach()), lambda a, b: a + b, PLAIN),
        (pair, lambda a, b: a, OTHER),
        (pair, lambda a, b: a.detach() + b, ONE),
    ],
)
def test_every_result_and_every_argument_counts(known, make_kernel, kernel, uses, missed, backend):
    contract = opslot.OpContract(
        op="pair", variant="standard", summary="two", reference=pair, samples=pair_samples, tolerances={}
    )
    two = make_kernel("two", "pair", target=kernel)
    known.add(Backend(api=1, contracts=(contract,), kernels=(two,)), "more")
    model = Pair(uses)
    binding = bind(model, {"pair": "two"}, device="cpu", registry=known)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with binding.proof() as proof:
        step(run, torch.ones(4, requires_grad=True))
    if backend is not None and kernel is forgetful:
        missed = ""  # a compiler writes zeros where a backward gives nothing
    assert [reason[: len(missed)] for reason in reasons(proof)] == ([missed] if missed else [])


@pytest.mark.parametrize("uses", [lambda a, b: a, lambda a, b: a.detach() + b])
def test_a_result_that_may_be_stored_need_not_be_trained_through(known, make_kernel, uses):
    contract = opslot.OpContract(
        op="pair", variant="standard", summary="two", reference=pair, samples=pair_samples, tolerances={}, stored=(1,)
    )
    known.add(Backend(api=1, contracts=(contract,), kernels=(make_kernel("two", "pair", target=pair),)), "more")
    model = Pair(uses)
    binding = bind(model, {"pair": "two"}, device="cpu", registry=known)
    with binding.proof() as proof:
        step(model, torch.ones(4, requires_grad=True))
    assert [reason[: len(ONE)] for reason in reasons(proof)] == ([ONE] if uses(torch.ones(1), 1).item() > 1 else [])


def largest(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (x * weight).topk(2).indices


@pytest.mark.parametrize("grad", [True, False])
def test_indices_have_no_gradient_to_miss(known, make_kernel, grad):
    contract = opslot.OpContract(
        op="pair", variant="standard", summary="two", reference=largest, samples=pair_samples, tolerances={}
    )
    known.add(Backend(api=1, contracts=(contract,), kernels=(make_kernel("two", "pair", target=largest),)), "more")

    class Chooses(torch.nn.Module):
        pair_op = OpSlot("pair")

        def forward(self, x):
            with torch.set_grad_enabled(grad):
                chosen = self.pair_op.kernel(x, x)
            return x[chosen]

    model = Chooses()
    binding = bind(model, {"pair": "two"}, device="cpu", registry=known)
    with binding.proof() as proof:
        step(model, torch.ones(4, requires_grad=True))
    proof.check()
    with binding.proof() as proof:
        pass
    assert len(proof.misses()) == 1


@pytest.mark.parametrize("untrained", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_that_only_chooses_indices_is_not_trained(known, untrained, grad):
    class Scale(torch.nn.Module):
        scale_op = OpSlot("scale")

        def forward(self, x):
            return self.scale_op.kernel(x, x)

    class Indexer(torch.nn.Module):
        opslot_untrained = untrained

        def __init__(self):
            super().__init__()
            self.norm = Scale()

        def forward(self, x):
            with torch.set_grad_enabled(grad):
                return self.norm(x).topk(2).indices

    class Indexers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.index, self.index_norm = Indexer(), Scale()

        def forward(self, x):
            return self.index_norm(x)[self.index(x)]

    model = Indexers()
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    with binding.proof() as proof:
        step(model, torch.ones(4, requires_grad=True))
    assert [miss.row.module for miss in proof.misses()] == ([] if untrained else ["index.norm"])
    with binding.proof() as proof, torch.no_grad():
        model(torch.ones(4))
    assert ("index.norm" in [miss.row.module for miss in proof.misses()]) == (not untrained and not grad)
    assert "index_norm" in [miss.row.module for miss in proof.misses()]
    with binding.proof() as proof:
        model.index_norm(torch.ones(4, requires_grad=True)).sum().backward()
    assert [miss.row.module for miss in proof.misses()] == ["index.norm"]  # which did not run at all


def test_a_kernel_that_stands_for_all_that_its_module_holds(known):
    class Scale(torch.nn.Module):
        scale_op = OpSlot("scale")

        def forward(self, x):
            return self.scale_op.kernel(x, x)

    class Streams(torch.nn.Module):
        opslot_whole = True
        scale_op = OpSlot("scale")

        def __init__(self):
            super().__init__()
            self.input_norm = Scale()

        def forward(self, x, whole=True):
            return self.scale_op.kernel(x, x) if whole else x

    model = torch.nn.ModuleDict({"streams": Streams(), "streams_norm": Scale()})
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    x = torch.ones(4, requires_grad=True)
    with binding.proof() as proof:
        model["streams"](x).sum().backward()
    assert [miss.row.module for miss in proof.misses()] == ["streams_norm"]
    with binding.proof() as proof:
        model["streams"](x, whole=False).sum().backward()
        model["streams_norm"](x).sum().backward()
    assert [miss.row.module for miss in proof.misses()] == ["streams", "streams.input_norm"]


def half(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, weight.detach() * 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_gradient_that_the_reference_does_not_give_is_not_missed(known, make_contract, make_kernel, backend):
    contract = opslot.OpContract(
        op="pair", variant="standard", summary="two", reference=half, samples=pair_samples, tolerances={}
    )
    known.add(Backend(api=1, contracts=(contract,), kernels=(make_kernel("two", "pair", target=half),)), "more")
    model = Pair(lambda a, b: a + b)
    binding = bind(model, {"pair": "two"}, device="cpu", registry=known)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with binding.proof() as proof:
        step(run, torch.ones(4, requires_grad=True))
    proof.check()


def total(items: tuple[torch.Tensor, ...], weight: torch.Tensor) -> torch.Tensor:
    return sum(items) * weight


def total_samples(device, dtype, seed):
    yield opslot.Sample("ones", ((torch.ones(2), torch.ones(2)), torch.ones(2)))


@pytest.mark.parametrize("by_name", [False, True])
def test_each_tensor_of_a_tuple_is_an_argument_of_its_own(known, make_kernel, by_name):
    contract = opslot.OpContract(
        op="total", variant="standard", summary="", reference=total, samples=total_samples, tolerances={}
    )

    def forgets(items, weight):
        return (items[0] + items[1].detach()) * weight

    known.add(Backend(api=1, contracts=(contract,), kernels=(make_kernel("odd", "total", target=forgets),)), "more")

    class Total(torch.nn.Module):
        total_op = OpSlot("total")

        def forward(self, x, y):
            return self.total_op(weight=x, items=(x, y)) if by_name else self.total_op((x, y), x)

    model = Total()
    binding = bind(model, {"total": "odd"}, device="cpu", registry=known)
    with binding.proof() as proof:
        model(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)).sum().backward()
    assert reasons(proof) == ["no gradient came out for items[1], which requires one: it was lost inside the kernel"]


def test_gradients_of_arguments_are_those_without_a_proof(known, scale_class):
    """An argument that is also used elsewhere, and one that is passed twice."""
    grads = []
    for proving in (False, True):
        model = torch.nn.Sequential(scale_class(), scale_class())
        model[1] = model[0]
        binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
        x = torch.arange(4.0, requires_grad=True)
        proof = binding.proof()
        with proof if proving else torch.enable_grad():
            (model(x) + x * model[0].weight).sum().backward()
        grads.append((x.grad, model[0].weight.grad))
    proof.check()
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("result", "kind"), [(None, "NoneType"), (1.0, "float"), ((torch.ones(4),), "tuple[Tensor]"), ([], "list")]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_that_returns_something_else_raises_at_the_call(
    known, make_kernel, scale_class, result, kind, compiled
):
    known.register(make_kernel("odd", target=lambda x, weight, factor=2.0: result))
    model = scale_class()
    binding = bind(model, {"scale": "odd"}, device="cpu", registry=known)
    run = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(BindError) as caught, binding.proof():
        run(torch.ones(4))
    expected = f"the model (scale/standard -> odd): the kernel returned {kind}, its contract's reference returns Tensor"
    assert expected in str(caught.value)
    assert model.scale_op.kernel(torch.ones(4), torch.ones(4)) is result  # put back all the same


def test_one_proof_at_a_time_and_none_on_meta(known, binding, model, scale_class):
    with binding.proof():
        with pytest.raises(BindError, match="another proof of this binding is running"), binding.proof():
            pass
        assert binding.verify() == ()
    with pytest.raises(RuntimeError, match="stop"), binding.proof():
        raise RuntimeError("stop")
    with binding.proof() as proof:
        step(model)
    proof.check()
    empty = scale_class().to("meta")
    with pytest.raises(BindError, match="the model is on meta"):
        bind(empty, {"scale": "fast"}, device="cpu", registry=known).proof().__enter__()


def test_slots_bound_again_or_unbound_are_left_alone(known, binding, model):
    with binding.proof() as proof:
        step(model)
        bind(model, {"scale": "slow"}, device="cpu", registry=known)
    proof.check()
    assert model[0].scale_op.offer.spec.name == "slow"
    with binding.proof() as proof:
        step(model)
    assert reasons(proof) == ["the slot was bound again or unbound"] * 3
    binding.apply()
    with binding.proof():
        binding.unbind()
    assert all(module.scale_op.kernel is None for module in model)


def test_eager_slots_have_nothing_to_prove(known, model):
    binding = bind(model, "eager", device="cpu", registry=known)
    with binding.proof() as proof:
        step(model)
    proof.check()
    assert proof.counts() == {}


def test_a_proof_is_not_entered_again(binding, model):
    proof = binding.proof()
    with proof:
        step(model)
    binding.unbind()
    with pytest.raises(BindError, match="a proof has one `with` block"), proof:
        pass
    assert not any("scale_op" in vars(module) for module in model.modules())


def test_a_copy_that_is_made_inside_does_not_count(binding, model):
    with binding.proof() as proof:
        step(copy.deepcopy(model))
    assert len(proof.misses()) == 3


def test_an_error_on_entry_leaves_nothing_behind(binding, model, monkeypatch):
    before = [dict(vars(module)) for module in model.modules()]

    def refuse(self, hook):
        raise RuntimeError("no hooks")

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "register_forward_pre_hook", refuse)
        with pytest.raises(RuntimeError, match="no hooks"), binding.proof():
            pass
    assert [dict(vars(module)) for module in model.modules()] == before
    with binding.proof() as proof:
        step(model)
    proof.check()


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_named_tuples_pass(known, make_contract, make_kernel):
    def named(x: torch.Tensor, weight: torch.Tensor, factor: float = 2.0):
        return Named(x * weight, x * factor)

    known.register(make_kernel("named", target=named))
    kernel = _marking(named, _zeros(3), "here", "", ("x", "weight", "factor"))
    result = kernel(torch.ones(2, requires_grad=True), torch.ones(2))
    assert isinstance(result, Named)


def test_a_result_made_a_leaf_has_lost_its_gradient(known, make_kernel, scale_class):
    def leaf(x, weight, factor=2.0):
        return (x * weight * factor).detach().requires_grad_()

    known.register(make_kernel("leaf", target=leaf))
    model = torch.nn.Sequential(scale_class(), scale_class())
    binding = bind(model, {"scale": "leaf"}, device="cpu", registry=known)
    with binding.proof() as proof:
        step(model)
    assert all("its result carries no gradient although" in reason for reason in reasons(proof))
    assert len(proof.misses()) == 2
