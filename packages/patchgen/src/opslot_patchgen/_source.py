"""One upstream file, read as bytes from a tree that is never imported."""

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from opslot_patchgen._errors import SourceError, TargetGone

_VERSION = re.compile(r'^__version__ = "(\d+)\.(\d+)(\.[^"]*)?"$', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """The text of one module and what identifies it. `label` is its path below the folder that holds the package."""

    module: str
    path: Path
    label: str
    version: str
    sha256: str
    text: str

    @property
    def folder(self) -> str:
        return set_name(self.version)


def set_name(version: str) -> str:
    """The name of the folder for files generated from a version: one per minor release."""
    major, minor = version.split(".")[:2]
    return f"v{major}_{minor}"


def package_folder(package: str) -> Path | None:
    """The folder of a dotted package. Only its top level is looked up, which runs none of its code."""
    top, *rest = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *rest)


def read_source(module: str, root: Path | None = None) -> Source:
    """Read `module` from the tree at `root` (the folder that holds the package), or from the installed package.

    Raises `TargetGone` when the package has no such module, `SourceError` when it or the package cannot be read.
    """
    top, *rest = module.split(".")
    folder = _folder(top, root)
    version = _version(folder)
    path = folder.joinpath(*rest).with_suffix(".py")
    if not path.is_file():
        raise TargetGone(f"{path}: {top} {version} has no module {module}")
    raw = path.read_bytes()
    return Source(
        module=module,
        path=path,
        label=f"{module.replace('.', '/')}.py",
        version=version,
        sha256=hashlib.sha256(raw).hexdigest(),
        text=_plain_text(path, raw),
    )


def read_version(root: Path | None = None) -> str:
    """The version of the transformers package at `root`, or of the installed one. Raises `SourceError` without it."""
    return _version(_folder("transformers", root))


def _folder(package: str, root: Path | None) -> Path:
    folder = package_folder(package) if root is None else root / package
    if folder is None:
        raise SourceError(f"{package} is not installed; install it or give the folder that holds it with --source")
    return folder


def _version(folder: Path) -> str:
    path = folder / "__init__.py"
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    found = _VERSION.search(path.read_bytes().decode("utf-8"))
    if found is None:
        raise SourceError(f'{path}: no line `__version__ = "MAJOR.MINOR..."`')
    return found.group(0).split('"')[1]


def _plain_text(path: Path, raw: bytes) -> str:
    """Decode, refusing what would make lines and columns mean different things to us and to Python."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        number = raw[: error.start].count(b"\n") + 1
        raise SourceError(f"{path}:{number}: not UTF-8: {error}") from error
    if text.startswith("\ufeff"):
        raise SourceError(f"{path}:1: starts with a byte order mark")
    if not text.endswith("\n"):
        number = text.count("\n") + 1
        raise SourceError(f"{path}:{number}: does not end with a newline")
    for number, line in enumerate(text.split("\n"), start=1):
        if "\r" in line:
            raise SourceError(f"{path}:{number}: carriage return")
        if "\f" in line:
            raise SourceError(f"{path}:{number}: form feed")
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise SourceError(f"{path}:{number}: indented with a tab")
        if "# opslot" in line:
            raise SourceError(f"{path}:{number}: already holds an opslot marker")
    return text
