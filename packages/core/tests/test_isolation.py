"""What one backend, or what is left of one, may do to the others and to the process: nothing. In fresh interpreters."""

import itertools
import json
import os
import sys

import pytest

RECORDS = """
import json, opslot
print(json.dumps([
    {"distribution": r.distribution, "name": r.name, "version": r.version, "denied": r.denied, "remark": r.remark,
     "imported": r.imported, "milliseconds": r.milliseconds,
     "error": r.error and f"{type(r.error).__name__}: {r.error}", "cause": r.error and type(r.error.__cause__).__name__}
    for r in opslot.registry().records
    if r.distribution not in ("opslot", "opslot-backend-liger", "opslot-backend-torch", "opslot-backend-triton-moe")
]))
"""
MARK = "open(__file__ + '.ran', 'a').write('x')\n"


def records(site, **environment):
    return {r["distribution"]: r for r in json.loads(site.python("-c", RECORDS, **environment).splitlines()[-1])}


def ran(site, module):
    """How often a module that starts with MARK was imported."""
    mark = site.path / f"{module}.py.ran"
    return len(mark.read_text()) if mark.exists() else 0


@pytest.fixture
def three(site):
    for name in ("acme", "bolt", "crow"):
        source = MARK + site.offering(f"contract('op_{name}'),", f"kernel('op_{name}', '{name}'),")
        site.add(f"opslot-backend-{name}", source, entry=name, module=f"{name}_opslot")
    return site


def test_32_threads_find_one_registry_and_each_backend_is_imported_once(site):
    site.add("slow", MARK + "import time; time.sleep(0.2)\n" + site.offering("contract('slow'),"))
    code = """
import threading, opslot
barrier, seen = threading.Barrier(32), []
def ask():
    barrier.wait()
    known = opslot.registry()
    seen.append((id(known), [str(c) for c in known.contracts()].count("slow/standard"), len(known.records)))
threads = [threading.Thread(target=ask) for _ in range(32)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(seen) == 32 and len(set(seen)) == 1 and seen[0][1] == 1, seen
"""
    site.python("-c", code)
    assert ran(site, "slow") == 1


def test_a_backend_that_waits_for_a_thread_that_asks_for_the_registry_does_not_hang(site):
    source = """
import threading, opslot
said = []
def ask():
    try:
        opslot.registry()
    except opslot.BackendError as error:
        said.append(str(error))
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""
    site.add("waits", source + site.offering("contract('waits'),"))
    code = """
import opslot, opslot._discovery
opslot._discovery._PATIENCE = 0.5
print([r.error for r in opslot.registry().records if r.name == "waits"])
import waits
print(*waits.said)
"""
    errors, said = site.python("-c", code).splitlines()
    assert errors == "[None]"
    assert said.startswith("another thread has been loading backends for 0.5 s, at last 'waits' of waits, and may wait")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_during_discovery_does_not_hang(site):
    site.add("slow", "import time; time.sleep(1)\n" + site.offering("contract('slow'),"))
    site.add("forks", "import os\nchild = os.fork()\n" + site.offering("contract('forks'),"))
    code = """
import os, threading, time, opslot, signal
thread = threading.Thread(target=opslot.registry)
def fork():
    time.sleep(0.5)
    child = os.fork()
    if not child:
        signal.alarm(20)
        opslot.registry().contract("slow")
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print("forked")
if __name__ == "__main__":
    thread.start()
    fork()
    thread.join()
    opslot.registry().contract("slow")
"""
    assert site.python("-W", "ignore", "-c", code, OPSLOT_BACKENDS="slow") == "forked\n"
    code = """
import os, signal, opslot
main = os.getpid()
signal.alarm(20)
opslot.registry().contract("forks")
if os.getpid() != main:
    os._exit(7)
import forks
assert os.waitstatus_to_exitcode(os.waitpid(forks.child, 0)[1]) == 7
print("both")
"""
    assert site.python("-W", "ignore", "-c", code, OPSLOT_BACKENDS="forks") == "both\n"


@pytest.mark.parametrize(
    ("value", "imported"),
    [
        (None, "acme bolt crow"),
        ("", ""),
        ("  ", ""),
        ("opslot", ""),
        ("acme", "acme"),
        ("acme, opslot-backend-bolt", "acme bolt"),
        ("OPSLOT_Backend.Bolt", "bolt"),
        ("-acme", "bolt crow"),
        ("-acme,-opslot-backend-crow", "bolt"),
    ],
)
def test_what_is_denied_is_never_imported(three, value, imported):
    code = """
import sys, opslot
known = opslot.registry()
assert len(known.contract("rms_norm").summary) > 0
print(*sorted(m.removesuffix("_opslot") for m in sys.modules if m in ("acme_opslot", "bolt_opslot", "crow_opslot")))
"""
    environment = {} if value is None else {"OPSLOT_BACKENDS": value}
    assert three.python("-c", code, **environment).strip() == imported
    assert [n for n in ("acme", "bolt", "crow") if ran(three, f"{n}_opslot")] == imported.split()
    denied = {r["name"]: r["denied"] for r in records(three, **environment).values()}
    assert {name for name, words in denied.items() if not words} == set(imported.split())
    assert {words for words in denied.values() if words} <= {f"denied by OPSLOT_BACKENDS={value!r}"}


def test_asking_for_what_is_denied_names_the_variable(three):
    code = """
import opslot
from opslot import Device
for name in ("acme", "opslot-backend-acme:whatever", "other"):
    try:
        opslot.registry().choose("rms_norm", "standard", name, Device("cpu"))
    except opslot.OpslotError as error:
        print(type(error).__name__, error)
try:
    opslot.registry().contract("op_acme")
except opslot.UnknownOp as error:
    print(error)
"""
    out = three.python("-c", code, OPSLOT_BACKENDS="-acme").splitlines()
    for line in out[:2]:
        assert line.startswith("BackendError")
        assert "backend 'acme' of opslot-backend-acme 1.0 is denied by OPSLOT_BACKENDS='-acme'" in line
    for line in out[2:]:
        assert "Not loaded: acme of opslot-backend-acme is denied by OPSLOT_BACKENDS='-acme'" in line
    listing = three.python("-m", "opslot", "backends", OPSLOT_BACKENDS="-acme")
    assert "denied by OPSLOT_BACKENDS='-acme'" in listing
    (record,) = [
        r
        for r in json.loads(three.python("-m", "opslot", "backends", "--json", OPSLOT_BACKENDS="-acme"))
        if r["name"] == "acme"
    ]
    assert record["denied"] == "denied by OPSLOT_BACKENDS='-acme'"
    assert record["error"] is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-acne", "'acne' is installed (did you mean 'acme'?); installed: acme (of opslot-backend-acme), bolt (of "),
        ("acne", "'acne' is installed (did you mean 'acme'?)"),
        ("opslot-backend-acne", "(did you mean 'opslot-backend-acme'?)"),
        ("acme,-bolt", "does not parse: write the names of backends or distributions with commas between them"),
        ("acme,,bolt", "does not parse: "),
        ("acme;bolt", "does not parse: "),
        ("acme bolt", "does not parse: "),
        ("-", "does not parse: "),
        (",", "does not parse: "),
        ("--acme", "does not parse: "),
        ("-opslot", "opslot itself cannot be denied"),
    ],
)
def test_a_selection_that_is_not_understood_lets_no_code_in(three, value, words):
    code = """
import os, opslot
try:
    opslot.registry()
except opslot.ConfigError as error:
    print(error)
os.environ["OPSLOT_BACKENDS"] = "bolt"
print(len(opslot.registry().offers("op_bolt")))
"""
    out = three.python("-c", code, OPSLOT_BACKENDS=value)
    assert out.startswith(f"environment variable OPSLOT_BACKENDS={value!r}")
    assert words in out
    assert [n for n in ("acme", "bolt", "crow") if ran(three, f"{n}_opslot")] == ["bolt"]  # and the next call works
    assert out.splitlines()[-1] == "1"
    assert f"OPSLOT_BACKENDS={value!r}" in three.python("-m", "opslot", "list", code=1, OPSLOT_BACKENDS=value)


def test_a_backend_does_not_slip_in_under_the_name_of_another(three):
    three.add("evil", MARK + three.offering(), entry="acme", module="evil")
    three.add("bolt", MARK + three.offering(), entry="other", module="bolt")  # a distribution; also a backend's name
    three.add("false", MARK + three.offering(), entry="opslot", module="false")
    out = three.python("-c", "import opslot; opslot.registry()", code=1, OPSLOT_BACKENDS="acme")
    assert "several distributions have a backend 'acme'; name the distribution: evil, opslot-backend-acme" in out
    three.python("-c", "import opslot; opslot.registry()", OPSLOT_BACKENDS="opslot-backend-acme,bolt,opslot")
    assert [ran(three, m) for m in ("evil", "false", "acme_opslot", "bolt", "bolt_opslot")] == [0, 0, 1, 1, 0]
    three.python("-c", "import opslot; opslot.registry()", OPSLOT_BACKENDS="-acme,-bolt")
    assert [ran(three, m) for m in ("evil", "false", "acme_opslot", "bolt", "bolt_opslot")] == [0, 1, 1, 1, 0]


def test_strict_makes_a_broken_backend_fatal_and_the_next_call_starts_anew(three):
    three.add("bad-a", "import no_such_module")
    three.add("bad-b", "raise SystemExit('bye')")
    code = """
import os, opslot
os.environ["OPSLOT_STRICT"] = "true"
for _ in range(2):
    try:
        opslot.registry()
    except opslot.BackendError as error:
        print(error, "|", type(error.__cause__).__name__)
os.environ["OPSLOT_STRICT"] = "0"
print([r.error is None for r in opslot.registry().records if r.distribution == "opslot-backend-acme"])
os.environ["OPSLOT_STRICT"] = "1"
opslot.registry()  # once per process
"""
    first, second, last = three.python("-c", code).splitlines()
    assert first == second
    assert first.startswith(
        "OPSLOT_STRICT is set. These backends failed to load: bad-a (ModuleNotFoundError: No module"
    )
    assert "bad-b (SystemExit: bye)" in first
    assert first.endswith("| ModuleNotFoundError")
    assert last == "[True]"


def test_strict_is_satisfied_by_what_is_denied_and_names_itself_when_it_does_not_parse(three):
    three.add("bad-a", "import no_such_module")
    three.python("-c", "import opslot; opslot.registry()", OPSLOT_STRICT="1", OPSLOT_BACKENDS="-bad-a")
    out = three.python("-c", "import opslot; opslot.registry()", code=1, OPSLOT_STRICT="yes")
    assert "environment variable OPSLOT_STRICT='yes': write 1 or true for strict, 0, false or leave it out" in out
    assert ran(three, "acme_opslot") == 1  # once in the first run; nothing before the variable is understood


@pytest.mark.parametrize("order", list(itertools.permutations(("acme", "zeta", "opslot"))))
def test_a_name_that_two_distributions_offer_whatever_the_order_of_their_metadata(site, order):
    for name in ("acme", "zeta"):
        site.add(name, site.offering("", "kernel('rms_norm', 'shared'),"))
        site.add(f"{name}-twin", site.offering("contract('twin'),"))
    code = f"""
import importlib.metadata as metadata, opslot
from opslot._discovery import discover
order = {order!r}
place = lambda d: order.index(d.name.removesuffix("-twin"))
known = discover(sorted((d for d in metadata.distributions() if d.name.removesuffix("-twin") in order), key=place))
assert [r.distribution for r in known.records if r.error] == ["zeta-twin"], known.records
assert len(known.records) == 5
try:
    known.offer("rms_norm", "standard", "shared")
except opslot.DuplicateError as error:
    print(error)
print(*(known.offer("rms_norm", "standard", f"{{d}}:shared").distribution for d in ("acme", "zeta")))
print(*(str(o) for o in known.offers("rms_norm")))
print(known.choose("rms_norm", "standard", "auto", opslot.Device("cpu")).offer.distribution)
"""
    refused, chosen, listed, automatic = site.python("-c", code).splitlines()
    assert refused.endswith("is offered by several distributions; choose one of: acme:shared, zeta:shared")
    assert chosen == "acme zeta"
    assert listed == "shared (acme 1.0) shared (zeta 1.0)"
    assert automatic == "acme"


def test_two_folders_of_metadata_are_one_backend_the_newest_whole_one_and_it_is_said(site):
    for version in ("1.0", "1.10", "1.9"):
        site.add("acme", site.offering("contract('acme'),"), version=version)
    site.add("acme", site.offering("contract('acme'),"), version="2.0").joinpath("METADATA").unlink()
    code = """
import importlib.metadata as metadata, itertools
from opslot._distributions import offered
acme = [d for d in metadata.distributions() if "acme-" in str(d._path)]
print(len(acme), {o.version for order in itertools.permutations(acme) for o in offered(order)})
"""
    assert site.python("-c", code).strip() == "4 {'1.10'}"
    (record,) = records(site).values()
    assert (record["version"], record["error"]) == ("1.10", None)
    for stale in ("1.0", "1.9", "2.0"):
        assert f"acme-{stale}.dist-info" in record["remark"].split("is used,")[1]
    assert "acme-1.10.dist-info is used" in record["remark"]
    assert "more than once" in site.python("-m", "opslot", "backends")


def test_of_an_editable_and_a_wheel_the_first_on_the_path_counts_as_for_imports(site, tmp_path):
    other = type(site)(tmp_path / "project")
    site.add("acme", site.offering("contract('acme'),"), version="1.0")
    other.add("acme", site.offering("contract('acme'),"), version="2.0", folder="acme.egg-info")
    (record,) = records(site, PYTHONPATH=str(other.path)).values()
    assert record["version"] == "1.0"
    assert "project/acme.egg-info" in record["remark"]
    (record,) = records(other, PYTHONPATH=str(site.path)).values()
    assert record["version"] == "2.0"
    (record,) = records(site, PYTHONPATH=str(site.path)).values()  # one folder that is on the path twice
    assert record["remark"] == ""


def test_empty_broken_and_stale_metadata(site):
    site.add("good", site.offering("contract('good'),"))
    for folder in ("empty-1.0.dist-info", "~opslot_backend-1.0.dist-info"):
        (site.path / folder).mkdir()
    (site.path / "plain.egg-info").write_text("Name: plain\n")
    foreign = site.path / "foreign-1.0.dist-info"
    foreign.mkdir()
    (foreign / "entry_points.txt").write_bytes(b"no section\n\xff\xfe and no text")
    site.add("no-lines", site.offering()).joinpath("entry_points.txt").write_text("[opslot.backends]\nhalf a line\n")
    site.add("no-text", site.offering()).joinpath("entry_points.txt").write_bytes(b"[opslot.backends]\na = b:c \xff")
    site.add("no-value", site.offering()).joinpath("entry_points.txt").write_text("[opslot.backends]\na = !:\n")
    site.add("no-name", site.offering("contract('named'),")).joinpath("METADATA").write_bytes(b"Name: \xff\n")
    site.add("stale", "")
    (site.path / "stale.py").unlink()
    found = records(site)
    assert {name for name, r in found.items() if r["error"] is None} == {"good", "no_name"}
    assert "no_lines-1.0.dist-info/entry_points.txt cannot be read" in found["no-lines"]["error"]
    assert "no_text-1.0.dist-info/entry_points.txt cannot be read" in found["no-text"]["error"]
    assert found["no-value"]["error"] == "SpecError: its entry point a = !: has not the form module:object"
    assert found["stale"]["error"] == (
        "BackendError: its metadata names module 'stale', but there is no 'stale': the installation is stale or "
        "incomplete; reinstall the distribution, or delete what is left of it"
    )
    assert found["stale"]["cause"] == "ModuleNotFoundError"


@pytest.mark.parametrize("how", ["wheel", "editable", "nobody"])
def test_a_stray_init_file_in_the_namespace_is_named_with_its_owner(site, tmp_path, how):
    """The failing backend is installed in another folder than the file that hides it, as an editable one is."""
    stray = type(site)(tmp_path / "stray")
    init = stray.path / "opslot_backends/__init__.py"
    if how == "nobody":
        init.parent.mkdir()
        init.write_text("")
    else:
        info = stray.add("stray", "", module="opslot_backends.__init__", version="3.0")
        (info / "entry_points.txt").unlink()
        if how == "editable":
            (info / "RECORD").write_text("stray.pth,,\n")
            (info / "direct_url.json").write_text(
                json.dumps({"url": init.parents[1].as_uri(), "dir_info": {"editable": True}})
            )
    foreign = stray.path / "foreign-1.0.dist-info"  # that its metadata is malformed is no concern of ours
    foreign.mkdir()
    for name, data in {"METADATA": b"Name: \xff\n", "RECORD": b"\xff,,\n", "direct_url.json": b"[\xff"}.items():
        (foreign / name).write_bytes(data)
    site.add("hidden", site.offering("contract('hidden'),"), module="opslot_backends.hidden")
    error = records(site, PYTHONPATH=str(stray.path))["hidden"]["error"]
    owner = {
        "wheel": "stray 3.0",
        "editable": f"stray 3.0 (editable in {stray.path})",
        "nobody": "no installed distribution",
    }[how]
    assert error == (
        f"BackendError: module 'opslot_backends.hidden' is installed, but {init} of {owner} makes 'opslot_backends' "
        "a regular package, which hides what other distributions put there; delete that file, and report it to its "
        "owner"
    )
    init.unlink()
    assert records(site, PYTHONPATH=str(stray.path))["hidden"]["error"] is None


def test_the_egg_info_that_setuptools_leaves_in_an_editable_project_is_not_odd(site, tmp_path):
    project = type(site)(tmp_path / "project")
    project.add("acme", site.offering("contract('acme'),"), folder="acme.egg-info")
    info = site.add("acme", site.offering("contract('acme'),"))
    paths = [(site, project), (project, site)]
    url = {"url": project.path.as_uri(), "dir_info": {"editable": True}}
    for text, odd in ((json.dumps(url), False), (json.dumps({**url, "dir_info": {}}), True), ("[]", True), ("{", True)):
        (info / "direct_url.json").write_text(text)
        for first, second in paths:
            (record,) = records(first, PYTHONPATH=str(second.path)).values()
            assert record["error"] is None
            assert ("more than once" in record["remark"]) is odd


@pytest.mark.parametrize(
    "source",
    ["from opslot import News", "import opslot; opslot.Backend(api=1, news=())", "import opslot; opslot.news"],
)
def test_a_backend_for_another_opslot_says_which_side_is_older(site, source):
    site.add("later", source, metadata="Requires-Dist: torch\nRequires-Dist: opslot>=7\n")
    error = records(site)["later"]["error"]
    assert error.startswith("BackendError: it requires opslot>=7, and this is opslot 0.")
    assert "pip install 'opslot>=7'" in error


def test_an_entry_point_that_drags_a_library_in_is_named_with_its_time(site):
    site.path.joinpath("vendorlib.py").write_text("import time; time.sleep(0.03)")
    site.add("drag", "import vendorlib, json, packaging, xmlrpc.client\n" + site.offering("contract('drag'),"))
    site.add("light", site.offering("contract('light'),"))
    found = records(site)
    assert found["drag"]["imported"] == ["vendorlib"]
    assert found["drag"]["milliseconds"] >= 30
    assert found["drag"]["error"] is None
    assert found["light"]["imported"] == []
    assert found["light"]["milliseconds"] > 0
    listing = site.python("-m", "opslot", "backends")
    assert "its import brought vendorlib in" in listing.replace("\n", " ")
    (record,) = [r for r in json.loads(site.python("-m", "opslot", "backends", "--json")) if r["name"] == "drag"]
    assert record["imported"] == ["vendorlib"]


def test_discovery_loads_no_library_that_only_judging_or_yaml_needs(site):
    site.add("acme", site.offering("", "kernel('rms_norm', 'a'),").replace("target=", "requires=NEEDS, target=", 1))
    module = site.path / "acme.py"
    module.write_text(
        module.read_text().replace("def reference", "NEEDS = Requires(packages=('v>=1,<2',))\ndef reference")
    )
    code = "import opslot, sys; print(opslot.registry().failures(), {'packaging', 'yaml', 'torch'} & set(sys.modules))"
    assert site.python("-c", code).strip() == "set()"


def test_discovery_writes_nothing(three):
    code = """
import os, sys
writes = []
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if (mode and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            writes.append((event, path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.utime",
                   "tempfile.mkstemp", "tempfile.mkdtemp", "shutil.copyfile", "sqlite3.connect", "subprocess.Popen"):
        writes.append((event, arguments))
sys.addaudithook(watch)
import opslot
opslot.registry()
seen, opened = list(writes), len(writes)
open(os.devnull, "w").close()
assert len(writes) == opened + 1, "the watch is blind"
print([w for w in seen if not str(w[1]).endswith(".ran")])
"""
    # -B: that Python keeps compiled modules is not ours to decide.
    assert three.python("-B", "-c", code, HOME="/nonexistent").strip() == "[]"


def test_without_its_own_metadata_opslot_says_so(site):
    code = """
import sys, importlib.metadata as metadata
real = metadata.distributions
metadata.distributions = lambda **k: (d for d in real(**k) if d.name != "opslot")
import opslot
opslot.registry()
"""
    assert "opslot's own metadata (its dist-info folder) is not on the path" in site.python("-c", code, code=1)


@pytest.mark.slow
def test_errors_for_users_do_not_depend_on_asserts():
    """The suites of the errors once more under -O; pytest rewrites the tests' own asserts, so these still count."""
    import subprocess
    from pathlib import Path

    here = Path(__file__).parent
    suites = [str(here / f"test_{name}.py") for name in ("registry", "config", "requires", "discovery", "slot")]
    done = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites],
        cwd=here.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
