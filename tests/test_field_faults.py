"""docs/field-faults.md: every class is there, and every test that it names."""

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "core": "core",
    "liger": "backend-liger",
    "torch": "backend-torch",
    "triton": "backend-triton-moe",
    "models": "models",
    "patchgen": "patchgen",
}
CLASSES = [f"C{number:02}" for number in range(1, 25)]
ROWS = {
    cells[0]: cells
    for line in (ROOT / "docs/field-faults.md").read_text(encoding="utf-8").splitlines()
    if re.fullmatch(r"C\d\d", (cells := [cell.strip() for cell in line.strip("|").split("|")])[0])
}


def names_in(file):
    """Functions and classes that hold tests, by name."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name.lower().startswith("test")]


def test_every_class_has_its_row():
    assert list(ROWS) == CLASSES
    assert all(len(cells) == 4 for cells in ROWS.values())


@pytest.mark.parametrize("name", CLASSES)
def test_every_test_that_is_named_exists(name):
    _, _, tests, waits = ROWS[name]
    named = re.findall(r"`([a-z]+)/(test_\w+\.py)::([\w*]+)`", tests)
    assert len(named) == tests.count("::")
    for folder, file, pattern in named:
        found = names_in(ROOT / "packages" / FOLDERS[folder] / "tests" / file)
        assert any(fnmatchcase(test, pattern) for test in found), f"{file} has no {pattern}"
    own = [pattern for _, _, pattern in named if pattern.startswith(f"test_{name.lower()}_")]
    assert own or waits, f"{name} has no test of its own, and nothing says why"


def test_every_test_that_is_named_after_a_class_is_in_its_row():
    for file in ROOT.glob("packages/*/tests/test_*.py"):
        folder = next(short for short, member in FOLDERS.items() if member == file.parts[-3])
        for test in names_in(file):
            if match := re.match(r"test_(c\d\d)_", test):
                patterns = re.findall(rf"`{folder}/{file.name}::([\w*]+)`", ROWS[match[1].upper()][2])
                assert any(fnmatchcase(test, pattern) for pattern in patterns), f"{file.name}::{test}"
