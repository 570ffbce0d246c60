import copy
import pickle

import opslot
import pytest
import torch
from opslot import BindError, OpSlot, guard_forward


@pytest.fixture(autouse=True)
def process_registry(known, monkeypatch):
    monkeypatch.setattr("opslot._discovery._registry", known)


def test_a_slot_used_alone():
    slot = OpSlot("scale", "standard")
    assert repr(slot) == "OpSlot(scale/standard -> eager)"
    assert not slot.use_non_eager_impl
    with pytest.raises(BindError, match="has no kernel to call"):
        slot(torch.ones(1))
    slot.bind("fast", device="cpu")
    assert repr(slot) == "OpSlot(scale/standard -> fast)"
    assert slot.use_non_eager_impl
    assert slot(torch.ones(1), torch.ones(1)) == 2
    slot.bind("eager")
    assert slot.kernel is None


def test_a_class_attribute_is_not_bound_for_all_instances(scale_class):
    with pytest.raises(BindError, match=r"belongs to Scale\.scale_op, where modules share it; bind the model"):
        scale_class.scale_op.bind("fast")
    assert scale_class().scale_op.kernel is None


def test_a_bound_model_pickles_by_name_and_resolves_where_it_is_loaded(known, scale_class):
    model = scale_class()
    opslot.bind(model, {"scale": "fast"}, device="cpu", registry=known)
    slot = pickle.loads(pickle.dumps(model.scale_op))
    assert slot.kernel is model.scale_op.kernel
    with pytest.raises(BindError):
        slot.bind("eager")


def test_unpickling_where_the_kernel_is_absent_says_so(known, scale_class, monkeypatch):
    model = scale_class()
    opslot.bind(model, {"scale": "fast"}, device="cpu", registry=known)
    data = pickle.dumps(model.scale_op)
    empty = opslot.Registry()
    empty.add(
        opslot.Backend(api=1, contracts=(known.contract("scale"),), device_kinds=tuple(known._kinds.values())), "x"
    )
    monkeypatch.setattr("opslot._discovery._registry", empty)
    with pytest.raises(opslot.UnknownKernel, match=r"pickled with kernel acme:fast 2\.0.*Install what it needs"):
        pickle.loads(data)


def test_unpickling_another_version_of_the_kernel_is_not_silent(known, scale_class, monkeypatch, recwarn):
    model = scale_class()
    opslot.bind(model, {"scale": "fast"}, device="cpu", registry=known)
    data = pickle.dumps(model.scale_op)
    pickle.loads(data)
    assert not recwarn.list
    newer = opslot.Registry()
    newer.add(
        opslot.Backend(api=1, contracts=known.contracts(), device_kinds=tuple(known._kinds.values())), "opslot", "1.0"
    )
    newer.add(opslot.Backend(api=1, kernels=(known.offer("scale", "standard", "fast").spec,)), "acme", "2.1")
    monkeypatch.setattr("opslot._discovery._registry", newer)
    with pytest.warns(UserWarning, match=r"pickled with kernel acme:fast 2\.0 and runs 2\.1 here"):
        assert pickle.loads(data).offer.version == "2.1"


def test_a_process_local_kernel_is_not_pickled_but_copied(known, make_kernel, scale_class):
    known.register(make_kernel("mine"))
    model = scale_class()
    opslot.bind(model, {"scale": "mine"}, device="cpu", registry=known)
    with pytest.raises(opslot.KernelUnavailable, match="process-local"):
        pickle.dumps(model.scale_op)
    assert copy.deepcopy(model).scale_op.kernel is model.scale_op.kernel


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda head: torch.nn.Sequential(head), "is not a plain nn.Linear"),
        (lambda head: type("Quantised", (torch.nn.Linear,), {"forward": lambda self, x: x})(4, 4), "not a plain"),
        (lambda head: head.__dict__.update(forward=lambda x: x) or head, "has a forward of its own"),
        (lambda head: head.register_forward_hook(lambda *args: None) and head, "has hooks"),
        (lambda head: head.register_full_backward_hook(lambda *args: None) and head, "has hooks"),
        (lambda head: torch.nn.utils.spectral_norm(head), "has hooks"),
        (lambda head: torch.nn.Linear(4, 4), "has a bias"),
        (lambda head: setattr(head, "weight", torch.nn.Parameter(torch.empty(0))) or head, "sharded"),
    ],
)
def test_a_weight_is_read_only_from_a_plain_linear(change, problem):
    slot = OpSlot("scale", "standard")
    head = torch.nn.Linear(4, 4, bias=False)
    assert slot.weight(head) is head.weight
    with pytest.raises(BindError, match=problem):
        slot.weight(change(head))


def test_a_parametrised_weight_is_read_as_its_linear_would_read_it():
    head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4, bias=False))
    assert torch.equal(OpSlot("scale", "standard").weight(head), head.weight)


def test_guard_forward_reaches_the_kernel_around_a_swapped_body(known):
    def swap(cls):
        cls.forward = lambda self, x: x - 1
        return cls

    @guard_forward("scale_op", "w")
    @swap
    class Scale(torch.nn.Module):
        scale_op = OpSlot("scale", "standard")

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((1,), 5.0))

        def forward(self, x):
            raise AssertionError("swapped away")

    module = Scale()
    assert module(torch.ones(1)) == 0
    opslot.bind(module, {"scale": "fast"}, device="cpu", registry=known)
    assert module(torch.ones(1)) == 10
    assert module(x=torch.ones(1)) == 10


@pytest.mark.parametrize("attribute", ["w", "packed", "wrapped"])
def test_guard_forward_passes_no_weight_that_a_kernel_would_misread(known, attribute):
    class Wrapped(torch.Tensor):
        pass

    @guard_forward("scale_op", attribute)
    class Scale(torch.nn.Module):
        scale_op = OpSlot("scale", "standard")

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((1,), 5.0))
            self.packed = torch.nn.Parameter(torch.ones(1, dtype=torch.uint8), requires_grad=False)
            self.wrapped = torch.nn.Parameter(torch.ones(1).as_subclass(Wrapped))

        def forward(self, x):
            return x - 1

    module = Scale()
    opslot.bind(module, {"scale": "fast"}, device="cpu", registry=known)
    if attribute == "w":
        torch.nn.utils.parametrize.register_parametrization(module, "w", torch.nn.Tanh())
        assert module(torch.ones(1)) == 2 * torch.tanh(torch.tensor(5.0))
        return
    with pytest.raises(BindError, match=rf"Scale\.scale_op would read {attribute}, which is of.*Choose scale: eager"):
        module(torch.ones(1))
    opslot.bind(module, "eager", device="cpu", registry=known)
    assert module(torch.ones(1)) == 0
