import copy
import functools
import subprocess
import sys

import opslot
import pytest
import torch
from opslot import Backend, BindError, Device, OpSlot, bind


@pytest.fixture
def model(scale_class):
    return torch.nn.Sequential(scale_class(), scale_class(), torch.nn.Linear(4, 4))


def kernels(model):
    return [module.scale_op.kernel for module in model if hasattr(module, "scale_op")]


def test_binding_is_per_instance_and_reversible(known, model, scale_class):
    other = scale_class()
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    assert None not in kernels(model)
    assert other.scale_op.kernel is None
    assert scale_class.scale_op.kernel is None
    assert binding.verify() == ()
    binding.unbind()
    assert kernels(model) == [None, None]
    assert all("scale_op" not in vars(module) for module in model)
    assert len(binding.verify()) == 2


def test_modules_with_one_choice_share_one_slot(known, model):
    bind(model, {"scale": "fast"}, device="cpu", registry=known)
    assert model[0].scale_op is model[1].scale_op


def test_the_report_says_what_runs_where_and_why(known, model):
    binding = bind(model, {"scaling": "fused_fast"}, device=Device("cpu", "x86_64"), registry=known)
    assert str(binding).splitlines() == [
        f"opslot: 2 slots on cpu (x86_64), choice {binding.fingerprint}",
        "  scale/standard",
        "    fast acme 2.0, 2 x  [asked for: scaling in code]",
        "      {0-1}",
    ]
    row = binding.to_dict()["slots"][0]
    assert row.pop("source").startswith("code:")
    assert row == {
        "module": "0",
        "slot": "scale_op",
        "op": "scale",
        "variant": "standard",
        "kernel": "fast",
        "distribution": "acme",
        "version": "2.0",
        "nested": "",
        "reason": "asked for: scaling in code",
    }


def test_one_slot_is_one_and_the_repr_is_short(known, scale_class):
    binding = bind(scale_class(), {"scale": "fast"}, device=opslot.Device("cpu", "x86_64"), registry=known)
    assert str(binding).startswith("opslot: 1 slot on cpu (x86_64), choice ")
    assert repr(binding) == f"<Binding of Scale: 1 slot on cpu (x86_64), choice {binding.fingerprint}>"


def test_a_choice_without_a_slot_in_the_model_is_reported(known, make_contract, make_kernel, model):
    spare = make_kernel("fast", op="spare")
    known.add(Backend(api=1, contracts=(make_contract("spare"),), kernels=(spare,)), "more")
    binding = bind(model, {"spare": "fast", "scale": "fast"}, device="cpu", registry=known)
    assert binding.unused == ("spare: fast in code",)
    assert "unused: spare: fast in code, this model has no such slot" in str(binding)


def test_rebinding_replaces_and_unbind_takes_out_in_any_order(known, model):
    first = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    second = bind(model, {"scale": "slow"}, device="cpu", registry=known)
    assert model[0].scale_op.offer.spec.name == "slow"
    first.unbind()  # its slots were bound again since
    assert model[0].scale_op.offer.spec.name == "slow"
    second.unbind()
    assert kernels(model) == [None, None]


def test_eager_takes_the_slot_away(known, model):
    bind(model, {"scale": "fast"}, device="cpu", registry=known)
    binding = bind(model, "eager", device="cpu", registry=known)
    assert kernels(model) == [None, None]
    assert {row.kernel for row in binding.rows} == {"eager"}


def state(model):
    return [(name, dict(vars(module))) for name, module in model.named_modules()]


@pytest.mark.parametrize(
    ("ops", "error"),
    [
        ({"scale": "nothing"}, opslot.UnknownKernel),
        ({"scale": "cuda"}, opslot.KernelUnavailable),
        ({"scale": "half"}, opslot.KernelUnavailable),
        ({"scale": "broken"}, opslot.TargetError),
        ({"scael": "fast"}, opslot.ConfigError),
        ({"scale": {"othr": "fast"}}, opslot.UnknownOp),
        ({"attn_implementation": "sdpa"}, BindError),
    ],
)
def test_an_error_leaves_the_model_as_it_was(known, make_kernel, model, ops, error):
    known.register(make_kernel("broken", target="opslot:nothing"))
    bind(model, {"scale": "slow"}, device="cpu", registry=known)
    before = state(model)
    with pytest.raises(error):
        bind(model, ops, device="cpu", registry=known)
    assert state(model) == before


def test_a_bind_that_fails_at_the_last_slot_changes_nothing(known, scale_class):
    model = torch.nn.Sequential(*(scale_class() for _ in range(5)), scale_class(torch.nn.SiLU()))
    reference = bind(model, "eager", device="cpu", registry=known)
    with pytest.raises(
        BindError, match=r"5 cannot use kernel 'fast' for scale/standard, chosen by scale in code: its activation SiLU"
    ):
        bind(model, {"scale": "fast"}, device="cpu", registry=known)
    assert bind(model, "eager", device="cpu", registry=known).fingerprint == reference.fingerprint
    assert kernels(model) == [None] * 6


def test_auto_leaves_out_a_module_that_cannot_use_the_kernel_and_says_why(known, scale_class):
    model = torch.nn.Sequential(scale_class(), scale_class(torch.nn.SiLU()))
    binding = bind(model, "auto", device="cpu", registry=known)
    assert [row.kernel for row in binding.rows] == ["fast", "eager"]
    assert "its activation SiLU()" in binding.rows[1].reason


def test_an_activation_is_judged_by_its_values_not_its_name(known, scale_class):
    class Rectifier(torch.nn.Module):
        def forward(self, x):
            return x.clamp(min=0)

    bind(scale_class(Rectifier()), {"scale": "fast"}, device="cpu", registry=known)
    for other in (torch.nn.ReLU6(), torch.nn.GELU(), torch.nn.Hardtanh(0, 30)):
        with pytest.raises(BindError, match="its activation"):
            bind(scale_class(other), {"scale": "fast"}, device="cpu", registry=known)


def test_a_forward_that_hides_the_guard_is_refused_and_one_that_wraps_it_is_not(known, scale_class):
    wrapped = scale_class()
    inner = wrapped.forward

    def outer(x):
        return inner(x)

    outer.__wrapped__ = inner
    wrapped.forward = outer
    bind(wrapped, {"scale": "fast"}, device="cpu", registry=known)

    hidden = scale_class()
    hidden.forward = lambda x: x
    with pytest.raises(BindError, match="its forward was replaced"):
        bind(hidden, {"scale": "fast"}, device="cpu", registry=known)


def around(inner):
    return functools.wraps(inner)(lambda *args: inner(*args))


def instead(inner):
    return functools.wraps(inner)(lambda *args: args[-1])


def with_a_kernel(inner, kernel=torch.relu):
    return functools.wraps(inner)(lambda *args: kernel(args[-1]))


class Holder:
    def __init__(self, inner):
        self.inner = inner


def by_an_object(inner):
    holder = Holder(inner)
    return functools.wraps(inner)(lambda *args: holder.inner(*args))


def by_default(inner):
    def forward(*args, inner=inner):
        return inner(*args)

    return functools.wraps(inner)(forward)


def in_part(inner):
    return functools.update_wrapper(functools.partial(lambda call, *args: call(*args), inner), inner)


def as_compiled(inner):
    return torch.compile(inner, backend="eager")


WRAPPERS = [
    (around, True),
    (by_an_object, True),
    (by_default, True),
    (in_part, True),
    (as_compiled, True),
    (lambda inner: around(by_default(inner)), True),
    (instead, False),
    (with_a_kernel, False),
    (lambda inner: around(instead(inner)), False),
    (lambda inner: instead(around(inner)), False),
]


@pytest.mark.parametrize(("wrap", "reaches"), WRAPPERS)
@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_wrapper_must_have_hold_of_what_it_wraps(known, scale_class, wrap, reaches, where):
    if where == "class":
        module = type("Mine", (scale_class,), {"forward": wrap(scale_class.forward)})()
    else:
        module = scale_class()
        module.forward = wrap(module.forward)
    binding = bind(module, "auto", device="cpu", registry=known)
    assert (binding.rows[0].kernel == "fast") is reaches
    if not reaches:
        with pytest.raises(BindError, match=r"its forward was replaced|has a forward of its own"):
            bind(module, {"scale": "fast"}, device="cpu", registry=known)


def test_a_forward_that_keeps_the_old_one_beside_it(known, scale_class):
    def calls_it(self, x):
        return self._old_forward(x)

    for forward, reaches in ((calls_it, True), (lambda self, x: x, False)):
        module = scale_class()
        module._old_forward = module.forward
        for made in (forward.__get__(module), functools.partial(forward, module)):
            module.forward = made
            binding = bind(module, "auto", device="cpu", registry=known)
            # A partial holds the module, and so the old forward: only a proof tells that it is not called.
            assert (binding.rows[0].kernel == "fast") is (reaches or isinstance(made, functools.partial))


def test_super_is_a_way_to_the_guard_where_it_is_marked(known, scale_class):
    class Mine(scale_class):
        @functools.wraps(scale_class.forward)
        def forward(self, x):
            return super().forward(x)

    assert bind(Mine(), {"scale": "fast"}, device="cpu", registry=known).rows[0].kernel == "fast"


def test_a_slot_can_refuse_its_module(known):
    class Refusing(torch.nn.Module):
        scale_op = opslot.OpSlot("scale", "standard", check=lambda module: "it says no")

    with pytest.raises(BindError, match="it says no"):
        bind(Refusing(), {"scale": "fast"}, device="cpu", registry=known)


def test_a_slot_made_in_init_is_bound_too(known):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.my_op = opslot.OpSlot("scale", "standard")

    module = Own()
    binding = bind(module, {"scale": "fast"}, device="cpu", registry=known)
    assert module.my_op.kernel is not None
    binding.unbind()
    assert module.my_op.kernel is None
    bind(module, {"scale": "fast"}, device="cpu", registry=known)
    bind(module, "eager", device="cpu", registry=known)
    assert module.my_op.kernel is None


def test_a_model_without_slots_is_an_error():
    with pytest.raises(BindError, match=r"Linear has no slots.*opslot_models\.adopt"):
        bind(torch.nn.Linear(2, 2))


def test_a_replaced_module_is_noticed(known, model, scale_class):
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    model[1] = scale_class()
    assert binding.verify() == ("1 (scale/standard -> fast): the module was replaced or removed after bind",)


def test_a_copied_model_keeps_its_own_binding(known, model):
    model.opslot_binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    twin = copy.deepcopy(model)
    twin.opslot_binding.unbind()
    assert kernels(twin) == [None, None]
    assert None not in kernels(model)
    assert model.opslot_binding.verify() == ()


def test_the_fingerprint_is_of_the_choice(known, make_kernel, model):
    fast = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    again = bind(model, {"scale": "fused_fast_kernel"}, device=Device("cpu", "other"), registry=known)
    slow = bind(model, {"scale": "slow"}, device="cpu", registry=known)
    assert fast.fingerprint == again.fingerprint != slow.fingerprint
    known.register(make_kernel("mine"))
    mine = bind(model, {"scale": "mine"}, device="cpu", registry=known)
    assert mine.rows[0].distribution == "process-local"
    assert mine.rows[0].source.startswith("code:")
    known.register(make_kernel("mine", target=lambda x, weight, factor=2.0: x), replace=True)
    assert bind(model, {"scale": "mine"}, device="cpu", registry=known).fingerprint != mine.fingerprint


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_once_per_binding_and_never_on_the_way_back(known, scale_class, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = torch.nn.Sequential(*(scale_class() for _ in range(16)))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.ones(4)
    counts = []
    for ops in ("eager", {"scale": "fast"}, {"scale": "slow_copy"}, {"scale": "fast"}, "eager"):
        if ops == {"scale": "slow_copy"}:
            known.register(opslot.KernelSpec(op="scale", name="slow_copy", target=lambda x, weight, factor=2.0: x))
        bind(model, ops, device="cpu", registry=known)
        compiled(x)
        compiled(x)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 3, 3, 3]


def test_a_subclass_that_hides_the_guard_is_refused(known, scale_class):
    class Hiding(scale_class):
        def forward(self, x):
            return x

    with pytest.raises(BindError, match=r"Hiding has a forward of its own, so the guard in Scale may never be reached"):
        bind(Hiding(), {"scale": "fast"}, device="cpu", registry=known)
    assert bind(Hiding(), "auto", device="cpu", registry=known).rows[0].kernel == "eager"


def test_an_activation_that_can_train_or_works_in_place(known, scale_class):
    class Trains(torch.nn.ReLU):
        def __init__(self):
            super().__init__()
            self.beta = torch.nn.Parameter(torch.ones(1))

    with pytest.raises(BindError, match="its activation"):
        bind(scale_class(Trains()), {"scale": "fast"}, device="cpu", registry=known)
    bind(scale_class(torch.nn.ReLU(inplace=True)), {"scale": "fast"}, device="cpu", registry=known)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda module: setattr(module, "act", torch.nn.GELU()), "its activation GELU"),
        (lambda module: setattr(module, "forward", lambda x: x), "its forward was replaced"),
        (lambda module: module.to(torch.float16), "takes bfloat16, not float16"),
    ],
)
def test_what_changes_around_a_kernel_after_bind_is_noticed(known, scale_class, change, problem):
    module = scale_class().to(torch.bfloat16)
    binding = bind(module, {"scale": "half"}, device="cpu", registry=known)
    assert binding.verify() == ()
    change(module)
    assert problem in binding.verify()[0]


def test_a_kernel_without_backward_is_not_for_training(known, make_kernel, scale_class):
    def infer(x, weight, factor=2.0):
        with torch.no_grad():
            return x * weight * factor

    known.register(make_kernel("infer", target=infer, backward=False, priority=opslot.Priority.NATIVE))
    assert bind(scale_class(), "auto", device="cpu", registry=known).rows[0].kernel == "fast"
    module = scale_class()
    bind(module, {"scale": "infer"}, device="cpu", registry=known)
    with pytest.raises(opslot.KernelUnavailable, match="has no backward"):
        module(torch.ones(4))
    with torch.no_grad():
        assert torch.equal(module(torch.ones(4)), torch.full((4,), 2.0))


def variants():
    """Pairs of kernels that differ in one thing only."""
    import functools

    def closed(value):
        return lambda x, weight, factor=2.0: x * value

    def base(x, weight, factor=2.0, extra=0):
        return x * extra

    yield eval("lambda x, weight, factor=2.0: x * 2.0"), eval("lambda x, weight, factor=2.0: x * 3.0")
    yield closed(1), closed(2)
    yield functools.partial(base, extra=1), functools.partial(base, extra=2)


@pytest.mark.parametrize(("one", "other"), list(variants()), ids=["constant", "closure", "partial"])
def test_process_local_kernels_that_compute_something_else_have_other_fingerprints(
    known, make_kernel, model, one, other
):
    fingerprints = []
    for target in (one, one, other):
        known.register(make_kernel("mine", target=target), replace=True)
        fingerprints.append(bind(model, {"scale": "mine"}, device="cpu", registry=known).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize("device", ["cuda:7", "bogus", "", 9.5, "npu"])
def test_a_device_that_is_not_there_is_a_named_error(known, model, device):
    if device == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight CUDA devices")
    with pytest.raises(opslot.OpslotError, match="device"):
        bind(model, "auto", device=device, registry=known)


def test_the_device_may_be_one_of_another_machine(known, model):
    binding = bind(model, {"scale": "cuda"}, device="cuda:sm_90", registry=known)
    assert binding.device == known.target("cuda:sm_90")
    assert {row.kernel for row in binding.rows} == {"cuda"}


def test_advice_speaks_of_the_variants_that_the_model_has(known, scale_class):
    class Other(torch.nn.Module):
        scale_op = OpSlot("scale", "other")

    problem = r"no kernel 'fast' for scale/other; standard has one; known: eager, auto\. For this model write scale: "
    for model, advice in (
        (Other(), r"\{other: auto\}$"),
        (torch.nn.Sequential(scale_class(), Other()), r"\{other: auto, standard: fast\}$"),
    ):
        with pytest.raises(opslot.UnknownKernel, match=problem + advice):
            bind(model, {"scale": "fast"}, device="cpu", registry=known)


def test_what_is_no_module():
    with pytest.raises(BindError, match=r"None is not a torch\.nn\.Module"):
        bind(None)


def test_the_report_names_backends_that_failed_and_says_when_it_is_out_of_date(known, model):
    known.records.append(opslot.BackendRecord("bad", "bad-dist", "2.0", error=opslot.OpslotError("boom")))
    binding = bind(model, "auto", device="cpu", registry=known)
    assert "These backends failed to load: bad-dist (OpslotError: boom)" in str(binding)
    assert "no longer as bound" not in str(binding)
    binding.unbind()
    assert "2 of them no longer as bound, see verify()" in str(binding).splitlines()[0]


def test_what_a_training_process_does_not_need_is_not_loaded():
    """A bind with its report: not the proof, the ranks, the diagnosis, the readers of files, nor the commands."""
    code = """
import sys, torch, opslot
class Norm(torch.nn.Module):
    rms_norm_op = opslot.OpSlot("rms_norm")
print(opslot.bind(Norm(), "eager", device="cpu"))
print("LOADED", *(name for name in sys.modules if name.startswith("opslot.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.partition("LOADED")[2].split()
    assert "opslot._bind" in loaded
    later = {
        f"opslot.{name}"
        for name in ("_proof", "_ranks", "_diagnosis", "_lock_file", "_config_file", "_probe", "testing", "tools")
    }
    assert later.isdisjoint(loaded)
