"""A package of specs: one module per family, named for it, each with a `SPEC`. Others begin with an underscore."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from opslot_patchgen._errors import SpecError
from opslot_patchgen._source import package_folder
from opslot_patchgen._spec import ModelSpec

# What running a module of plain data can raise, apart from our own SpecError.
# What a spec raises when it is wrong; SystemExit would end a check with the exit code of a fresh one.
_BROKEN = (
    ImportError,
    SyntaxError,
    NameError,
    TypeError,
    AttributeError,
    ValueError,
    LookupError,
    RuntimeError,
    AssertionError,
    SystemExit,
)
# What a folder of specs is called while it is loaded.
_PACKAGE = "_opslot_specs"


@dataclass(frozen=True)
class SpecPackage:
    name: str
    folder: Path
    specs: tuple[ModelSpec, ...]

    @property
    def generated(self) -> Path:
        """Generated files lie beside the specs."""
        return self.folder.parent / "generated"


def load_specs(package: str) -> SpecPackage:
    """Load every spec by its path: the parent packages, which may import torch, are not run."""
    folder = package_folder(package)
    if folder is None or not folder.is_dir():
        raise SpecError(f"{package}: no such package")
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    if not paths:
        raise SpecError(f"{folder}: no specs")
    with _as_package(folder):
        return SpecPackage(package, folder, tuple(_load(path) for path in paths))


@contextmanager
def _as_package(folder: Path) -> Iterator[None]:
    """Inside, `from ._shared import ...` works between the specs of `folder`: it is a package without parents."""
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


def _load(path: Path) -> ModelSpec:
    located = importlib.util.spec_from_file_location(f"{_PACKAGE}.{path.stem}", path)
    assert located is not None
    assert located.loader is not None
    module = importlib.util.module_from_spec(located)
    try:
        located.loader.exec_module(module)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
    except _BROKEN as error:
        raise SpecError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"{path}: has no SPEC that is a ModelSpec")
    if spec.family != path.stem:
        raise SpecError(f"{path}: is named for one family and specifies another, {spec.family}")
    return spec
