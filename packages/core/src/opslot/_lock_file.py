"""Lock files: what is installed on a machine that is not here."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._distributions import normal
from ._errors import ConfigError
from ._installed import Installed, versions_text

# Modules that several distributions bring, of which an environment has one: torch's builds for other devices bring
# Triton under other names.
_PROVIDERS = {"triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")}


@dataclass(frozen=True)
class LockFile(Installed):
    name: str
    packages: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return self.name

    def versions(self, distribution: str) -> tuple[str, ...]:
        return self.packages.get(normal(distribution), ())

    def lacks_module(self, module: str) -> str:
        providers = _PROVIDERS.get(module, ())
        if any(self.versions(distribution) for distribution in providers):
            return ""
        if providers:
            return f"needs the module {module!r}, and none of {', '.join(providers)} is in {self}"
        return f"needs the module {module!r}, and {self} cannot tell whether it is there"

    def lacks(self, package: str) -> str:
        outside = self.outside(package)
        if outside == ():
            return ""
        state = f"which is not in {self}" if outside is None else f"{self} has {versions_text(outside)}"
        return f"needs {package}, {state}"


def read_lock(given: str | Path) -> LockFile:
    """See `Installed.read`."""
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, a NUL in the path
        raise ConfigError(f"{path}: {error}") from error
    pairs = _pinned(text, str(path)) if path.suffix == ".txt" else _locked(text, str(path))
    packages: dict[str, tuple[str, ...]] = {}
    for name, version in pairs:
        packages[normal(name)] = (*packages.get(normal(name), ()), version)
    return LockFile(path.name, packages)


def _locked(text: str, path: str) -> list[tuple[str, str]]:
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
