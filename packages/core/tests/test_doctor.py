"""Broken installs, planted one by one as data; and the facts as they are gathered from real folders."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
from opslot import Backend, BackendRecord, OpslotError, Requires
from opslot.tools import doctor
from opslot.tools.cli import main
from opslot.tools.doctor import Finding, Machine, Torch, examine, satisfiable
from packaging.specifiers import SpecifierSet

CUDA = Torch("2.13.0+cu130", cuda="13.0")
ROCM = Torch("2.13.0+rocm7.1", hip="7.1.0")
HEALTHY = Machine(
    device="cuda (sm_90)",
    torch=CUDA,
    triton=("triton",),
    versions={"torch": "2.13.0+cu130", "triton": "3.7.1", "opslot": "0.1.0"},
    needs={"torch": ("triton==3.7.1; platform_system == 'Linux'", "networkx"), "opslot": ()},
)
HEALTHY = dataclasses.replace(HEALTHY, versions={**HEALTHY.versions, "networkx": "3.5"})


def but(**changes):
    """The healthy machine with something broken; None removes a distribution."""
    for field in ("versions", "needs"):
        merged = {**getattr(HEALTHY, field), **changes.get(field, {})}
        changes[field] = {name: value for name, value in merged.items() if value is not None}
    return dataclasses.replace(HEALTHY, **changes)


def test_a_healthy_machine_has_no_findings():
    assert examine(HEALTHY) == ()


def one(machine):
    (finding,) = examine(machine)
    return finding


def test_torch_is_missing():
    machine = but(
        torch=None,
        torch_error="ModuleNotFoundError: No module named 'torch'",
        versions={"torch": None},
        needs={"torch": None, "opslot-backend-torch": ("torch>=2.11",)},
        triton=(),
    )
    finding = one(machine)
    assert finding.what == "torch is not installed"
    assert "pytorch.org" in finding.remedy


def test_torch_cannot_be_imported():
    finding = one(but(torch=None, torch_error="ImportError: libcudart.so.13: cannot open shared object file"))
    assert finding.what == "torch 2.13.0+cu130 cannot be imported"
    assert finding.why == "ImportError: libcudart.so.13: cannot open shared object file"


CANN = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
AUTOLOAD = "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading ..."


@pytest.mark.parametrize(
    ("torch", "torch_error", "what"),
    [
        (None, AUTOLOAD, "torch-npu 2.13.0 cannot be imported, and so torch cannot be imported"),
        (Torch("2.13.0"), "", "torch-npu 2.13.0 cannot be imported"),
    ],
)
def test_torch_npu_without_cann(torch, torch_error, what):
    machine = but(torch=torch, torch_error=torch_error, npu_error=CANN, versions={"torch-npu": "2.13.0"})
    finding = one(machine)
    assert (finding.what, finding.why) == (what, CANN)
    assert "source its set_env.sh" in finding.remedy
    assert "pip uninstall torch-npu" in finding.remedy


def test_torch_npu_is_not_blamed_for_a_broken_torch():
    error = "ImportError: libc10.so: file too short"
    finding = one(but(torch=None, torch_error=error, npu_error=error, versions={"torch-npu": "2.13.0"}))
    assert finding.what.startswith("torch 2.13.0+cu130 cannot")


def test_the_accelerator_does_not_answer():
    finding = one(but(device="", device_error="RuntimeError: CUDA unknown error"))
    assert (finding.what, finding.why) == ("the accelerator does not answer", "RuntimeError: CUDA unknown error")
    assert "device='cpu'" in finding.remedy


ROCM_NEEDS = {"torch": ("pytorch-triton-rocm==3.5.0; platform_system == 'Linux'",)}


@pytest.mark.parametrize("rocm", ["pytorch-triton-rocm", "triton-rocm"])
def test_a_triton_of_nvidia_beside_that_of_a_rocm_torch(rocm):
    finding = one(
        but(
            torch=ROCM,
            triton=tuple(sorted((rocm, "triton"))),
            versions={rocm: "3.5.0"},
            needs={"torch": (f"{rocm}==3.5.0; platform_system == 'Linux'",)},
        )
    )
    assert "both install the module triton" in finding.what
    assert finding.why.endswith(f"torch 2.13.0+rocm7.1, built for ROCm 7.1.0 needs {rocm}")
    assert finding.remedy.startswith("pip uninstall ")
    assert finding.remedy.endswith(f"then pip install '{rocm}==3.5.0'")


def test_a_triton_of_nvidia_in_place_of_that_of_a_rocm_torch():
    found = examine(but(torch=ROCM, needs=ROCM_NEEDS))
    assert [finding.what for finding in found] == [
        "the module triton is that of triton, beside a ROCm torch",
        "torch 2.13.0+cu130 needs pytorch-triton-rocm==3.5.0",
    ]


@pytest.mark.parametrize(
    ("triton", "needs", "versions"),
    [
        (("pytorch-triton-rocm",), ROCM_NEEDS, {"pytorch-triton-rocm": "3.5.0", "triton": None}),
        # AMD's own builds depend on a triton of that name.
        (("triton",), {"torch": ("triton==3.5.0+rocm7.1",)}, {"triton": "3.5.0+rocm7.1"}),
        # Built from source: torch's metadata says nothing of triton.
        (("triton",), {"torch": ()}, {}),
    ],
)
def test_a_rocm_torch_with_the_triton_that_it_needs(triton, needs, versions):
    assert examine(but(torch=ROCM, triton=triton, needs=needs, versions=versions)) == ()


def test_a_backend_that_failed_to_load():
    record = BackendRecord("acme", "opslot-backend-acme", "2.0", error=OpslotError("boom"), traceback="Traceback")
    finding = one(but(records=(record,)))
    assert finding.what == "backend acme of opslot-backend-acme 2.0 failed to load"
    assert finding.why == "OpslotError: boom"
    assert "`opslot backends`" in finding.remedy


@pytest.mark.parametrize(
    ("found", "why"),
    [("2.11.0+cpu", "torch 2.11.0+cpu is installed"), ("broken", "torch broken is installed"), (None, None)],
)
def test_a_dependency_of_the_wrong_version(found, why):
    machine = but(versions={"torch": found, "torch-npu": "2.13.0"}, needs={"torch-npu": ("torch==2.13.0.*", "pyyaml")})
    findings = examine(machine)
    expected = [Finding("torch-npu 2.13.0 needs torch==2.13.0.*", why, "pip install 'torch==2.13.0.*'")] if why else []
    assert [*findings] == [
        *expected,
        Finding("torch-npu 2.13.0 needs pyyaml", "pyyaml is not installed", "pip install 'pyyaml'"),
    ]


def backend(make_kernel, distribution, *kernels):
    """A record whose kernels are (op, packages) each."""
    specs = [
        make_kernel(f"k{number}", op=op, requires=Requires(packages=packages))
        for number, (op, *packages) in enumerate((op, *packages) for op, *packages in kernels)
        for packages in [tuple(packages)]
    ]
    return BackendRecord(distribution, distribution, "1.0", Backend(api=1, kernels=tuple(specs)))


def test_an_installed_version_outside_the_range_of_a_kernel(make_kernel):
    liger = backend(
        make_kernel,
        "liger",
        ("norm", "Liger_Kernel>=0.8,<0.9"),
        ("glu", "liger-kernel<0.9,>=0.8"),
        ("rope", "other>=1"),
    )
    finding = one(but(records=(liger,), versions={"liger-kernel": "0.9.1"}))
    assert finding == Finding(
        "liger (glu/standard, norm/standard) needs liger-kernel<0.9,>=0.8",
        "liger-kernel 0.9.1 is installed, so these kernels cannot run",
        "pip install 'liger-kernel<0.9,>=0.8'",
    )
    assert examine(but(records=(liger,), versions={"liger-kernel": "0.8.5"})) == ()


def test_kernels_of_one_op_are_alternatives(make_kernel):
    both = backend(make_kernel, "both", ("norm", "lib<2"), ("norm", "lib>=2"))
    assert examine(but(records=(both,), versions={"lib": "1.5"})) == ()
    assert examine(but(records=(both, backend(make_kernel, "new", ("norm", "lib>=3"))))) == ()
    by_op = backend(make_kernel, "by-op", ("norm", "lib<2"), ("glu", "lib>=2"))  # its author's choice, no conflict
    assert examine(but(records=(by_op,))) == ()
    both = backend(make_kernel, "both", ("norm", "lib<2"), ("norm", "lib>=2,<3"))
    finding = one(but(records=(both,), versions={"lib": "3.0"}))
    assert finding.what == "both (norm/standard) needs lib<2 or lib<3,>=2"
    assert len(examine(but(records=(both, backend(make_kernel, "new", ("norm", "lib>=3")))))) == 1


def test_two_backends_whose_ranges_cannot_both_hold(make_kernel):
    old = backend(make_kernel, "old", ("norm", "transformers>=5,<5.6"))
    new = backend(make_kernel, "new", ("norm", "transformers>=5.6"), ("glu", "transformers>=5.6"), ("rope", "einops"))
    finding = one(but(records=(new, old)))
    assert finding == Finding(
        "no version of transformers suits both new and old",
        "new (glu/standard, norm/standard) needs transformers>=5.6, old (norm/standard) needs transformers<5.6,>=5",
        "give each an environment of its own, or uninstall new or old",
    )
    found = examine(but(records=(new, old), versions={"transformers": "5.24.0"}))
    assert [finding.what.partition(" needs")[0] for finding in found] == ["old (norm/standard)", finding.what]


def test_one_kernel_may_give_its_range_in_two_parts(make_kernel):
    parts = backend(make_kernel, "parts", ("norm", "lib>=1", "lib<2"))
    assert len(examine(but(records=(parts,), versions={"lib": "2.0"}))) == 1
    assert examine(but(records=(parts,), versions={"lib": "1.5"})) == ()


@pytest.mark.parametrize(
    ("ranges", "met"),
    [
        ("", True),
        (">=1,<2", True),
        (">=2,<2", False),
        (">2,<2.1", True),
        (">2.1,<=2.1", False),
        ("==2.*,>=2.5", True),
        ("==2.*,>=3", False),
        ("~=2.2,<2.2", False),
        ("~=2.2,>=2.9", True),
        ("~=2.2.1,>=2.3", False),
        ("!=1.0.*,>=1.0,<1.1", False),
        ("!=1.0.*,!=1.1.*,>=1.0,<1.3", True),
        ("==1.0,!=1.0", False),
        ("==2.13.0,==2.13.0.*", True),
        ("<1", True),
        (">=1!1,<2", False),
        (">=1!1,<1!2", True),
        (">=2.0rc1,<2.0", False),  # PEP 440: what is before 2.0 leaves out its own candidates
        (">=2.0rc1,<2.0rc2", True),
        (">2.0rc1,<2.0rc2", False),
        ("==2.13.0+cpu,>=2.13", True),
        ("===odd,>=1", False),
    ],
)
def test_whether_any_version_is_in_the_ranges(ranges, met):
    assert satisfiable(SpecifierSet(ranges)) is met


def test_ranges_agree_with_trying_every_version():
    versions = [f"{a}.{b}.{c}" for a, b, c in itertools.product(range(4), repeat=3)]
    bounds = ["1", "1.0", "1.1", "1.1.2", "2", "2.0.1"]
    spans = [op + bound for op in ("<", "<=", ">", ">=", "==", "!=") for bound in bounds]
    spans += [f"{op}{bound}.*" for op in ("==", "!=") for bound in bounds]
    spans += [f"~={bound}" for bound in bounds if "." in bound]
    inside = {span: {v for v in versions if SpecifierSet(span).contains(v)} for span in spans}
    wrong = []
    for one_span, other, third in itertools.product(spans, spans, ("", ">=1.1", "<2", "!=1.1.*")):
        tried = inside[one_span] & inside[other] & inside.get(third, set(versions))
        ranges = SpecifierSet(",".join(filter(None, (one_span, other, third))))
        # Versions between those of the grid may exist, so only the one direction can be wrong by that.
        if tried and not satisfiable(ranges):
            wrong.append(str(ranges))
    assert wrong == []


@pytest.fixture
def machine(monkeypatch):
    def set_to(machine):
        monkeypatch.setattr(doctor, "look", lambda: machine)

    return set_to


def test_the_exit_code_and_the_text(machine, capsys):
    machine(HEALTHY)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "torch:   2.13.0+cu130, built for CUDA 13.0",
        "device:  cuda (sm_90)",
        "with:    opslot 0.1.0",
        "",
        "no problems found",
    ]
    machine(but(device="", device_error="boom"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith(
        "\n\n1 problem found\n\nthe accelerator does not answer\n  why:    boom\n"
        "  remedy: look at the driver; to work on the CPU meanwhile, pass device='cpu' to opslot.bind\n"
    )
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--bogus"])
    assert caught.value.code == 2


def test_json(machine, capsys):
    machine(but(device="", device_error="boom", records=(BackendRecord("acme", "acme-dist", "2.0", Backend(api=1)),)))
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["what"] == "the accelerator does not answer"
    assert data["torch"] == {"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}
    assert data["distributions"] == {"torch": "2.13.0+cu130", "opslot": "0.1.0"}
    assert data["backends"] == [{"name": "acme", "distribution": "acme-dist", "version": "2.0", "loaded": True}]
    assert data["device"] is None


def test_this_environment():
    """Torch is asked for real, in processes of its own. What else is wrong here is no matter of a test."""
    found = doctor.look()
    assert found.torch is not None
    assert found.device
    assert {"opslot", "torch"} <= set(found.needs)
    assert list(doctor.check_torch(found)) == []


def test_facts_come_from_the_folders_that_are_installed(tmp_path, monkeypatch, known, make_kernel):
    monkeypatch.setattr("opslot._discovery._registry", known)
    known.records.append(backend(make_kernel, "Acme_Opslot", ("norm", "Fancy.Lib>=2")))
    monkeypatch.setattr(doctor, "_ask", lambda code, **environment: ("", f"{code} {environment}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, lines in {
        "acme-opslot": ["Requires-Dist: fancy-lib>=2", "Requires-Dist: extra-lib; extra == 'gpu'"],
        "fancy.lib": ["Requires-Dist: not a requirement", "Requires-Dist: sub; python_version > '3'"],
        "pytorch-triton-rocm": [],
        "torch-npu": [],
    }.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.5", *lines]))
        (folder / "top_level.txt").write_text("triton\n" if "triton" in name else f"{name}\n")
    found = doctor.look()
    assert found.versions["fancy-lib"] == "1.5"
    assert found.needs["acme-opslot"] == ("fancy-lib>=2",)
    assert found.needs["fancy-lib"] == ("sub; python_version > '3'",)
    assert "pytorch-triton-rocm" in found.triton
    assert found.npu_error == "import torch_npu {'TORCH_DEVICE_BACKEND_AUTOLOAD': '0'}"
    assert found.torch_error == f"{doctor._TORCH} {{}}"
    assert [f.what for f in doctor.check_ranges(found)] == ["Acme_Opslot (norm/standard) needs fancy-lib>=2"]


def test_metadata_that_cannot_be_read(tmp_path, monkeypatch, known):
    monkeypatch.setattr("opslot._discovery._registry", known)
    monkeypatch.setattr(doctor, "_ask", lambda code, **environment: ("", "boom"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, metadata, record in (
        ("bytes", b"Name: bytes\xff\nVersion: 1.0\n", b""),
        ("record", b"Name: record\nVersion: 1.5\n", b"a,b,c,d\n"),
        ("text", b"Name: text\nVersion: 1.5\n", b"\xff,,\n"),
        ("opslot-extra", b"Name: opslot-extra\nVersion: 1.5\n", b"triton.py,,\n"),
    ):
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_bytes(metadata)
        (folder / "RECORD").write_bytes(record)
    (tmp_path / "triton.py").touch()
    (tmp_path / "opslot_old.egg-info").mkdir()
    (tmp_path / "opslot_old.egg-info/PKG-INFO").write_text("Name: opslot-old\nVersion: 1.0\n")
    (tmp_path / "opslot_old.egg-info/requires.txt").write_bytes(b"\xff")
    found = doctor.look()
    assert (found.versions["record"], found.versions["text"], found.versions["opslot-old"]) == ("1.5", "1.5", "1.0")
    assert "bytes" not in found.versions
    assert found.needs["opslot-old"] == ()
    assert "opslot-extra" in found.triton
    assert found.unreadable == (str(tmp_path / "bytes-1.5.dist-info"),)
    (finding,) = doctor.check_metadata(found)
    assert finding.what.endswith("bytes-1.5.dist-info is no metadata of any distribution")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, []),
        ({"OPSLOT_BACKENDS": "", "OPSLOT_OPS": "rms_norm=eager", "OPSLOT_STRICT": "0"}, []),
        ({"OPSLOT_STRICT": "1"}, []),
        ({"OPSLOT_STRICT": "yes"}, ["OPSLOT_STRICT='yes': write 1"]),
        ({"OPSLOT_BACKENDS": "nobody"}, ["OPSLOT_BACKENDS='nobody': no backend"]),
        ({"OPSLOT_BACKENDS": "nobody", "OPSLOT_OPS": "rms_norm=odd"}, ["OPSLOT_BACKENDS='nobody': no backend"]),
        ({"OPSLOT_CACHE": "/somewhere"}, []),
        ({"OPSLOT_CACHE": "somewhere"}, ["OPSLOT_CACHE='somewhere': write an absolute path"]),
        ({"OPSLOT_OPS": "rms_norm"}, ["OPSLOT_OPS: 'rms_norm' is not of the form"]),
        ({"OPSLOT_OPS": "norm=eager"}, ["OPSLOT_OPS: unknown field 'norm'"]),
        ({"OPSLOT_OPS": "rms_norm=odd"}, ["OPSLOT_OPS: rms_norm: no kernel 'odd'"]),
        (
            {"OPSLOT_STRICT": "2", "OPSLOT_BACKENDS": "a b", "OPSLOT_OPS": "="},
            ["OPSLOT_STRICT='2'", "OPSLOT_BACKENDS='a b' does not parse", "OPSLOT_OPS: '=' is not"],
        ),
    ],
    ids=str,
)
def test_environment_variables_that_cannot_be_used(monkeypatch, variables, words):
    for name in ("OPSLOT_STRICT", "OPSLOT_BACKENDS", "OPSLOT_OPS", "OPSLOT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("opslot._discovery._registry", None)
    asked = []
    monkeypatch.setattr(doctor, "_ask", lambda code, **_: asked.append(dict(os.environ)) or ("", "boom"))
    found = doctor.look()
    assert len(found.variables) == len(words)
    assert all(word in problem for word, problem in zip(words, found.variables, strict=True))
    assert [finding.why for finding in doctor.check_variables(found)] == list(found.variables)
    assert asked[0]["OPSLOT_STRICT"] == "0"  # so that torch is asked, not the variable
    assert {name: os.environ.get(name) for name in variables} == variables


@pytest.mark.parametrize(
    ("printed", "facts"),
    [
        ("", (None, "boom", "", "")),
        ('vendor!\ntorch=["2.13.0", null, "13.0"]\na=b', (Torch("2.13.0", None, "13.0"), "", "", "boom")),
    ],
)
def test_which_import_failed_is_told_by_what_was_printed_before(monkeypatch, printed, facts):
    monkeypatch.setattr(doctor, "_ask", lambda code, **environment: (printed, "boom"))
    found = doctor.look()
    assert (found.torch, found.torch_error, found.device, found.device_error) == facts


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('one'); print('two')", ("one\ntwo", "")),
        ("print('one', flush=True); raise RuntimeError('boom')", ("one", "RuntimeError: boom")),
        ("import os; os.kill(os.getpid(), 9)", ("", "the process ended with -9")),
        ("import os; print(os.environ['ASKED'])", ("yes", "")),
    ],
)
def test_a_process_is_asked_and_may_die(code, answer):
    assert doctor._ask(code, ASKED="yes") == answer


def test_a_process_that_hangs_is_given_up(monkeypatch):
    def hang(command, timeout, **_):
        raise doctor.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor._ask("pass") == ("", "no answer in 300 seconds")


def test_the_doctor_itself_loads_no_torch():
    code = "import sys, opslot.tools.cli, opslot; opslot.registry(); print('torch' in sys.modules)"
    assert doctor._ask(code) == ("False", "")


def test_a_torch_that_breaks_on_import_is_told_by_every_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('Failed to load the backend extension: torch_acme')")

    def opslot(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "opslot", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    listed = opslot("list")
    assert listed.returncode == 1
    assert listed.stderr == (
        "opslot: torch cannot be imported: Failed to load the backend extension: torch_acme (see `opslot doctor`)\n"
    )
    examined = opslot("doctor", "--json")
    assert examined.returncode == 1
    whys = [finding["why"] for finding in json.loads(examined.stdout)["findings"]]
    assert "RuntimeError: Failed to load the backend extension: torch_acme" in whys
