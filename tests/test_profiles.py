"""What each way to install the workspace brings, and what it must not."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Libraries of one vendor's accelerator, or of one kernel project. Light installs have none of them.
VENDOR = {
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "flash-linear-attention",
    "fla-core",
    "flash-qla",
    "tilelang",
    "tile-kernels",
    "torch-npu",
}
MEMBERS = {
    "opslot": "core",
    "opslot-backend-torch": "backend-torch",
    "opslot-models": "models",
    "opslot-patchgen": "patchgen",
}


def resolved(*options):
    """The distributions that `uv sync` with these options would install, on any of the locked platforms."""
    command = ["uv", "export", "--frozen", "--no-hashes", "--no-annotate", "--no-header", *options]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {re.split(r"[=<>!~ ;\[@]", line)[0] for line in lines if line and not line.startswith(("-e", " "))}
    return names | {Path(line.split()[1]).name for line in lines if line.startswith("-e ./")}


def test_the_default_install_is_light():
    names = resolved("--no-dev")
    assert set(MEMBERS.values()) <= names
    assert {"torch", "transformers"} <= names
    assert not names & VENDOR
    # A developer's has Liger and our own kernels in Triton too, pure Python that runs in Triton's interpreter.
    names = resolved()
    assert {"pytest", "backend-liger", "backend-triton-moe"} <= names
    assert names & VENDOR == {"liger-kernel"}


@pytest.mark.parametrize("member", MEMBERS)
def test_each_light_member_alone_is_light(member):
    names = resolved("--package", member)
    assert "pytest" in names
    assert not names & VENDOR
    if member in ("opslot", "opslot-backend-torch", "opslot-patchgen"):
        assert not {"accelerate", "matplotlib"} & names
    if member == "opslot-backend-torch":
        assert "transformers" not in names


def test_the_core_declares_no_torch():
    assert "torch" not in resolved("--package", "opslot", "--no-dev")
    assert resolved("--package", "opslot", "--no-dev") == {"core", "packaging", "pyyaml"}


@pytest.mark.parametrize(("group", "foreign"), [("cuda", {"torch-npu"}), ("rocm", VENDOR - {"liger-kernel"}),
                                                ("npu", VENDOR - {"torch-npu"})])  # fmt: skip
def test_an_accelerator_group_brings_no_other_vendor(group, foreign):
    assert not resolved("--no-default-groups", "--group", group) & foreign


def test_liger_alone_brings_no_other_vendor():
    names = resolved("--package", "opslot-backend-liger")
    assert names & VENDOR == {"liger-kernel"}
    assert not {"transformers", "accelerate", "matplotlib"} & names


def test_the_triton_backend_alone_brings_no_vendor_and_no_triton_of_its_own():
    """Triton comes with torch, on ROCm as another distribution with the same module."""
    names = resolved("--package", "opslot-backend-triton-moe")
    assert not names & VENDOR
    assert not {"transformers", "accelerate", "matplotlib"} & names
    project = tomllib.loads((ROOT / "packages/backend-triton-moe/pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert not any(requirement.startswith("triton") for requirement in project["dependencies"])


def test_the_lock_names_one_index_which_is_uvs_default():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    assert not {"index", "index-url", "extra-index-url", "find-links"} & set(settings)
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    sources = [package["source"] for package in lock["package"]]
    registries = {source["registry"] for source in sources if "registry" in source}
    assert len(registries) == 1
    assert {key for source in sources for key in source} == {"registry", "editable", "virtual"}
