"""What changed between the upstream that a lock describes and another one."""

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opslot_patchgen._artifact import build, difference_of
from opslot_patchgen._catalogue import Catalogue, Fingerprint
from opslot_patchgen._errors import PatchgenError, TargetGone, UnreachableGuard, UpstreamEscape
from opslot_patchgen._escape import is_escape
from opslot_patchgen._guard import SWAPPING_DECORATORS
from opslot_patchgen._lock import Family, Target, lock_target
from opslot_patchgen._source import Source
from opslot_patchgen._spec import ModelSpec

# Every kind of finding with the exit code that it leads to.
KINDS: Mapping[str, int] = {
    "gone": 3,
    "renamed": 3,
    "maths": 2,
    "parameters": 2,
    "decorators": 2,
    "dependency": 2,
    "escape": 2,
    "refused": 2,
    "elsewhere": 2,
    "cosmetic": 0,
}
# How many candidates or names a line gives.
_SHORT = 3


@dataclass(frozen=True)
class Finding:
    """`subject` is what changed; for a dependency that is not the `target`, which is empty outside any target."""

    kind: str
    target: str
    subject: str
    summary: str
    candidates: tuple[str, ...] = ()
    diff: str = ""


@dataclass(frozen=True)
class FamilyDrift:
    family: str
    source: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Drift:
    before: str
    after: str
    families: tuple[FamilyDrift, ...]

    @property
    def exit_code(self) -> int:
        return max((KINDS[finding.kind] for family in self.families for finding in family.findings), default=0)


def family_drift(spec: ModelSpec, locked: Family, before: Source, after: Source | PatchgenError) -> FamilyDrift:
    """`before` is the source that was locked, `after` another one or why it cannot be read."""
    findings: list[Finding] = []
    try:
        if isinstance(after, PatchgenError):
            raise after
        if after.sha256 != locked.sha256:
            findings += _Comparison(spec, locked, before, after).findings()
    except TargetGone as error:
        findings.append(Finding("gone", "", locked.source, str(error)))
    except PatchgenError as error:
        findings.append(Finding("refused", "", locked.source, str(error)))
    return FamilyDrift(spec.family, locked.source, tuple(findings))


class _Comparison:
    def __init__(self, spec: ModelSpec, locked: Family, before: Source, after: Source) -> None:
        self.spec = spec
        self.locked = locked
        self.source = after
        self.before = Catalogue(before)
        self.after = Catalogue(after)

    def findings(self) -> Iterator[Finding]:
        if self.after.maths == self.locked.maths:
            summary = "only comments, docstrings, annotations or layout changed"
            yield Finding("cosmetic", "", self.locked.source, summary)
            yield from self._refusal(set())
            return
        found = [finding for name, target in self.locked.targets.items() for finding in self._target(name, target)]
        found += self._escapes()
        found += self._refusal({finding.kind for finding in found})
        yield from found
        yield from self._elsewhere(found)

    def _target(self, name: str, locked: Target) -> Iterator[Finding]:
        if name not in self.after:
            yield self._gone(name, name, locked.code)
            return
        now = lock_target(self.after, name, [])
        found = [*self._body(name, locked.code, now.code), *self._decorators(name, locked, now)]
        found += self._dependencies(name, locked, now)
        if not found and self.before.text(name) != self.after.text(name):
            diff = self._diff(name)
            found = [Finding("cosmetic", name, name, "comments, docstrings, annotations or layout changed", diff=diff)]
        yield from found

    def _gone(self, target: str, name: str, locked: Fingerprint) -> Finding:
        # What was imported and is defined here now is new, too.
        new = [other for other in self.after.names() if other not in self.before or self.before.imports(other)]
        new = [other for other in new if not self.after.imports(other)]
        equal = [other for other in self.after.names() if self.after.fingerprint(other).maths == locked.maths]
        # By themselves, classes are no more than their bases, which many share.
        equal = [] if name in self.before.classes else [other for other in equal if other in new] or equal
        near = [other for other in equal if _part(other) == _part(name)] or equal
        alike = [other for other in new if _part(other) == _part(name)] or self.after.names()
        similar = difflib.get_close_matches(name, alike, n=_SHORT)
        candidates = tuple(dict.fromkeys([*_closest(name, near), *similar]))[:_SHORT]
        if target != name:
            return Finding("dependency", target, name, f"{name} is gone{_perhaps(near, candidates)}", candidates)
        kind = "renamed" if near else "gone"
        return Finding(kind, target, name, f"gone{_perhaps(near, candidates)}", candidates)

    def _body(self, name: str, locked: Fingerprint, now: Fingerprint) -> Iterator[Finding]:
        if locked.maths != now.maths:
            yield Finding("maths", name, name, "the maths changed", diff=self._diff(name))
        if locked.parameters != now.parameters:
            yield Finding("parameters", name, name, _parameter_change(locked, now))

    def _decorators(self, name: str, locked: Target, other: Target) -> Iterator[Finding]:
        """Those of a method and of its class decide together whether a guard in the body is reached."""
        owner = name.rpartition(".")[0]
        was, now = ((*_of(target.depends, owner), *target.code.decorators) for target in (locked, other))
        if was != now:
            gained, lost = _swapping(now) - _swapping(was), _swapping(was) - _swapping(now)
            notes = []
            for decorator in sorted(gained):
                fate = "becomes unreachable inside it" if locked.inside else "stays reachable outside it"
                notes.append(f"@{decorator} swaps the body: the guard {fate}")
            if lost:
                free = " and ".join(f"@{decorator}" for decorator in sorted(lost))
                notes.append(f"without {free} a guard in the body is reachable")
            summary = "; ".join([_decorator_change(was, now), *notes])
            yield Finding("decorators", name, name, summary)

    def _dependencies(self, name: str, locked: Target, now: Target) -> Iterator[Finding]:
        owner = name.rpartition(".")[0]
        for used, code in locked.depends.items():
            if used not in now.depends:
                if used in self.after:
                    yield Finding("dependency", name, used, f"{used} is no longer used")
                else:
                    yield self._gone(name, used, code)
                continue
            other = now.depends[used]
            changes = ["its maths changed"] if code.maths != other.maths else []
            if code.parameters != other.parameters:
                changes.append(_parameter_change(code, other))
            if code.decorators != other.decorators and used != owner:
                changes.append(_decorator_change(code.decorators, other.decorators))
                gained = sorted(_swapping(other.decorators) - _swapping(code.decorators))
                changes += [f"@{one} may run another implementation in place of its body" for one in gained]
            if changes:
                yield Finding("dependency", name, used, f"{used}: {'; '.join(changes)}", diff=self._diff(used))
        for used in sorted(now.depends.keys() - locked.depends.keys()):
            yield Finding("dependency", name, used, f"{used} is used now", diff=self._diff(used))

    def _escapes(self) -> Iterator[Finding]:
        now, was = _escapes(self.after), _escapes(self.before)
        for (owner, callee), count in sorted((now - was).items()):
            place = f" in {owner}" if owner else ""
            summary = f"{callee}{place} is new ({count}): it builds upstream's classes, which have no slots"
            yield Finding("escape", "", owner, summary)

    def _refusal(self, kinds: set[str]) -> Iterator[Finding]:
        """What generation says, where that is not reported already."""
        try:
            build(self.spec, self.source, "")
        except PatchgenError as error:
            kind, same = "refused", {"refused"}
            if isinstance(error, TargetGone):
                kind, same = "gone", {"gone", "renamed"}
            elif isinstance(error, UpstreamEscape):
                kind, same = "escape", {"escape"}
            elif isinstance(error, UnreachableGuard):
                kind, same = "decorators", {"decorators"}
            if not same & kinds:
                yield Finding(kind, "", self.locked.source, str(error))

    def _elsewhere(self, found: list[Finding]) -> Iterator[Finding]:
        covered = {*self.locked.targets}.union(*(target.depends for target in self.locked.targets.values()))
        covered |= {finding.subject for finding in found}
        both = [name for name in self.before.names() if name in self.after]
        changed = [name for name in both if self.before.fingerprint(name) != self.after.fingerprint(name)]
        gone = [name for name in self.before.names() if name not in self.after]
        new = [name for name in self.after.names() if name not in self.before]
        parts = [("changed", changed), ("gone", gone), ("new", new)]
        outside = [(what, [name for name in names if name not in covered]) for what, names in parts]
        summary = "; ".join(f"{what}: {', '.join(names)}" for what, names in outside if names)
        if summary or all(KINDS[finding.kind] == 0 for finding in found):
            yield Finding("elsewhere", "", self.locked.source, summary or "statements of the module changed")

    def _diff(self, name: str) -> str:
        was, now = (side.text(name) if name in side else "" for side in (self.before, self.after))
        label = self.source.label
        return difference_of(was, now, f"a/{label}: {name}", f"b/{label}: {name}") if was != now else ""


def _part(name: str) -> str:
    """What of a name must stay for another one to be its successor: the method, if it is one."""
    return name.rpartition(".")[2] if "." in name else ""


def _closest(name: str, others: list[str]) -> list[str]:
    return sorted(others, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())[:_SHORT]


def _perhaps(equal: list[str], candidates: tuple[str, ...]) -> str:
    if not candidates:
        return ""
    words = [f"{name} (equal maths)" if name in equal else f"{name} (similar name)" for name in candidates]
    return f"; perhaps now {' or '.join(words)}"


def _of(depends: Mapping[str, Fingerprint], owner: str) -> tuple[str, ...]:
    return depends[owner].decorators if owner in depends else ()


def _swapping(decorators: tuple[str, ...]) -> set[str]:
    return {text.partition("(")[0].rpartition(".")[2] for text in decorators} & SWAPPING_DECORATORS


def _decorator_change(was: tuple[str, ...], now: tuple[str, ...]) -> str:
    return f"decorators changed: {_change([f'@{text}' for text in was], [f'@{text}' for text in now])}"


def _parameter_change(was: Fingerprint, now: Fingerprint) -> str:
    return f"parameters changed: {_change(was.parameters, now.parameters)}"


def _change(was: Sequence[str], now: Sequence[str]) -> str:
    removed = [f"-{text}" for text in was if text not in now]
    added = [f"+{text}" for text in now if text not in was]
    return " ".join(removed + added) or f"now in this order: {', '.join(now)}"


def _escapes(catalogue: Catalogue) -> Counter[tuple[str, str]]:
    """Calls that build a submodule from outside of the module, by the definition that they stand in."""
    found: Counter[tuple[str, str]] = Counter()
    for node in ast.walk(catalogue.code.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            callee = ast.unparse(node.func)
            if is_escape(callee):
                found[catalogue.holder(node.lineno), callee] += 1
    return found
