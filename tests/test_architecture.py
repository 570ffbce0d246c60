"""Who may import whom, and other rules that hold for the whole repository, read from the source alone."""

import ast
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import opslot
import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
GENERATED = ROOT / "packages/models/src/opslot_models/generated"
SOURCES = [path for member in MEMBERS for path in sorted(member.glob("src/**/*.py")) if GENERATED not in path.parents]

# Module roots each package may import besides the standard library and itself.
MAY_IMPORT = {
    "core": {"packaging", "yaml", "torch", "matplotlib", "triton", "numpy"},
    "backend-liger": {"opslot", "torch", "liger_kernel"},
    "backend-torch": {"opslot", "torch"},
    "backend-triton-moe": {"opslot", "torch", "triton"},
    "models": {"opslot", "torch", "transformers", "matplotlib", "opslot_patchgen"},
    "patchgen": {"libcst"},
}


def member_of(path):
    return path.relative_to(ROOT / "packages").parts[0]


def imports(tree):
    """(root, whole module, whether at module level) of every import that is not for type checkers alone."""
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    local = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], alias.name, id(node) not in local) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], node.module, id(node) not in local


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "packages")))
def test_imports(path):
    member = member_of(path)
    own = {folder.name for folder in (ROOT / "packages" / member / "src").iterdir()}
    for root, module, at_module_level in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if root in sys.stdlib_module_names:
            continue
        assert root in MAY_IMPORT[member] | own, f"{member} may not import {module}"
        if member != "core":
            assert not module.startswith("opslot._"), f"{module} is private to the core"
        tool = root == "packaging" and "tools" in path.parts  # which a training process does not import
        if root in ("triton", "numpy") and member == "core":
            assert path.name == "_interpreter.py", "only the fixture for Triton kernels knows Triton, and its numpy"
        for_kernels = path.name == "autograd.py"  # which nothing but kernels imports
        if member == "core" and root in MAY_IMPORT["core"] and not tool and not for_kernels:
            assert not at_module_level, f"the core imports {module} inside functions only"
        if root == "opslot_patchgen" and member == "models":
            generates = path.name == "_generation.py" and not at_module_level  # where the extra patchgen is installed
            assert "patches" in path.parts or generates, "only the specs import patchgen"
        if member == "core" and "tools" in path.parts and path.name != "measure.py":  # which runs kernels
            assert module != "torch"


def test_the_core_runtime_does_not_import_its_tools():
    for path in (ROOT / "packages/core/src/opslot").glob("_[a-z]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tools"
            assert not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("opslot.tools")


def test_there_is_one_broad_except():
    broad = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                if {"Exception", "BaseException", "everything"} & set(caught.strip("()").split(", ")):
                    broad.append(path.name)
    assert broad == ["_attempt.py"]


def test_the_backend_namespace_has_no_init_file():
    assert list(ROOT.glob("packages/*/src/opslot_backends/__init__.py")) == []


@pytest.mark.parametrize("record", opslot.registry().records, ids=lambda record: record.name)
def test_every_target_exists(record):
    """Strings escape the type checker: find the module without importing it, and the function in its source."""
    for spec in record.backend.kernels:
        for target in (spec.target, spec.nested or spec.target):
            module, _, name = target.partition(":")
            tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, spec


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_each_distribution_is_complete(member):
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))
    module = project["tool"]["uv"]["build-backend"]["module-name"]
    assert project["project"]["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (member / "NOTICE").read_bytes() == (ROOT / "NOTICE").read_bytes()
    assert (member / "src" / module.replace(".", "/") / "py.typed").is_file()
    assert len((member / "README.md").read_text(encoding="utf-8").splitlines()) > 5
    extras = [r for group in project["project"].get("optional-dependencies", {}).values() for r in group]
    for requirement in project["project"]["dependencies"] + extras:
        if requirement.startswith("opslot"):
            assert "~=0.1.0" in requirement, f"{member.name}: {requirement} has no range"


@pytest.mark.parametrize("record", opslot.registry().records, ids=lambda record: record.name)
def test_what_earned_a_priority_is_a_result_that_is_kept(record):
    for spec in record.backend.kernels:
        assert spec.measured or spec.priority <= opslot.Priority.PORTABLE, spec
        if not spec.measured:
            continue
        data = json.loads((ROOT / spec.measured).read_text(encoding="utf-8"))
        if isinstance(data, list):  # what `opslot bench --json` prints; benchmarks have forms of their own
            assert (spec.op, spec.variant) in {(report["op"], report["variant"]) for report in data}, spec


def test_the_changelog_names_this_version():
    assert f"## {opslot_version()}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def opslot_version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
