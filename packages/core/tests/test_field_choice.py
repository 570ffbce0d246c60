"""Faults that users reported in public: how kernels are found, judged, chosen and put into models. opslot has none.

Named after the classes of docs/field-faults.md.
"""

import contextlib
import functools
import json

import opslot
import pytest
import torch
from opslot import Backend, BindError, Device, Installed, KernelSpec, OpSlot, Registry, Requires, bind
from opslot._device import CORE_KINDS
from opslot.testing import check

CPU = Device("cpu")


def two_layers(scale_class):
    return torch.nn.Sequential(scale_class(), scale_class())


def kernels(model):
    return [layer.scale_op.offer and layer.scale_op.offer.spec.name for layer in model]


# C13: parameters that are not what they look like.


def zero_3(head):
    """DeepSpeed leaves an empty tensor and a note."""
    head.weight = torch.nn.Parameter(torch.empty(0))
    head.weight.ds_id = 7
    return head


def fsdp_flat(head):
    """FSDP1 shows one shard of all parameters: mat (2 x 4096), vec (65667072)."""
    head.weight = torch.nn.Parameter(torch.empty(24))
    return head


class LoraLinear(torch.nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.weight = base_layer.weight


@pytest.mark.parametrize(
    ("wrap", "problem"),
    [
        (zero_3, r"shape \(0,\), as a sharded parameter does"),
        (fsdp_flat, r"shape \(24,\), as a sharded parameter does"),
        (LoraLinear, "not a plain nn.Linear"),
    ],
)
def test_c13_the_weight_of_a_head_that_is_sharded_or_wrapped_is_refused(wrap, problem):
    slot = OpSlot("cross_entropy_loss", "causal")
    with pytest.raises(BindError, match=f"would read the weight of .*{problem}.*Choose cross_entropy_loss: eager"):
        slot.weight(wrap(torch.nn.Linear(4, 6, bias=False)))


# C14: what is called, with what.


def test_c14_a_kernel_of_an_older_signature_is_refused_with_both(known, make_kernel):
    known.register(make_kernel("old", target=lambda x, weight: x))
    with pytest.raises(opslot.TargetError) as caught:
        known.resolve("scale", "standard", "old", CPU)
    message = str(caught.value)
    assert "kernel scale/standard:old of process-local" in message
    assert "it does not take 'factor'" in message
    assert "kernel:   (x, weight)" in message
    assert "contract: (x, weight, factor=2.0)" in message


class Scaler:
    def __call__(self, x, weight, factor=2.0):
        return x * weight * factor


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, factor=2.0):
        return x * weight * factor


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (functools.partial(Scaler(), factor=2.0), "'factor' must be its positional argument number 3"),
        (functools.partial(Scaler()), None),
        (Scaler(), None),
        (Scaler, "is a class"),
        (Function, "is a class, .* name its `apply`"),
    ],
)
def test_c14_what_is_no_plain_function_is_taken_or_refused_and_never_a_crash(known, make_kernel, target, problem):
    spec = make_kernel("odd", target=target)
    known.register(spec)
    assert "odd" in repr(spec)
    assert "odd" in repr(known.offer("scale", "standard", "odd"))
    if problem is None:
        kernel = known.resolve("scale", "standard", "odd", CPU)
        assert kernel(torch.ones(1), weight=torch.ones(1), factor=2.0) == 2
    else:
        with pytest.raises(opslot.TargetError, match=f"odd of process-local: .*{problem}"):
            known.resolve("scale", "standard", "odd", CPU)


def test_c14_an_apply_takes_keywords_or_says_that_it_does_not(known, make_kernel):
    """Its signature takes everything. From torch 2.13 on it does, before that a call by keyword is a TypeError."""
    known.register(make_kernel("function", target=Function.apply))
    kernel = known.resolve("scale", "standard", "function", CPU)
    assert kernel(torch.ones(1), torch.ones(1)) == 2
    with contextlib.suppress(TypeError):
        assert kernel(torch.ones(1), weight=torch.full((1,), 5.0), factor=3.0) == 15


# C15: who may run where.


@pytest.mark.parametrize(
    ("archs", "yes", "no"),
    [
        (("sm_90", "sm_100"), "90 100", "75 80 86 89 103 120 121"),
        (("sm_80..",), "80 86 90 120", "75"),
        # A kernel image for compute capability 8.0 and up, and a family of which one member faults.
        (("sm_120",), "120", "121"),
    ],
)
def test_c15_architectures_are_those_that_were_named(archs, yes, no):
    needs = Requires(devices=("cuda",), archs=archs)
    assert [needs.unmet(Device("cuda", f"sm_{n}")) for n in yes.split()] == [()] * len(yes.split())
    assert all(needs.unmet(Device("cuda", f"sm_{n}")) for n in no.split())
    for other in (Device("rocm", "gfx942"), Device("rocm", "gfx90a"), CPU, Device("npu", "Ascend950")):
        assert needs.unmet(other)


def test_c15_an_architecture_and_a_version_are_judged_together(tmp_path):
    """grouped_mm was for 9.0 alone until torch 2.9, and had no kernel for the CPU."""
    old = Requires(devices=("cuda",), archs=("sm_90",), packages=("torch>=2.8,<2.9",))
    new = Requires(devices=("cuda",), archs=("sm_80..",), packages=("torch>=2.9",))
    for version, arch, usable in (("2.8.0", "sm_90", 1), ("2.8.0", "sm_120", 0), ("2.9.0", "sm_120", 1)):
        installed = pinned(tmp_path, f"torch=={version}")
        met = [not needs.unmet(Device("cuda", arch), installed) for needs in (old, new)]
        assert sum(met) == usable
    assert old.unmet(CPU)
    assert new.unmet(CPU)


def test_c15_a_symbol_is_no_capability():
    """npu_gemma_rms_norm is there on an Ascend 950, whose chip has no kernel for it."""
    needs = Requires(devices=("npu",), archs=("Ascend910B*",))
    assert needs.unmet(Device("npu", "Ascend910B3")) == ()
    assert needs.unmet(Device("npu", "Ascend950")) == ("needs architecture Ascend910B*, this is npu (Ascend950)",)


# C16: versions that are known to be wrong.


def pinned(folder, *lines):
    file = folder / "requirements.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    return Installed.read(file)


@pytest.mark.parametrize(("version", "right"), [("3.3.1", True), ("3.4.0", False), ("3.7.0", False), ("3.7.1", True)])
def test_c16_a_compiler_that_is_wrong_on_one_architecture(tmp_path, version, right):
    """The gated delta rule's backward was miscompiled for Hopper by Triton from 3.4.0 to before 3.7.1."""
    hopper = Requires(archs=("sm_90",), packages=("triton!=3.4.*,!=3.5.*,!=3.6.*,!=3.7.0",))
    others = Requires(archs=("sm_80..sm_89",), packages=("triton",))
    installed = pinned(tmp_path, f"triton=={version}")
    assert (hopper.unmet(Device("cuda", "sm_90"), installed) == ()) is right
    assert others.unmet(Device("cuda", "sm_80"), installed) == ()
    if not right:
        (reason,) = hopper.unmet(Device("cuda", "sm_90"), installed)
        assert f"has {version}" in reason


@pytest.mark.parametrize(
    "error",
    ["OSError('libhccl.so: cannot open')", "AttributeError('_C')", "RuntimeError('Could not load the library')"],
)
def test_c16_a_library_that_cannot_be_imported_is_unavailable_once_and_for_all(site, error):
    counted = "open(__file__ + '.ran', 'a').write('x')\n"
    site.add("broken", f"{counted}raise {error}")
    code = """
import opslot
for _ in range(2):
    (record,) = [r for r in opslot.registry().records if r.name == "broken"]
    print(type(record.error).__name__, record.error)
"""
    lines = site.python("-c", code).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(error.split("(")[0]) for line in lines)
    assert (site.path / "broken.py.ran").read_text() == "x"


# C17: what an import drags in.


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_c17_importing_opslot_loads_nothing_heavy_whatever_is_installed(site, flags):
    """Also a triton that breaks at import, as one without a driver does, is nobody's business until it is wanted."""
    (site.path / "triton.py").write_text("raise RuntimeError('0 active drivers ([])')\n")
    site.add("acme", site.offering("contract('acme'),", "kernel('acme', 'k'),"))
    heavy = "{'torch', 'numpy', 'triton', 'yaml', 'acme', 'transformers'}"
    code = f"import sys, opslot; print({heavy} & set(sys.modules)); print(len(opslot.registry().offers('acme')))"
    assert site.python(*flags, "-c", code).split() == ["set()", "1"]


def test_c17_a_backend_whose_triton_has_no_driver_is_unavailable_and_says_why(site):
    (site.path / "triton.py").write_text("raise RuntimeError('0 active drivers ([])')\n")
    site.add("acme", "import triton")
    out = site.python("-m", "opslot", "backends", code=1)
    assert "0 active drivers ([])" in out
    code = "import opslot; print(len(opslot.registry().contract('rms_norm').summary) > 0)"
    assert site.python("-c", code).splitlines()[-1] == "True", "the others work"


# C18: metadata.


def test_c18_two_folders_of_metadata_are_one_backend(site):
    source = site.offering("contract('acme'),", "kernel('acme', 'k'),")
    site.add("acme", source)
    site.add("acme", source, folder="acme.egg-info")
    code = "import opslot; print([r.error for r in opslot.registry().records if r.name == 'acme'])"
    assert site.python("-c", code).splitlines()[-1] == "[None]"


def test_c18_one_name_from_two_projects_and_a_name_from_none(site):
    contract = site.offering("contract('acme'),", "kernel('acme', 'k'),")
    site.add("acme", contract)
    site.add("other", site.offering("", "kernel('acme', 'k'),"))
    code = """
import opslot
for name in ("k", "missing"):
    try:
        opslot.registry().offer("acme", "standard", name)
    except opslot.OpslotError as error:
        print(error)
"""
    both, missing = site.python("-c", code).splitlines()
    assert "acme:k, other:k" in both
    assert "no kernel 'missing'" in missing
    assert "known: eager, auto, " in missing


def test_c18_three_hundred_distributions_are_looked_at_once(site):
    for number in range(300):
        info = site.path / f"dist_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{number}\nVersion: 1.0\n")
    site.add("acme", site.offering("contract('acme'),", "kernel('acme', 'k'),"))
    site.add("never", "raise SystemExit('imported')")
    code = """
import importlib.metadata as metadata
scans, distributions = [], metadata.distributions
metadata.distributions = lambda *a, **k: scans.append(1) or distributions(*a, **k)
import opslot
for _ in range(20):
    opslot.registry().offers("acme")
print(len(scans), [r.error for r in opslot.registry().records if r.name in ("acme", "never")])
"""
    assert site.python("-c", code, OPSLOT_BACKENDS="acme").splitlines()[-1] == "1 [None, None]"


# C19: one backend's failure.


def test_c19_the_middle_of_three_fails_half_way(site):
    site.add("first", site.offering("contract('first'),", "kernel('first', 'k'),"))
    half = (
        site.offering("contract('half'),", "kernel('half', 'a'), kernel('half', 'b')") + "raise RuntimeError('third')\n"
    )
    site.add("half", half, version="2.5")
    site.add("last", site.offering("contract('last'),", "kernel('last', 'k'),"))
    code = """
import json, opslot
known = opslot.registry()
(bad,) = [r for r in known.records if r.error]
print(json.dumps([[c.op for c in known.contracts() if c.op in ("first", "half", "last")], bad.name, bad.distribution,
                  bad.version, bad.traceback]))
"""
    ops, name, distribution, version, traceback = json.loads(site.python("-c", code).splitlines()[-1])
    assert ops == ["first", "last"]
    assert (name, distribution, version) == ("half", "half", "2.5")
    assert "RuntimeError: third" in traceback
    assert "third" in site.python("-m", "opslot", "backends", code=1), "what diagnoses it is not locked out by it"
    assert "BackendError" in site.python("-c", "import opslot; opslot.registry()", code=1, OPSLOT_STRICT="1")


def test_c19_registering_twice(known, make_kernel):
    spec = make_kernel("mine")
    known.register(spec)
    known.register(spec)
    other = make_kernel("mine", target=lambda x, weight, factor=2.0: weight)
    with pytest.raises(opslot.DuplicateError, match="replace=True"):
        known.register(other)
    assert known.resolve("scale", "standard", "mine", CPU) is spec.target
    known.register(other, replace=True)
    assert known.resolve("scale", "standard", "mine", CPU) is other.target


# C20: other processes.

SPAWN = """
import multiprocessing, os, sys
import opslot
from rows import Model
def child(queue):
    model = Model()
    queue.put(opslot.bind(model, {"acme": "k"}, device="cpu").to_dict()["fingerprint"])
if __name__ == "__main__":
    mine = opslot.bind(Model(), {"acme": "k"}, device="cpu").to_dict()["fingerprint"]
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(method, queue.get(timeout=120) == mine)
        process.join()
"""


@pytest.mark.slow
def test_c20_a_child_process_binds_what_its_parent_does(site):
    site.add("acme", site.offering("contract('acme'),", "kernel('acme', 'k'),"))
    (site.path / "rows.py").write_text(
        "import torch\nfrom opslot import OpSlot\nclass Model(torch.nn.Module):\n    acme_op = OpSlot('acme')\n"
    )
    script = site.path / "script.py"
    script.write_text(SPAWN)
    assert site.python(str(script)).splitlines()[-2:] == ["spawn True", "fork True"]


def test_c20_a_configuration_finds_the_backends_by_itself(site):
    """Validation before discovery knew no name that a plugin brings."""
    site.add("acme", site.offering("contract('acme'),", "kernel('acme', 'k'),"))
    code = "import opslot; opslot.OpsConfig.parse({'acme': 'k'}); print(opslot.registry().offers('acme')[0].spec.name)"
    assert site.python("-c", code).splitlines()[-1] == "k"


# C21: a request is done or refused.


def test_c21_what_is_asked_for_by_name_is_never_replaced_in_silence(known, scale_class):
    model = two_layers(scale_class)
    for ops, error in (
        ({"scale": "cuda"}, opslot.KernelUnavailable),
        ({"scale": "nothing"}, opslot.UnknownKernel),
        ({"scael": "fast"}, opslot.ConfigError),
        ({"scale": {"othr": "fast"}}, opslot.UnknownOp),
    ):
        with pytest.raises(error):
            bind(model, ops, device="cpu", registry=known)
        assert kernels(model) == [None, None]


def test_c21_the_report_says_for_each_slot_what_was_asked_what_runs_and_why(known, scale_class):
    binding = bind(two_layers(scale_class), "auto", device="cpu", registry=known)
    assert [(row.module, row.kernel) for row in binding.rows] == [("0", "fast"), ("1", "fast")]
    assert all(row.reason.startswith("auto: PORTABLE is the highest band usable on cpu") for row in binding.rows)
    none = Registry()
    core = Backend(api=1, contracts=tuple(known.contracts()), device_kinds=CORE_KINDS)
    none.add(core, "opslot")
    rows = bind(two_layers(scale_class), "auto", device="cpu", registry=none).rows
    assert {(row.kernel, row.reason) for row in rows} == {("eager", "auto: no installed backend offers a kernel")}


def test_c21_a_device_does_not_overwrite_another(known, make_kernel):
    """One kernel for cuda and one for rocm under one op: both are kept, each for its own."""
    for kind in ("cuda", "rocm"):
        known.register(make_kernel(f"for_{kind}", requires=Requires(devices=(kind,)), priority=opslot.Priority.NATIVE))
    assert "for_cuda" in known.list_available("scale", device=Device("cuda", "sm_80"))
    assert "for_rocm" in known.list_available("scale", device=Device("rocm", "gfx942"))
    assert known.choose("scale", "standard", "auto", Device("rocm", "gfx942")).offer.spec.name == "for_rocm"


def test_c21_a_request_that_meets_no_slot_is_an_error_where_one_asks_for_that(known, scale_class):
    known.add(Backend(api=1, kernels=(KernelSpec(op="scale", variant="other", name="k", target=Scaler()),)), "zeta")
    model, wanted = two_layers(scale_class), {"scale": {"other": "k"}}
    assert bind(model, wanted, device="cpu", registry=known).unused
    with pytest.raises(opslot.ConfigError, match="has no slot for"):
        bind(model, {**wanted, "strict": True}, device="cpu", registry=known)


# C22: how far a choice reaches.


def test_c22_a_teacher_stays_as_it_is_when_its_student_is_bound(known, scale_class):
    teacher, student = two_layers(scale_class), two_layers(scale_class)
    x = torch.randn(4)
    before = teacher(x)
    first = bind(teacher, {"scale": "slow"}, device="cpu", registry=known)
    second = bind(student, {"scale": "fast"}, device="cpu", registry=known)
    assert (kernels(teacher), kernels(student)) == (["slow"] * 2, ["fast"] * 2)
    assert vars(scale_class)["scale_op"].kernel is None
    assert kernels(two_layers(scale_class)) == [None, None]
    first.unbind()
    second.unbind()
    assert torch.equal(teacher(x), before)


def test_c22_binding_after_construction_reaches_every_instance_or_none(known, scale_class):
    model = torch.nn.Sequential(*(scale_class() for _ in range(5)))
    bind(model, {"scale": "fast"}, device="cpu", registry=known)
    assert kernels(model) == ["fast"] * 5
    names = [type(layer).__name__ for layer in model]
    model[3] = scale_class(torch.nn.SiLU())
    with pytest.raises(BindError, match=r"3 cannot use kernel 'slow'"):
        bind(model, {"scale": "slow"}, device="cpu", registry=known)
    assert kernels(model) == ["fast", "fast", "fast", None, "fast"]
    assert [type(layer).__name__ for layer in model] == names


def test_c22_two_owners_of_one_slot_are_a_conflict(known, scale_class):
    model = two_layers(scale_class)
    model[0].forward = lambda x: x  # what another tool's patch leaves
    with pytest.raises(BindError, match=r"0 .*forward"):
        bind(model, {"scale": "fast"}, device="cpu", registry=known)
    with pytest.raises(opslot.ConfigError, match=r"(?i)scale.*scaling|scaling.*scale"):
        bind(two_layers(scale_class), {"scale": "fast", "scaling": "slow"}, device="cpu", registry=known)


def test_c22_there_is_one_registry_however_it_is_imported(site):
    code = """
import importlib, opslot
again = importlib.import_module("opslot._discovery")
print(again.registry() is opslot.registry() is opslot.registry())
"""
    assert site.python("-c", code).strip() == "True"


# C24: a test that tests nothing.


def test_c24_a_kernel_that_computes_rubbish_is_caught_by_the_checks():
    with pytest.raises(AssertionError, match="output 0 is wrong"):
        check("rms_norm", "standard", lambda x, weight, eps: (x + weight) * eps)


def test_c24_a_kernel_that_was_bound_and_never_ran_is_missed(known, scale_class):
    model = two_layers(scale_class)
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    x = torch.ones(4)
    with binding.proof() as proof:
        model[0](x).sum().backward()
    assert [miss.row.module for miss in proof.misses()] == ["1"]
    with binding.proof() as proof:
        model(x).sum().backward()
    proof.check()
    assert len(proof.counts()) == 2
