"""Generating one family from the installed transformers into the user's cache, if its maths is known."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

from opslot import OpslotError

from . import _cache
from ._installed import installed
from ._sets import FOLDER, shipped, versions

if TYPE_CHECKING:
    from opslot_patchgen import ModelSpec, Source, SpecPackage

_SPECS = "opslot_models.patches"


def provide(family: str) -> _cache.Entry:
    """The module of a family for the installed transformers, from the cache or else generated into it.

    Raises `OpslotError` without opslot-patchgen, when the maths of a target is in no set, when generation refuses the
    source, and for a cache that cannot be used.
    """
    key = _key(family)
    entry = _cache.read(family, key)
    if entry is None:
        content = _generate(family)
        if _key(family) != key:
            raise OpslotError(f"transformers changed while {family} was generated from it: start again")
        entry = _cache.write(family, key, content)
    return entry


def _key(family: str) -> str:
    """What an entry depends on: the source, the generator, the specs, and the locks that say what maths is known."""
    try:
        generator = importlib.metadata.version("opslot-patchgen")
    except importlib.metadata.PackageNotFoundError as error:
        raise OpslotError(
            f"{_installed_is()}, and no generated set serves its {family}: the sets are from {versions()}, and the "
            "file differs from theirs in more than comments. Install one of these; or pip install "
            "'opslot-models[patchgen]', which generates it from the installed file if the maths of what opslot patches "
            f"there is known (`opslot-patchgen drift --to {installed().version}` says what differs)"
        ) from error
    read = [*sorted((Path(__file__).parent / "patches").glob("*.py")), *sorted(FOLDER.glob("v*_*/lock.json"))]
    content = [installed().modeling(family), *(path.read_bytes() for path in read)]
    hashes = [hashlib.sha256(data).hexdigest() for data in content]
    return hashlib.sha256(json.dumps([family, generator, [path.name for path in read], hashes]).encode()).hexdigest()


def _generate(family: str) -> bytes:
    from opslot_patchgen import PatchgenError, build, load_specs, read_source

    try:
        package = load_specs(_SPECS)
        (spec,) = (spec for spec in package.specs if spec.family == family)
        source = read_source(spec.source, installed().folder.parent)
        text = build(spec, source, package.name).text
        report = _unknown_maths(package, spec, source)
    except PatchgenError as error:
        raise OpslotError(f"{_installed_is()}, and its {family} cannot be generated: {error}") from error
    if report is not None:
        raise OpslotError(
            f"{_installed_is()}, and what opslot patches in its {family} is not as in any set (they are from "
            f"{versions()}), so a kernel may not fit. Install one of these, or use {family} without opslot.\n{report}"
        )
    return text.encode("utf-8")


def _unknown_maths(package: "SpecPackage", spec: "ModelSpec", source: "Source") -> str | None:
    """How the source differs from the set that is nearest to it, or None where each target is as in some set.

    That is its maths, its parameters and decorators, and those of what it depends on. Each target by itself, since a
    kernel stands in for one.
    """
    from opslot_patchgen import Drift, as_text, family_drift, generated_set, lock_family

    sets = [generated_set(package, one.lock.parent.name) for one in shipped() if spec.family in one.families]
    locked = [one.lock.families[spec.family] for one in sets]
    now = lock_family(spec, source).targets
    known = [{name for name, target in now.items() if family.targets.get(name) == target} for family in locked]
    if set().union(*known) == now.keys():
        return None
    nearest = max(range(len(sets)), key=lambda index: len(known[index]))
    changes = family_drift(spec, locked[nearest], sets[nearest].source(locked[nearest]), source)
    return as_text(Drift(sets[nearest].lock.transformers, source.version, (changes,)))


def _installed_is() -> str:
    return f"transformers {installed().version} is installed"
