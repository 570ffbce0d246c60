"""Judging by the packages of this environment, and of another machine's lock file."""

import importlib.metadata
import sys
from pathlib import Path

import opslot
import pytest
from opslot import Backend, ConfigError, Device, Installed, KernelUnavailable, Requires, SpecError

H200 = Device("cuda", "sm_90", "NVIDIA H200")
LOCK = """
version = 1
[[package]]
name = "acme"
version = "2.0"
[[package]]
name = "Torch_NPU"
version = "2.13.0.post1"
[[package]]
name = "numpy"
version = "2.4.6"
[[package]]
name = "numpy"
version = "2.5.5"
[[package]]
name = "dynamic"
source = { editable = "." }
"""


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "uv.lock"
    path.write_text(LOCK, encoding="utf-8")
    return Installed.read(path)


def reasons(installed, *packages, **fields):
    return Requires(packages=packages, **fields).unmet(H200, installed)


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("acme>=2,<3", None),
        ("acme", None),
        ("acme<2", "needs acme<2, uv.lock has 2.0"),
        ("torch-npu==2.13.0.*", None),
        ("numpy>=2.4", None),
        # A fork of the lock: which of the two a machine gets depends on its Python.
        ("numpy>=2.5", "needs numpy>=2.5, uv.lock has 2.4.6"),
        ("numpy<2", "needs numpy<2, uv.lock has 2.4.6 and 2.5.5"),
        ("liger-kernel>=0.8", "needs liger-kernel>=0.8, which is not in uv.lock"),
        ("dynamic", None),
        ("dynamic>=1", "needs dynamic>=1, uv.lock has an unknown version"),
        ("torch", "needs torch, which is not in uv.lock"),  # whatever is installed here
    ],
)
def test_a_lock_file_is_judged_by_what_it_names(lock, package, reason):
    assert reasons(lock, package) == (() if reason is None else (reason,))


def test_a_lock_file_cannot_tell_of_modules(lock):
    assert reasons(lock, modules=("json",)) == ("needs the module 'json', and uv.lock cannot tell whether it is there",)
    assert reasons(Installed.here(), modules=("json",)) == ()


@pytest.mark.parametrize("distribution", ["triton", "pytorch-triton-rocm"])
def test_a_lock_file_can_tell_of_triton_by_each_name(distribution, tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text(f"{distribution}==3.6.0\n")
    assert reasons(Installed.read(path), modules=("triton",)) == ()
    path.write_text("torch==2.11.0\n")
    (reason,) = reasons(Installed.read(path), modules=("triton",))
    assert reason.startswith("needs the module 'triton', and none of triton, pytorch-triton, ")


def test_this_repositorys_own_lock_file_is_read():
    lock = Installed.read(Path(__file__).parents[3] / "uv.lock")
    assert reasons(lock, "torch>=2.11,<2.15", "pyyaml>=6", "opslot") == ()
    assert len(reasons(lock, "torch<2")) == 1


def test_a_pylock_file_is_read(tmp_path):
    path = tmp_path / "pylock.toml"
    path.write_text('lock-version = "1.0"\n[[packages]]\nname = "acme"\nversion = "2.0"\n', encoding="utf-8")
    assert reasons(Installed.read(path), "acme<2") == ("needs acme<2, pylock.toml has 2.0",)


PINNED = """
# written by pip freeze, or by uv export
acme==2.0
torch==2.13.0+rocm7.1 ; sys_platform == 'linux' \\
    --hash=sha256:00  # a comment
local @ file:///somewhere/local-1.0.whl
"""


def test_pinned_requirements_are_read(tmp_path):
    path = tmp_path / "machine.txt"
    path.write_text(PINNED, encoding="utf-8")
    machine = Installed.read(path)
    assert reasons(machine, "acme==2.*", "torch==2.13.0", "local") == ()
    assert reasons(machine, "torch>=2.14", "local>=1", "other") == (
        "needs torch>=2.14, machine.txt has 2.13.0+rocm7.1",
        "needs local>=1, machine.txt has an unknown version",
        "needs other, which is not in machine.txt",
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("uv.lock", None, "No such file"),
        ("uv.lock", "[[package]", "not valid TOML"),
        ("uv.lock", "", "lists no packages"),
        ("uv.lock", "package = []", "lists no packages"),
        ("uv.lock", "package = 1", "lists no packages"),
        ("uv.lock", "package = ['acme']", "must have a name and a version as strings, got 'acme'"),
        ("uv.lock", "[[package]]\nversion = '1'", "must have a name"),
        ("uv.lock", "[[package]]\nname = 'acme'\nversion = 1", "must have a name"),
        ("uv.lock", b"\xff", "can't decode"),
        ("a.txt", "acme==1\nacme>=2", r"line 2: 'acme>=2' is not name==version"),
        ("a.txt", "acme==1.*", r"line 1: .*is not name==version"),
        ("a.txt", "-e .", r"line 1: '-e \.' is not name==version.*pip list --format=freeze"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_named_error(tmp_path, name, text, problem):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=problem) as caught:
        Installed.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("package", ["torch; python_version >= '3.12'", "torch[cuda]>=2", "torch @ file:///torch.whl"])
def test_a_requirement_of_which_a_part_would_be_ignored_is_refused(package):
    with pytest.raises(SpecError, match="no marker, extra or URL"):
        Requires(packages=(package,))


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("2.13.0+rocm7.1", ()),
        ("2.14.0rc1", ()),
        ("1.0", ("needs fake>=2, 1.0 is installed (pip install 'fake>=2')",)),
        (None, ("needs fake>=2, an unknown version is installed (pip install 'fake>=2')",)),
        ("not a version", ("needs fake>=2, not a version is installed (pip install 'fake>=2')",)),
    ],
)
def test_the_versions_of_this_environment(monkeypatch, version, outcome):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert reasons(None, "fake>=2") == outcome


def test_what_is_installed_meanwhile_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    needs = Requires(packages=("just-now>=1",), modules=("just_now",))
    assert len(needs.unmet(H200)) == 2
    (tmp_path / "just_now.py").touch()
    (tmp_path / "just_now-1.0.dist-info").mkdir()
    (tmp_path / "just_now-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: just-now\nVersion: 1.0\n")
    importlib.invalidate_caches()  # as pip's users must in one process
    assert needs.unmet(H200) == ()


def test_a_module_that_is_blocked_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert Requires(modules=("blocked",)).unmet(H200) == ("needs the module 'blocked'",)


def test_the_registry_answers_for_another_machine(known, make_kernel, lock):
    other = make_kernel("other", requires=Requires(packages=("numpy>=2.5",)))
    known.add(Backend(api=1, kernels=(other,)), "acme", "2.0")
    assert known.list_available("scale", device=H200, installed=lock) == ["eager", "cuda", "fast", "half", "slow"]
    assert known.choose("scale", "standard", "auto", H200, installed=lock).offer.spec.name == "cuda"
    with pytest.raises(KernelUnavailable, match=r"cannot run with uv.lock: needs numpy>=2.5, uv.lock has 2.4.6"):
        known.choose("scale", "standard", "other", H200, installed=lock)
    with pytest.raises(KernelUnavailable, match=r"Usable with uv.lock: eager, cuda, fast, half, slow"):
        known.choose("scale", "standard", "other", H200, installed=lock)


def test_a_backend_that_the_other_machine_lacks_offers_nothing_there(known, make_kernel, lock):
    known.add(Backend(api=1, kernels=(make_kernel("source"),)), "dynamic", "3.0")
    known.add(Backend(api=1, kernels=(make_kernel("newer"),)), "numpy", "2.5.5")
    known.add(Backend(api=1, kernels=(make_kernel("absent"),)), "elsewhere", "1.0")
    known.register(make_kernel("mine"))
    usable = known.list_available("scale", device=H200, installed=lock)
    assert usable == ["eager", "cuda", "fast", "half", "mine", "slow", "source"]
    with pytest.raises(KernelUnavailable, match=r"needs elsewhere==1.0, which is not in uv.lock"):
        known.choose("scale", "standard", "absent", H200, installed=lock)
    with pytest.raises(KernelUnavailable, match=r"needs numpy==2.5.5, uv.lock has 2.4.6"):
        known.choose("scale", "standard", "newer", H200, installed=lock)
    assert "elsewhere" not in str(known.choose("scale", "standard", "auto", H200))


def test_installed_is_public():
    assert opslot.Installed is Installed
