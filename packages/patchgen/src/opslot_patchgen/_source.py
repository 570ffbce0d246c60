"""One upstream file, read as bytes from a tree that is never imported."""

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from opslot_patchgen._errors import SourceError

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
        """The name of the folder for files generated from this version: one per minor release."""
        major, minor = self.version.split(".")[:2]
        return f"v{major}_{minor}"


def package_folder(package: str) -> Path | None:
    """The folder of a dotted package. Only its top level is looked up, which runs none of its code."""
    top, *rest = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *rest)


def read_source(module: str, root: Path | None = None) -> Source:
    """Read `module` from the tree at `root` (the folder that holds the package), or from the installed package."""
    top, *rest = module.split(".")
    folder = package_folder(top) if root is None else root / top
    if folder is None:
        raise SourceError(f"{top} is not installed; install it or give the folder that holds it with --source")
    path = folder.joinpath(*rest).with_suffix(".py")
    raw = _read(path)
    return Source(
        module=module,
        path=path,
        label=f"{module.replace('.', '/')}.py",
        version=_version(folder),
        sha256=hashlib.sha256(raw).hexdigest(),
        text=_plain_text(path, raw),
    )


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    return path.read_bytes()


def _version(folder: Path) -> str:
    path = folder / "__init__.py"
    found = _VERSION.search(_read(path).decode("utf-8"))
    if found is None:
        raise SourceError(f'{path}: no line `__version__ = "MAJOR.MINOR..."`')
    return found.group(0).split('"')[1]


def _plain_text(path: Path, raw: bytes) -> str:
    """Decode, refusing what would make lines and columns mean different things to us and to Python."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8: {error}") from error
    if text.startswith("\ufeff"):
        raise SourceError(f"{path}:1: starts with a byte order mark")
    if not text.endswith("\n"):
        raise SourceError(f"{path}: does not end with a newline")
    for number, line in enumerate(text.split("\n"), start=1):
        if "\r" in line:
            raise SourceError(f"{path}:{number}: carriage return")
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise SourceError(f"{path}:{number}: indented with a tab")
        if "# opslot" in line:
            raise SourceError(f"{path}:{number}: already holds an opslot marker")
    return text
