"""What is installed: in this environment, or on a machine of which only a lock file is here."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._errors import ConfigError, SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from packaging.requirements import Requirement


class Installed(ABC):
    """The packages against which a kernel's requirements are judged; in text its own name, such as "uv.lock"."""

    @abstractmethod
    def versions(self, distribution: str) -> tuple[str, ...]:
        """The versions that may be there, "" for one that is not known; none when the distribution is not there."""

    @abstractmethod
    def lacks_module(self, module: str) -> str:
        """Why the top-level module cannot be counted on, or an empty string."""

    @abstractmethod
    def lacks(self, package: str) -> str:
        """Why the requirement "name>=1,<2" does not hold, or an empty string."""

    def _outside(self, package: str) -> tuple[str, ...] | None:
        """The versions that are there but not in the range; None when the distribution is not there at all."""
        required = parse_requirement(package)
        found = self.versions(required.name)
        return tuple(version for version in found if not _admits(required, version)) if found else None

    @staticmethod
    def here() -> "Installed":
        """This environment, as it is at each question: a notebook may install while it runs."""
        return Environment()

    @staticmethod
    def read(path: "str | Path") -> "Installed":
        """The packages of a `uv.lock`, a `pylock.toml` or, when the name ends in .txt, of lines `name==version`.

        Whatever the file names counts as installed: a lock file does not say which of its extras, groups and platforms
        a machine has. Where a package has several versions, a requirement holds only when all of them are in its range.
        Raises `ConfigError` for a file that is missing or malformed.
        """
        from pathlib import Path

        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, a NUL in the path
            raise ConfigError(f"{path}: {error}") from error
        pairs = _pinned(text, str(path)) if path.suffix == ".txt" else _locked(text, str(path))
        packages: dict[str, tuple[str, ...]] = {}
        for name, version in pairs:
            packages[_canonical(name)] = (*packages.get(_canonical(name), ()), version)
        return LockFile(path.name, packages)


class Environment(Installed):
    def __str__(self) -> str:
        return "this environment"

    def versions(self, distribution: str) -> tuple[str, ...]:
        import importlib.metadata

        try:
            # An interrupted installation leaves metadata without a version.
            return (importlib.metadata.version(distribution) or "",)
        except importlib.metadata.PackageNotFoundError:
            return ()

    def lacks_module(self, module: str) -> str:
        import importlib.util

        top = module.partition(".")[0]
        there = sys.modules.get(top) is not None or importlib.util.find_spec(top) is not None
        return "" if there else f"needs the module {module!r}"

    def lacks(self, package: str) -> str:
        outside = self._outside(package)
        if outside == ():
            return ""
        state = "which is not installed" if outside is None else f"{_text(outside)} is installed"
        return f"needs {package}, {state} (pip install '{package}')"


@dataclass(frozen=True)
class LockFile(Installed):
    name: str
    packages: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return self.name

    def versions(self, distribution: str) -> tuple[str, ...]:
        return self.packages.get(_canonical(distribution), ())

    def lacks_module(self, module: str) -> str:
        return f"needs the module {module!r}, and {self} cannot tell whether it is there"

    def lacks(self, package: str) -> str:
        outside = self._outside(package)
        if outside == ():
            return ""
        return f"needs {package}, {f'which is not in {self}' if outside is None else f'{self} has {_text(outside)}'}"


def parse_requirement(text: str) -> "Requirement":
    """A distribution's name with version ranges. Raises `SpecError`, also for what would be ignored here."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise SpecError(f"Requires.packages: {text!r} is not a PEP 508 requirement: {error}") from error
    if requirement.marker or requirement.extras or requirement.url:
        raise SpecError(f"Requires.packages: {text!r} must be a name with version ranges: no marker, extra or URL")
    return requirement


def _admits(required: "Requirement", version: str) -> bool:
    from packaging.version import InvalidVersion

    try:
        return not required.specifier or required.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _text(versions: Iterable[str]) -> str:
    return " and ".join(version or "an unknown version" for version in versions)


def _canonical(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def _locked(text: str, path: str) -> list[tuple[str, str]]:
    import tomllib

    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    packages: Any = tree.get("package", tree.get("packages"))
    if not isinstance(packages, list) or not packages:
        raise ConfigError(f"{path}: it lists no packages; expected a uv.lock, a pylock.toml or a .txt of name==version")
    pairs = []
    for package in packages:
        name, version = (package.get("name"), package.get("version", "")) if isinstance(package, dict) else (None, "")
        if not isinstance(name, str) or not isinstance(version, str):
            raise ConfigError(f"{path}: a package must have a name and a version as strings, got {package!r}")
        pairs.append((name, version))
    return pairs


def _pinned(text: str, path: str) -> list[tuple[str, str]]:
    from packaging.requirements import InvalidRequirement, Requirement

    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        pinned = f" {line}".partition(" #")[0].strip().removesuffix("\\").strip()
        if not pinned or pinned.startswith("--hash="):
            continue
        try:
            requirement = Requirement(pinned)
        except InvalidRequirement:
            requirement = None
        exact = [s.version for s in requirement.specifier if s.operator in ("==", "===")] if requirement else []
        if requirement is None or (not requirement.url and (len(exact) != 1 or "*" in exact[0])):
            raise ConfigError(
                f"{path}, line {number}: {pinned!r} is not name==version. `pip list --format=freeze` writes such lines"
            )
        pairs.append((requirement.name, "" if requirement.url else exact[0]))
    return pairs
