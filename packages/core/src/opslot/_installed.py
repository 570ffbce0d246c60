"""What is installed: the packages against which a kernel's requirements are judged."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._errors import SpecError

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

    def outside(self, package: str) -> tuple[str, ...] | None:
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
        from ._lock_file import read_lock

        return read_lock(path)


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
        except UnicodeDecodeError:  # metadata that another tool wrote
            return ("",)

    def lacks_module(self, module: str) -> str:
        import importlib.util

        top = module.partition(".")[0]
        there = sys.modules.get(top) is not None or importlib.util.find_spec(top) is not None
        return "" if there else f"needs the module {module!r}"

    def lacks(self, package: str) -> str:
        outside = self.outside(package)
        if outside == ():
            return ""
        state = "which is not installed" if outside is None else f"{versions_text(outside)} is installed"
        return f"needs {package}, {state} (pip install '{package}')"


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


def versions_text(versions: Iterable[str]) -> str:
    return " and ".join(version or "an unknown version" for version in versions)
