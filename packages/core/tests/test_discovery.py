"""Discovery over folders that look like installed distributions, in fresh interpreters where that matters."""

import importlib.metadata
import subprocess
import sys
import textwrap
import threading

import opslot
import pytest
from opslot import _discovery

CONTRACT = """
    from opslot import *
    def reference(x): return x
    def contract(op): return OpContract(op=op, variant="standard", summary="", reference=reference, samples=reference,
                                        tolerances={})
    def kernel(op, name): return KernelSpec(op=op, name=name, target="nowhere:at_all", priority=Priority.PORTABLE)
"""
TAIL = "    BACKEND = Backend(api=1, contracts=({}), kernels=({}))\n"


def good(op):
    return CONTRACT + TAIL.format(f"contract('{op}'),", f"kernel('{op}', 'good'),")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a module and its metadata as an installer would leave them; returns what discovery makes of them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution, source, module=None, folder=None, entry="BACKEND", version="1.0"):
        module = module or distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = tmp_path / (folder or f"{module}-{version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[opslot.backends]\n{distribution} = {module}:{entry}\n")

    def discover():
        monkeypatch.setattr(_discovery, "_registry", None)  # as while registry() runs
        monkeypatch.setattr(_discovery, "_loading", True)
        return _discovery.discover(importlib.metadata.distributions(path=[str(tmp_path)]))

    yield write, discover
    for module in [name for name in sys.modules if name.startswith("bk")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module", ModuleNotFoundError),
        ("import opslot\nopslot.registry()", opslot.SpecError),
        ("class Panic(BaseException): pass\nraise Panic('extension module')", BaseException),
        ("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute", Exception),
        ("raise ValueError('a lone surrogate: \\udc80')", ValueError),
        (
            "from opslot import *\nBACKEND = Backend(api=1, kernels=(KernelSpec(op=['x'], name='n', target='a:b'),))",
            opslot.SpecError,
        ),
        ("raise SystemExit('bye')", SystemExit),
        ("raise OSError('undefined symbol')", OSError),
        ("BACKEND = object()", opslot.SpecError),
        ("from opslot import Backend\nBACKEND = Backend(api=7)", opslot.SpecError),
        ("from opslot import Backend\nBACKEND = Backend(api=1, news=())", TypeError),
        (good("half") + "    raise RuntimeError('half way')", RuntimeError),
        (CONTRACT + TAIL.format("contract('half'), contract('half')", ""), opslot.DuplicateError),
        (
            CONTRACT + TAIL.format("contract('half'),", "kernel('half', 'k'), kernel('half', 'k')"),
            opslot.DuplicateError,
        ),
        (CONTRACT + TAIL.format("", "kernel('missing', 'k'),"), opslot.UnknownOp),
    ],
)
def test_a_broken_backend_is_a_record_and_the_others_work(install, source, error):
    write, discover = install
    write("bk-a", good("first"))
    write("bk-broken", source)
    write("bk-c", good("last"))
    found = discover()
    assert [str(contract) for contract in found.contracts()] == ["first/standard", "last/standard"]
    (broken,) = [record for record in found.records if record.error]
    assert (broken.distribution, broken.version) == ("bk-broken", "1.0")
    assert isinstance(broken.error, error)
    (broken.message + broken.traceback + found.failures()).encode("utf-8")  # whatever it holds, it can be printed
    assert type(broken.error).__name__ in broken.traceback
    with pytest.raises(opslot.BackendError, match=r"backend 'bk-broken' of bk-broken 1\.0 failed to load") as caught:
        found.offer("first", "standard", "bk-broken")
    assert caught.value.__cause__ is broken.error
    with pytest.raises(opslot.UnknownKernel, match=r"These backends failed to load: bk-broken \("):
        found.offer("first", "standard", "another")


def test_a_kernel_may_be_for_a_contract_that_a_later_backend_brings(install):
    write, discover = install
    write("bk-a", CONTRACT + TAIL.format("", "kernel('late', 'k'),"))
    write("bk-z", good("late"))
    found = discover()
    assert [offer.spec.name for offer in found.offers("late")] == ["good", "k"]
    assert [record.error for record in found.records] == [None, None]


def test_metadata_that_an_interrupted_installation_left_harms_nobody(install, tmp_path):
    write, discover = install
    write("bk-a", good("one"))
    write("bk-b", good("two"))
    (tmp_path / "bk_b-1.0.dist-info/METADATA").unlink()
    assert len(discover().contracts()) == 2


def test_two_metadata_folders_of_one_project_are_one_backend(install):
    write, discover = install
    write("bk-a", good("one"))
    write("bk-a", good("one"), folder="bk_a-1.0.egg-info-like.dist-info")
    found = discover()
    assert [record.error for record in found.records] == [None]


def test_the_process_registry_is_one_object_for_all_threads(monkeypatch):
    monkeypatch.setattr(_discovery, "_registry", None)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(opslot.registry())) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(item) for item in seen}) == 1


def run(code, *flags):
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_import_opslot_loads_neither_torch_nor_a_backend():
    loaded = run("import opslot, sys; print(*sys.modules)").split()
    assert not {"torch", "numpy", "yaml", "packaging", "opslot.ops", "opslot_backends"} & set(loaded)


def test_discovery_loads_no_torch():
    assert run("import opslot, sys; opslot.registry(); print('torch' in sys.modules)").strip() == "False"


def test_discovery_works_without_asserts():
    code = "import opslot; print(len(opslot.registry().contracts()) > 0)"
    optimised = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert optimised.stdout.strip() == "True"


def test_every_public_name_is_there_and_typed():
    import ast
    from pathlib import Path

    tree = ast.parse(Path(opslot.__file__).read_text(encoding="utf-8"))
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed - {None} == set(opslot.__all__)
    assert all(getattr(opslot, name) is not None for name in opslot.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        opslot.nothing  # noqa: B018
