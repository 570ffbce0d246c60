"""Devices of every kind, with torch's answers faked: no test here needs the hardware."""

import types

import pytest
import torch
from opslot import Backend, Device, DeviceKind, KernelUnavailable, OpslotError, Priority, Requires, bind
from opslot._device import CORE_KINDS
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_gpus(monkeypatch, *gpus, hip=None):
    """A torch that sees `gpus`: (capability, arch as ROCm spells it, name) each."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][0])
    properties = [types.SimpleNamespace(gcnArchName=arch) for _, arch, _ in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][2])
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda") if gpus else None
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: len(gpus) - 1)


# What a ROCm torch reports for get_device_capability looks like compute capabilities 9.0, 9.4 and 12.0.
AMD = [
    ((9, 0), "gfx90a:sramecc+:xnack-", "AMD Instinct MI250X"),
    ((9, 4), "gfx942:sramecc+:xnack-", "AMD Instinct MI300X"),
    ((12, 0), "gfx1200", "AMD Radeon RX 9060"),
]
NVIDIA = [((9, 0), "", "NVIDIA H200"), ((10, 0), "", "NVIDIA B200"), ((8, 6), "", "NVIDIA A40")]


def test_nvidia_devices_by_index(known, monkeypatch):
    fake_gpus(monkeypatch, *NVIDIA)
    assert known.describe("cuda") == Device("cuda", "sm_90", "NVIDIA H200")
    assert known.describe("cuda:1") == Device("cuda", "sm_100", "NVIDIA B200")
    assert known.current_device() == Device("cuda", "sm_86", "NVIDIA A40")
    with pytest.raises(OpslotError, match=r"'cuda:3' is not present: torch sees 3 devices of type 'cuda'"):
        known.describe("cuda:3")


def test_the_devices_of_a_rocm_torch_are_rocm(known, monkeypatch):
    fake_gpus(monkeypatch, *AMD, hip="7.1.0")
    assert [known.describe(f"cuda:{index}") for index in range(3)] == [
        Device("rocm", "gfx90a", "AMD Instinct MI250X"),
        Device("rocm", "gfx942", "AMD Instinct MI300X"),
        Device("rocm", "gfx1200", "AMD Radeon RX 9060"),
    ]


@pytest.mark.parametrize("index", range(len(AMD)))
@pytest.mark.parametrize(
    "requires",
    [
        {"devices": ("cuda",)},
        {"devices": ("cuda",), "archs": ("sm_90",)},
        {"devices": ("cuda",), "archs": ("sm_80..",)},
        {"archs": ("sm_80..",)},
        {"archs": ("sm_90..sm_120",)},
        {"archs": ("sm_90", "sm_94", "sm_120")},
        {"archs": ("sm_9*",)},
    ],
    ids=str,
)
def test_an_amd_device_passes_no_gate_for_nvidia(known, make_kernel, monkeypatch, index, requires):
    fake_gpus(monkeypatch, *AMD, hip="7.1.0")
    known.add(
        Backend(api=1, kernels=(make_kernel("gated", requires=Requires(**requires), priority=Priority.NATIVE),)), "sm"
    )
    device = known.describe(f"cuda:{index}")
    assert known.choose("scale", "standard", "auto", device).offer.spec.name == "half"
    with pytest.raises(KernelUnavailable, match=f"needs a.*, this is rocm \\({device.arch}, AMD"):
        known.choose("scale", "standard", "gated", device)


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu[2])
def test_an_nvidia_device_passes_no_gate_for_amd(known, monkeypatch, gpu):
    fake_gpus(monkeypatch, gpu)
    device = known.describe("cuda")
    for requires in (Requires(devices=("rocm",)), Requires(archs=("gfx942", "gfx90a")), Requires(archs=("gfx9*",))):
        assert len(requires.unmet(device)) == 1


@pytest.mark.parametrize(
    ("kind", "name", "device"),
    [
        ("npu", "Ascend910B3", Device("npu", "Ascend910B3", "Ascend910B3")),
        ("xpu", "Intel Data Center GPU Max 1550", Device("xpu", "", "Intel Data Center GPU Max 1550")),
        ("mps", "", Device("mps", "", "Apple GPU")),
    ],
)
def test_other_accelerators(known, monkeypatch, kind, name, device):
    api = types.SimpleNamespace(device_count=lambda: 2, get_device_name=lambda index: name)
    monkeypatch.setattr(torch, kind, api, raising=False)
    present = types.SimpleNamespace(type=kind, index=1)  # torch builds without npu cannot make torch.device("npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: present)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "device", lambda type, index=0: types.SimpleNamespace(type=type, index=index))
    assert known.current_device() == device
    monkeypatch.setattr(api, "device_count", lambda: 1)
    with pytest.raises(OpslotError, match=f"torch sees 1 devices of type '{kind}'"):
        known.current_device()


def test_without_an_accelerator_it_is_the_cpu(known, monkeypatch):
    fake_gpus(monkeypatch)
    assert known.current_device().kind == "cpu"
    with pytest.raises(OpslotError, match=r"'cuda' is not present: torch sees 0 devices"):
        known.describe("cuda")


def test_a_device_is_taken_as_it_is(known):
    elsewhere = Device("npu", "Ascend910B3")
    assert known.describe(elsewhere) is elsewhere


ACME = DeviceKind(name="acme", torch_type="acme", probe=lambda index: ("a100x", ""), example="a100x")


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:sm_90", Device("cuda", "sm_90")),
        ("cuda:sm_100:NVIDIA B200", Device("cuda", "sm_100", "NVIDIA B200")),
        ("rocm:gfx90a", Device("rocm", "gfx90a")),
        ("npu:Ascend910_9392", Device("npu", "Ascend910_9392")),
        ("npu:Ascend910B3", Device("npu", "Ascend910B3")),
        ("cuda:sm_90a", Device("cuda", "sm_90a")),
        ("rocm:gfx942", Device("rocm", "gfx942")),
        ("word:spam", Device("word", "spam")),
        ("cuda", Device("cuda")),
        ("cpu", Device("cpu")),
        ("cpu:x86_64", Device("cpu", "x86_64")),
        ("mps", Device("mps")),
        ("acme:a200", Device("acme", "a200")),
    ],
)
def test_a_target_names_a_device_that_is_not_here(known, text, device):
    word = DeviceKind(name="word", torch_type="acme", probe=lambda index: ("spa", ""), example="spa")
    known.add(Backend(api=1, device_kinds=(ACME, word)), "acme-devices")
    assert known.target(text) == device


GOOD = "such as cuda:sm_90, rocm:gfx942, npu:Ascend910B3, xpu, mps, cpu"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cuda:0", f"target 'cuda:0': 0 counts a device; a target has an architecture, {GOOD}"),
        ("", f"target '': expected a kind and an architecture, {GOOD}"),
        (":sm_90", "expected a kind and an architecture"),
        ("cuda:", "expected a kind and an architecture"),
        ("cuda: sm_90", "expected a kind and an architecture"),
        ("cuda (sm_90)", "expected a kind and an architecture"),
        (0, f"target 0: expected a kind and an architecture, {GOOD}"),
        ("cudda:sm_90", "unknown kind 'cudda' (did you mean 'cuda'?); known: acme:a100x, cpu, cuda:sm_90, mps, npu:"),
        ("cuda:gfx942", "an architecture of kind 'cuda' looks like sm_90"),
        ("cuda:sm_abc", "an architecture of kind 'cuda' looks like sm_90"),
        ("cuda:sm_", "an architecture of kind 'cuda' looks like sm_90"),
        ("cuda:sm_a90", "an architecture of kind 'cuda' looks like sm_90"),
        ("npu:Ascend", "an architecture of kind 'npu' looks like Ascend910B3"),
        ("cuda:H200", "an architecture of kind 'cuda' looks like sm_90"),
        ("rocm:sm_90", "an architecture of kind 'rocm' looks like gfx942"),
    ],
)
def test_what_is_no_target_says_what_one_looks_like(known, text, problem):
    known.add(Backend(api=1, device_kinds=(ACME,)), "acme-devices")
    with pytest.raises(OpslotError) as caught:
        known.target(text)
    assert problem in str(caught.value)


def test_a_target_is_judged_like_a_device(known):
    assert known.choose("scale", "standard", "auto", known.target("cuda:sm_90")).offer.spec.name == "cuda"
    with pytest.raises(KernelUnavailable, match=r"needs architecture sm_90\.\., this is cuda \(sm_80\)"):
        known.choose("scale", "standard", "cuda", known.target("cuda:sm_80"))
    with pytest.raises(KernelUnavailable, match=r"this is cuda, whose architecture is not known"):
        known.choose("scale", "standard", "cuda", known.target("cuda"))


def test_every_example_of_the_core_is_one_that_its_kind_accepts(known):
    examples = [kind for kind in CORE_KINDS if kind.example]
    assert [kind.name for kind in examples] == ["cuda", "rocm", "npu"]
    for kind in examples:
        assert known.target(f"{kind.name}:{kind.example}") == Device(kind.name, kind.example)


def test_bind_judges_the_present_accelerator_or_what_it_is_given(known, scale_class, monkeypatch):
    fake_gpus(monkeypatch, *NVIDIA[:2])
    binding = bind(scale_class(), "auto", registry=known)  # its parameters are on the CPU
    assert (binding.device.arch, binding.rows[0].kernel) == ("sm_100", "cuda")
    binding = bind(scale_class(), "auto", device="cuda:0", registry=known)
    assert (binding.device.arch, binding.rows[0].kernel) == ("sm_90", "cuda")
    binding = bind(scale_class(), "auto", device="cpu", registry=known)
    assert (binding.device.kind, binding.rows[0].kernel) == ("cpu", "fast")
    fake_gpus(monkeypatch, *AMD, hip="7.1.0")
    binding = bind(scale_class(), "auto", registry=known)
    assert (binding.device.kind, binding.rows[0].kernel) == ("rocm", "fast")
    with pytest.raises(KernelUnavailable, match=r"needs a cuda device, this is rocm \(gfx90a"):
        bind(scale_class(), {"scale": "cuda"}, device="cuda:0", registry=known)


def test_bind_judges_the_device_by_index_that_the_parameters_are_on(known, scale_class, monkeypatch):
    fake_gpus(monkeypatch, *NVIDIA)
    model = scale_class()
    with FakeTensorMode():
        model.weight = torch.nn.Parameter(torch.empty(4, device="cuda:1"))
    assert bind(model, "auto", registry=known).device == Device("cuda", "sm_100", "NVIDIA B200")
