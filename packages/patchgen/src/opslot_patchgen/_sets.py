"""The committed sets: one folder of generated modules and their lock per release of transformers."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from opslot_patchgen._drift import Drift, family_drift
from opslot_patchgen._errors import InverseError, LockError, PatchgenError
from opslot_patchgen._inverse import restore
from opslot_patchgen._lock import LOCK, Family, Lock, read_lock
from opslot_patchgen._source import Source, read_source, read_version, set_name
from opslot_patchgen._specs import SpecPackage

_NAME = re.compile(r"v(\d+)_(\d+)")


@dataclass(frozen=True)
class GeneratedSet:
    folder: Path
    lock: Lock

    def module(self, locked: Family) -> Path:
        return self.folder / f"{locked.source.rpartition('.')[2]}.py"

    def source(self, locked: Family) -> Source:
        """Upstream's module as it was when it was locked, out of the generated one.

        Raises `LockError` or `InverseError` when the committed file does not give it.
        """
        path = self.module(locked)
        if not path.is_file():
            raise LockError(f"{path}: no such file, but {LOCK} names it; `opslot-patchgen generate` writes it")
        text = restore(path.read_bytes().decode("utf-8", errors="replace"))
        sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
        if sha256 != locked.sha256:
            raise LockError(f"{path}: undone, it is not the source that {LOCK} names; see `opslot-patchgen check`")
        label = f"{locked.source.replace('.', '/')}.py"
        return Source(locked.source, path, label, self.lock.transformers, sha256, text)


def set_names(package: SpecPackage) -> list[str]:
    """The names of the committed sets, the newest last."""
    found = {folder.name: match for folder in package.generated.glob("v*") if (match := _NAME.fullmatch(folder.name))}
    return sorted(found, key=lambda name: tuple(map(int, found[name].groups())))


def unfinished(package: SpecPackage) -> list[str]:
    """One finding per committed set whose lock has not the families of the specs: it was generated from others."""
    specified = {spec.family for spec in package.specs}
    findings = []
    for name in set_names(package):
        try:
            lock = generated_set(package, name).lock
        except LockError as error:
            findings.append(str(error))
            continue
        if odd := sorted(specified ^ lock.families.keys()):
            findings.append(
                f"{package.generated / name}: of {', '.join(odd)} there is only a spec or only a module: run "
                f"`opslot-patchgen generate --source {lock.transformers}`"
            )
    return findings


def generated_set(package: SpecPackage, name: str | None = None) -> GeneratedSet:
    """The committed set of that name ("v5_24"), by default the newest. Raises `LockError` when there is none."""
    names = set_names(package)
    if not names:
        raise LockError(f"{package.generated}: no generated sets; `opslot-patchgen generate` writes one")
    if name is None:
        name = names[-1]
    elif name not in names:
        raise LockError(f"{package.generated}: no set {name!r}; there are: {', '.join(names)}")
    folder = package.generated / name
    return GeneratedSet(folder, read_lock(folder / LOCK))


def drift(package: SpecPackage, name: str | None = None, root: Path | None = None) -> Drift:
    """From a committed set to the tree at `root`, or to the installed transformers: every family that both know.

    Raises a `PatchgenError` when the set or the tree as a whole cannot be read.
    """
    committed = generated_set(package, name)
    version = read_version(root)
    families = []
    for spec in package.specs:
        locked = committed.lock.families.get(spec.family)
        if locked is None:
            continue
        after: Source | PatchgenError
        try:
            after = read_source(locked.source, root)
        except PatchgenError as error:
            after = error
        families.append(family_drift(spec, locked, committed.source(locked), after))
    return Drift(committed.lock.transformers, version, tuple(families))


@dataclass(frozen=True)
class Moved:
    """Families whose source is no longer the one that was locked: what changed, and their committed files."""

    drift: Drift
    files: frozenset[Path]


def moved(package: SpecPackage, root: Path | None = None) -> Moved:
    """Judge the committed set of the version at `root`, or of the installed one.

    A set that cannot be judged, since it is absent or its files are damaged, counts as not moved: a comparison of its
    files says so.
    """
    version = read_version(root)
    try:
        committed = generated_set(package, set_name(version))
        changes = drift(package, committed.folder.name, root)
    except (LockError, InverseError):
        return Moved(Drift(version, version, ()), frozenset())
    families = tuple(family for family in changes.families if family.findings)
    files: set[Path] = set()
    for family in families:
        path = committed.module(committed.lock.families[family.family])
        files |= {path, path.with_suffix(".patch"), committed.folder / LOCK, committed.folder / "__init__.py"}
    return Moved(Drift(changes.before, changes.after, families), frozenset(files))
