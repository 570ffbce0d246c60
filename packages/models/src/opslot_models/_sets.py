"""The generated sets that this package ships: one for each version of transformers that was tried, with its lock."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .generated._maths import module_maths

FOLDER = Path(__file__).parent / "generated"


@dataclass(frozen=True)
class GeneratedSet:
    """`package` holds the modules, `transformers` is the version they come from, `families` what its lock records."""

    package: str
    transformers: str
    families: Mapping[str, Mapping[str, Any]]

    @property
    def lock(self) -> Path:
        return FOLDER / self.package.rpartition(".")[2] / "lock.json"

    def module(self, family: str) -> str:
        return f"{self.package}.modeling_{family}"


@cache
def shipped() -> tuple[GeneratedSet, ...]:
    """Every set, the newest first."""
    locks = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("v*_*/lock.json")}
    newest = sorted(locks, key=lambda name: [int(part) for part in name[1:].split("_")], reverse=True)
    return tuple(
        GeneratedSet(f"{__package__}.generated.{name}", locks[name]["transformers"], locks[name]["families"])
        for name in newest
    )


@cache
def known_families() -> tuple[str, ...]:
    """The model types that some set has, whether or not one serves the installed transformers."""
    return tuple(sorted({family for one in shipped() for family in one.families}))


def versions() -> str:
    """The versions of transformers that the sets come from, for a message."""
    return " and ".join(one.transformers for one in shipped())


def serving(family: str, content: bytes) -> GeneratedSet | None:
    """The set whose module of `family` is the whole file with that content, but for comments, docstrings and layout.

    Whole, and not only where the guards stand: a generated module is upstream's whole file, so any other maths in it,
    and any fix, would be that of another version.
    """
    sets = [one for one in shipped() if family in one.families]
    sha256 = hashlib.sha256(content).hexdigest()
    for one in sets:
        if one.families[family]["sha256"] == sha256:
            return one
    try:
        maths = module_maths(content.decode("utf-8"))
    except (SyntaxError, ValueError):  # a UnicodeDecodeError is a ValueError, and so is a null byte
        return None
    return next((one for one in sets if one.families[family]["maths"] == maths), None)
