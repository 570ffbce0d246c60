"""`opslot backends check`: each rule, broken and kept. Over folders of distributions, in fresh interpreters."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opslot import DeviceKind, Workload
from opslot.tools.check_backend import _examine

LICENCE = "License-Expression: MIT\nLicense-File: LICENSE\n"
KERNELS = "def norm(x, weight, eps): return x\ndef wrong(x, weight): return x\n"
FROZEN = Path(__file__).parent / "data/opslot_backend_frozen-1.0-py3-none-any.whl"


def spec(target, name="acme", **fields):
    more = "".join(f", {field}={value}" for field, value in fields.items())
    return f"KernelSpec(op='rms_norm', name={name!r}, target={target!r}{more}),"


def check(site, name="acme", *, code=0, **environment):
    """The verdicts and details by subject, the exit code being `code`."""
    out = site.python("-m", "opslot", "backends", "check", name, "--json", code=code, **environment)
    data = json.loads(out)
    assert data["problems"] == sum(finding["verdict"] == "problem" for finding in data["findings"])
    assert (data["problems"] > 0) == (code == 1)
    found = {}
    for finding in data["findings"]:
        found.setdefault(finding["subject"], []).append((finding["verdict"], finding["detail"]))
    return found


@pytest.fixture
def site(site):
    """Without torch, which takes seconds to import and which the check does not need."""
    (site.path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    (site.path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    return site


@pytest.fixture
def acme(site):
    """Write the backend acme, with these kernels, and the module of its kernels."""

    def add(kernels, *, contracts="", head="", module=KERNELS, metadata=LICENCE):
        site.add("acme", head + site.offering(contracts, kernels), metadata=metadata)
        (site.path / "acme_kernels.py").write_text(module)
        with site.path.joinpath("acme-1.0.dist-info/RECORD").open("a") as record:
            record.write("acme_kernels.py,,\nacme_types/py.typed,,\n")
        (site.path / "acme_types").mkdir()
        (site.path / "acme_types/py.typed").touch()
        return site

    return add


def test_a_good_backend(acme):
    site = acme(spec("acme_kernels:norm"), contracts="contract('own'),")
    found = check(site)
    assert {verdict for findings in found.values() for verdict, _ in findings} == {"ok"}
    assert set(found) == {
        "backend acme",
        "contract own/standard",
        "kernel rms_norm/standard:acme",
        "licence",
        "licence file",
    }
    assert found["backend acme"][0] == ("ok", "API version 1; this opslot speaks 1 to 1")
    out = site.python("-m", "opslot", "backends", "check", "acme")
    assert out.splitlines()[0] == "acme 1.0"
    assert out.splitlines()[-1] == "0 problems"


def test_what_the_kernels_need_must_not_be_imported_by_the_entry_point(acme):
    site = acme(
        spec("acme_kernels:norm", requires="Requires(modules=('vendorlib',))"), head="import vendorlib, other\n"
    )
    for name in ("vendorlib", "other"):
        (site.path / f"{name}.py").write_text("")
    verdict, detail = check(site, code=1)["backend acme"][1]
    assert verdict == "problem"
    assert detail.startswith("its import brought other, vendorlib in and took ")
    assert "must load neither torch nor what the kernels need" in detail


def test_another_library_is_a_hint_and_torch_is_not(acme):
    site = acme(spec("acme_kernels:norm"), head="import other\n")
    (site.path / "other.py").write_text("")
    (_, lazy, hint) = check(site)["backend acme"]
    assert lazy[0] == "ok"
    assert hint == ("hint", hint[1])
    assert hint[1].startswith("its import brought other in")
    (site.path / "torch.py").write_text("import many, more, of, its, own")
    for name in ("many", "more", "of", "its", "own"):
        (site.path / f"{name}.py").write_text("")
    (site.path / "other.py").write_text("import torch")
    verdict, detail = check(site, code=1)["backend acme"][1]
    assert verdict == "problem"
    assert detail.startswith("its import brought torch and 6 more in and took ")


def test_targets_that_are_wrong_wherever_they_run(acme):
    unmet = "Requires(devices=('npu',))"
    site = acme(
        spec("acme_kernels:nrom", "attribute")
        + spec("acme_kernels:wrong", "signature", requires=unmet)
        + spec("acme.kernelz:norm", "module", requires=unmet)
        + spec("acme_broken:norm", "syntax")
        + spec("acme_kernels:norm", "elsewhere", requires=unmet)
    )
    (site.path / "acme_broken.py").write_text("1 +")
    found = check(site, code=1)
    kernels = {s.rpartition(":")[2]: findings[0] for s, findings in found.items() if s.startswith("kernel")}
    assert {name: verdict for name, (verdict, _) in kernels.items()} == {
        "attribute": "problem",
        "signature": "problem",
        "module": "problem",
        "syntax": "problem",
        "elsewhere": "ok",
    }
    assert "did you mean 'norm'" in kernels["attribute"][1]
    assert "it does not take 'eps'" in kernels["signature"][1]
    assert "SyntaxError" in kernels["syntax"][1]
    assert "its requirements do not hold here: needs a npu device" in kernels["elsewhere"][1]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_vendor", "No module named 'no_such_vendor'"),
        ("raise RuntimeError('no NPU driver')", "RuntimeError: no NPU driver"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "the process that imported it ended: exit code 7"),
        ("print('a banner'); raise ImportError('libhccl.so: cannot open')", "libhccl.so: cannot open"),
    ],
)
def test_what_cannot_be_imported_here_is_not_checked_and_the_rest_is(acme, source, words):
    unmet = "Requires(devices=('npu',), modules=('no_such_vendor',))"
    site = acme(spec("acme_vendor:norm", "a", requires=unmet) + spec("acme_kernels:norm", "b"))
    (site.path / "acme_vendor.py").write_text(source)
    found = check(site)
    ((verdict, detail),) = found["kernel rms_norm/standard:a"]
    assert verdict == "not checked"
    assert detail.startswith("cannot import here: ")
    assert words in detail
    assert "(its requirements do not hold here: needs a npu device" in detail
    assert found["kernel rms_norm/standard:b"][0][0] == "ok"
    met = site.path.joinpath("acme.py")
    met.write_text(met.read_text().replace(unmet, "Requires()"))
    ((verdict, detail),) = check(site, code=1)["kernel rms_norm/standard:a"]
    assert verdict == "problem"
    assert words in detail


def test_a_vendor_function_that_another_version_may_have_is_not_checked(acme):
    vendor = spec("vendorlib.norms:rms", requires="Requires(packages=('vendorlib>=2',))")
    site = acme(vendor)
    (site.path / "vendorlib").mkdir()
    (site.path / "vendorlib/norms.py").write_text("")
    ((verdict, detail),) = check(site)["kernel rms_norm/standard:acme"]
    assert verdict == "not checked"
    assert "no attribute 'rms'" in detail
    assert "needs vendorlib>=2, which is not installed" in detail


def test_without_torch_a_kernel_is_not_checked(acme):
    site = acme(spec("acme_kernels:norm"), module="import torch\n" + KERNELS)
    ((verdict, detail),) = check(site)["kernel rms_norm/standard:acme"]
    assert verdict == "not checked"
    assert detail.endswith("No module named 'torch' (torch is not installed)")


@pytest.mark.parametrize(
    ("metadata", "licence", "file"),
    [
        ("", "problem", "problem"),
        ("License: UNKNOWN\n", "problem", "problem"),
        ("License: Apache 2\n", "ok", "problem"),
        ("Classifier: License :: OSI Approved :: MIT License\nLicense-File: COPYING\n", "ok", "ok"),
        ("License-File: LICENSE\n", "problem", "ok"),
    ],
)
def test_the_licence(acme, metadata, licence, file):
    site = acme("", metadata=metadata)
    found = check(site, code=int("problem" in (licence, file)))
    assert (found["licence"][0][0], found["licence file"][0][0]) == (licence, file)


def test_a_licence_file_that_is_only_named_is_a_problem(acme):
    site = acme("")
    licence = site.path / "acme-1.0.dist-info/licenses/LICENSE"
    licence.unlink()
    ((verdict, detail),) = check(site, code=1)["licence file"]
    assert (verdict, detail.partition(":")[0]) == ("problem", "its metadata names LICENSE, which it does not bring")
    project = site.path / "project"
    project.mkdir()
    (project / "LICENSE").write_text("as is")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    licence.parents[1].joinpath("direct_url.json").write_text(json.dumps(origin))
    assert check(site)["licence file"] == [("ok", "LICENSE")]
    licence.parents[1].joinpath("direct_url.json").unlink()
    with licence.parents[1].joinpath("RECORD").open("a") as record:
        record.write("acme_types/COPYING,,\n")
    check(site, code=1)
    (site.path / "acme_types/COPYING").write_text("as is")
    assert check(site)["licence file"] == [("ok", "acme_types/COPYING")]


@pytest.mark.parametrize(
    ("file", "data"),
    [("METADATA", b"Name: \xff\n"), ("RECORD", b"a,b,c,d\n"), ("RECORD", b"\xff,,\n"), ("RECORD", b"a,,x\n")],
)
def test_metadata_that_cannot_be_read(acme, file, data):
    site = acme(spec("acme_kernels:norm", requires="Requires(packages=('vendorlib',))"))
    foreign = site.path / "foreign-1.0.dist-info"
    foreign.mkdir()
    (foreign / "METADATA").write_text("Name: foreign\nVersion: 1.0\n")
    (foreign / file).write_bytes(data)
    check(site)
    (site.path / "acme-1.0.dist-info" / file).write_bytes(data)
    found = check(site, code=1)
    ((verdict, detail),) = found["metadata"]
    assert verdict == "problem"
    assert detail.startswith("METADATA or RECORD cannot be read: ")


MORE = """
def samples(device, dtype, seed): return []
def act(x): return x
def draw(device, dtype, seed, rows): return None
def flops(rows): return rows
def nested(): return "x"
def probe(index): return None
"""


def test_every_kind_of_target_is_looked_at(acme):
    contract = (
        "OpContract(op='own', variant='standard', summary='', reference=reference, samples='acme_more:samples',"
        "tolerances={}, activation='acme_more:act', workload=Workload(problem='acme_more:draw',"
        "shapes={'small': {'rows': 2}}, flops='acme_more:flops')),"
    )
    npu = "Requires(devices=('npu',))"
    site = acme(spec("acme_kernels:norm", nested="'acme_more:nested'", requires=npu), contracts=contract)
    (site.path / "acme_more.py").write_text(MORE)
    with site.path.joinpath("acme-1.0.dist-info/RECORD").open("a") as record:
        record.write("acme_more.py,,\n")
    module = site.path / "acme.py"
    kinds = "device_kinds=(DeviceKind(name='own', torch_type='own', probe='acme_more:probe'),), kernels"
    module.write_text(module.read_text().replace("kernels", kinds, 1))
    good = check(site)
    assert good["contract own/standard"] == [
        (
            "ok",
            "its reference, samples, activation, workload's problem, workload's flops can be imported and called as "
            "opslot does",
        )
    ]
    assert good["device kind own"] == [("ok", "its probe can be imported and called as opslot does")]
    (site.path / "acme_more.py").write_text("import no_such_vendor\n" + MORE)
    found = check(site, code=1)
    verdicts = {s: findings[0][0] for s, findings in found.items() if findings[0][0] != "ok"}
    assert verdicts == {
        "contract own/standard": "problem",
        "kernel rms_norm/standard:acme": "not checked",
        "device kind own": "not checked",
    }


@pytest.mark.parametrize("name", ["samples", "act", "draw", "flops", "nested", "probe"])
@pytest.mark.parametrize("broken", ["gone", "arguments", "value"])
def test_each_target_must_be_there_and_take_what_it_is_called_with(
    tmp_path, monkeypatch, make_contract, make_kernel, name, broken
):
    source = {
        "gone": MORE.replace(f"def {name}(", "def other("),
        "arguments": MORE.replace(f"def {name}(", f"def {name}(what, ").replace("what, )", "what)"),
        "value": f"{MORE}{name} = 1\n",
    }[broken]
    (tmp_path / "more_targets.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "more_targets", raising=False)
    if name == "nested":
        item = make_kernel(op="rms_norm", target="opslot.ops.rms_norm:rms_norm", nested="more_targets:nested")
    elif name == "probe":
        item = DeviceKind(name="own", torch_type="own", probe="more_targets:probe")
    else:
        item = replace(
            make_contract(),
            samples="more_targets:samples",
            activation="more_targets:act",
            workload=Workload(problem="more_targets:draw", shapes={"small": {"rows": 2}}, flops="more_targets:flops"),
        )
    words = {"gone": f"no attribute {name!r}", "arguments": "as opslot calls it", "value": "int object is not callable"}
    assert words[broken] in _examine(item)["error"]


def test_what_does_not_parse_is_a_problem_wherever_it_runs(acme):
    site = acme(
        spec("acme_kernels:norm", "mine", requires="Requires(devices=('npu',))")
        + spec("acme_vendor:norm", "theirs", requires="Requires(devices=('npu',))"),
        module="1 +",
    )
    (site.path / "acme_vendor.py").write_text("1 +")
    found = check(site, code=1)
    assert found["kernel rms_norm/standard:mine"][0][0] == "problem"
    assert "SyntaxError" in found["kernel rms_norm/standard:mine"][0][1]
    assert found["kernel rms_norm/standard:theirs"][0][0] == "not checked"


def test_an_editable_vendor_library_is_one_too(acme, tmp_path):
    site = acme(
        spec("acme_kernels:norm", requires="Requires(packages=('vendor-lib',))"), head="import vendored, other\n"
    )
    project = tmp_path / "vendor"
    project.mkdir()
    (project / "vendored.py").write_text("")
    (site.path / "other.py").write_text("")
    info = site.path / "vendor_lib-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vendor-lib\nVersion: 1.0\n")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    verdict, detail = check(site, code=1, PYTHONPATH=str(project))["backend acme"][1]
    assert verdict == "problem"
    assert "ms: vendored. importing" in detail
    (info / "direct_url.json").write_text(json.dumps({**origin, "url": tmp_path.as_uri()}))  # around this environment
    verdict, detail = check(site, code=1, PYTHONPATH=str(project))["backend acme"][1]
    assert "ms: vendored. importing" in detail


def test_no_py_typed_is_a_hint_and_an_init_file_in_the_namespace_is_a_problem(acme):
    site = acme("")
    record = site.path / "acme-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace("acme_types/py.typed", "opslot_backends/__init__.py"))
    (site.path / "opslot_backends").mkdir()
    (site.path / "opslot_backends/__init__.py").touch()
    found = check(site, code=1)
    assert found["types"][0][0] == "hint"
    assert found["namespace"][0][0] == "problem"


def test_a_backend_that_does_not_load_is_a_problem(site):
    site.add("acme", "from opslot import Backend\nBACKEND = Backend(api=9)", metadata=LICENCE)
    ((verdict, detail),) = check(site, code=1)["backend acme"]
    assert verdict == "problem"
    assert "SpecError: this backend is written for version 9" in detail


def test_wrong_usage_exits_with_2(acme):
    site = acme("")
    for arguments in (("check",), ("check", "acmi"), ("chekc", "acme")):
        out = site.python("-m", "opslot", "backends", *arguments, code=2)
    out = site.python("-m", "opslot", "backends", "check", "acmi", code=2)
    words = r"no installed distribution 'acmi' has a backend \(did you mean 'acme'\?\); installed: acme, .*opslot"
    assert re.search(words, out)
    out = site.python("-m", "opslot", "backends", "check", "acme", code=2, OPSLOT_BACKENDS="-acme")
    assert "'acme' is denied by OPSLOT_BACKENDS='-acme'" in out
    text = site.python("-m", "opslot", "backends", "check", "--help").replace("\n", " ")
    assert "exit codes: 0 nothing wrong was found; 1 there are problems; 2 no such backend" in text


def test_a_backend_in_a_zip(site):
    found = check(site, "frozen", code=1, PYTHONPATH=str(FROZEN))
    verdicts = {subject: findings[0][0] for subject, findings in found.items()}
    assert verdicts.pop("kernel frozen_scale/standard:frozen_elsewhere") == "problem"  # it has no such module
    assert verdicts.pop("types") == "hint"
    assert verdicts.pop("contract frozen_scale/standard") == "not checked"  # its activation is torch's
    kernels = {subject for subject, verdict in verdicts.items() if verdict == "not checked"}
    assert kernels == {f"kernel frozen_scale/standard:frozen{name}" for name in ("", "_by_name", "_tuned")}
    assert {verdict for subject, verdict in verdicts.items() if subject not in kernels} == {"ok"}
