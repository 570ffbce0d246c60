"""Our wheels and a backend from outside, installed with plain pip in a fresh environment."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    for project in (".", "examples/acme-backend"):
        everything = ["--all-packages"] if project == "." else []
        subprocess.run(["uv", "build", "--wheel", "-q", "-o", out, *everything], cwd=ROOT / project, check=True)
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, wheels):
    """A fresh environment with the wheels, and a folder to run in. Returns a function that runs a command there.

    What is not ours (torch, transformers, pytest, ...) is linked from this environment rather than downloaded again.
    pip sees it as installed, and --no-index proves that what our wheels declare is enough.
    """
    home = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv/bin/python"
    (site,) = (home / "venv/lib").glob("python3*/site-packages")
    vendor = home / "vendor"
    vendor.mkdir()
    (ours,) = {Path(p) for p in sys.path if p.endswith("site-packages") and (Path(p) / "torch").exists()}
    for entry in ours.iterdir():
        if "opslot" not in entry.name and entry.name != "_virtualenv.pth":
            (vendor / entry.name).symlink_to(entry)
    (site / "vendor.pth").write_text(f"{vendor}\n")

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}

    def run(*command, code=0):
        done = subprocess.run(
            [home / "venv/bin" / command[0], *command[1:]],
            cwd=home,
            env={**environment, "PATH": f"{home / 'venv/bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    # Debian's pythons may lack ensurepip, so pip comes from a wheel of its own when this environment has none.
    subprocess.run(["uv", "pip", "install", "-q", "--python", python, "pip"], check=True)
    run("python", "-m", "pip", "install", "--no-index", "-q", *map(str, wheels))
    run("python", "-m", "pip", "check")
    return run


def test_each_wheel_is_complete(wheels):
    names = {wheel.name.split("-")[0]: zipfile.ZipFile(wheel).namelist() for wheel in wheels}
    assert set(names) == {
        "opslot",
        "opslot_backend_acme",
        "opslot_backend_liger",
        "opslot_backend_torch",
        "opslot_backend_triton_moe",
        "opslot_models",
        "opslot_patchgen",
    }
    for distribution, files in names.items():
        assert any(name.endswith("licenses/LICENSE") for name in files), distribution
        assert not any(name.startswith("tests/") for name in files), distribution
        if distribution != "opslot_backend_acme":
            assert any(name.endswith("licenses/NOTICE") for name in files), distribution
            assert any(name.endswith("/py.typed") for name in files), distribution
    for distribution in ("opslot_backend_liger", "opslot_backend_torch", "opslot_backend_triton_moe"):
        assert "opslot_backends/__init__.py" not in names[distribution]
    generated = [name for name in names["opslot_models"] if "modeling_qwen3_moe" in name]
    assert {Path(name).suffix for name in generated} == {".py", ".patch"}


def test_the_outside_backend_is_found_and_explained(fresh):
    records = {record["distribution"]: record for record in json.loads(fresh("opslot", "backends", "--json"))}
    assert records["opslot-backend-acme"]["kernels"] == ["rms_norm/standard:acme", "relu_squared/standard:acme"]
    assert records["opslot-backend-acme"]["contracts"] == ["relu_squared/standard"]
    assert "relu(x)^2" in fresh("opslot", "explain", "relu_squared")


def test_the_check_finds_nothing_wrong_with_any_wheel(fresh):
    for distribution in ("opslot", "opslot-backend-acme", "opslot-backend-torch"):
        out = fresh("opslot", "backends", "check", distribution)
        assert "not checked" not in out
        assert out.endswith("\n0 problems\n")


def test_its_own_tests_pass(fresh):
    tests = ROOT / "examples/acme-backend/tests"
    assert " passed" in fresh("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))


def test_the_main_job_picks_it_up(fresh):
    fresh("opslot-train", "--steps", "2", "--no-compare", "--output", "out")
    binding = json.loads(fresh("python", "-c", "print(open('out/binding.json').read())"))
    kernels = {(slot["op"], slot["kernel"], slot["distribution"]) for slot in binding["slots"]}
    assert ("rms_norm", "acme", "opslot-backend-acme") in kernels
    assert ("moe_experts", "torch", "opslot-backend-torch") in kernels
    assert binding["environment"]["opslot-backend-acme"] == "1.0.0"


def test_models_train_without_any_backend_and_auto_says_why(fresh):
    backends = [f"opslot-backend-{name}" for name in ("acme", "liger", "torch", "triton-moe")]
    fresh("python", "-m", "pip", "uninstall", "-qy", *backends)
    out = fresh("opslot-train", "--steps", "2", "--no-compare", "--output", "out")
    assert "auto: no installed backend offers a kernel" in out
    binding = json.loads(fresh("python", "-c", "print(open('out/binding.json').read())"))
    assert {slot["kernel"] for slot in binding["slots"]} == {"eager"}
