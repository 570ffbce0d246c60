"""LEAF module. What to splice into one model family, as frozen data: no copied bodies, no blocks of text."""

import ast
import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from opslot_patchgen._errors import SpecError

_NAME = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern})*")
_METHOD = re.compile(rf"{_NAME.pattern}\.{_NAME.pattern}")
_REFERENCE = re.compile(rf"{_DOTTED.pattern}:{_NAME.pattern}")
_OP = re.compile(r"[a-z]\w*")
_RELEASE = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Slot:
    """The slot of one op in a class. `activation` names an attribute, `check` a function as `"module:name"`."""

    op: str
    variant: str
    activation: str | None = None
    check: str | None = None

    def __post_init__(self) -> None:
        _require(_OP, self.op, "op")
        _require(_OP, self.variant, "variant")
        if self.activation is not None:
            _require(_NAME, self.activation, "activation")
        if self.check is not None:
            _require(_REFERENCE, self.check, "check")

    @property
    def attribute(self) -> str:
        return f"{self.op}_op"

    @property
    def marker(self) -> str:
        return f"{self.op}/{self.variant}"

    @property
    def declaration(self) -> str:
        arguments = [f'"{self.op}"', f'"{self.variant}"']
        if self.activation is not None:
            arguments.append(f'activation="{self.activation}"')
        if self.check is not None:
            arguments.append(f"check={self.check.partition(':')[2]}")
        return f"{self.attribute} = OpSlot({', '.join(arguments)})"


@dataclass(frozen=True, kw_only=True)
class _Guard:
    """`since` is the first release whose maths at the target is that of the slot, and what it was before, which has no
    guard: ("5.24", "multiplies after rounding").
    """

    target: str
    slot: Slot
    since: tuple[str, str] | None = None

    @property
    def functions(self) -> tuple[str, ...]:
        """What the generated module imports for this guard, "module:name"."""
        return (self.slot.check,) if self.slot.check else ()

    def is_in(self, version: str) -> bool:
        """Whether the guard stands in what is generated from that version of transformers."""
        return self.since is None or _release(version) >= _release(self.since[0])

    @property
    def site(self) -> str:
        """What only one guard of a model may stand at."""
        return self.target


@dataclass(frozen=True, kw_only=True)
class EntryGuard(_Guard):
    """At the top of a method: `return result` when a kernel is bound.

    With `before`, a callee, it stands in front of the statement that calls it, and what is above runs all the same.
    """

    result: str
    before: str | None = None

    def __post_init__(self) -> None:
        _require(_METHOD, self.target, "target")
        _require_since(self.since)
        _require_expression(self.result)
        if self.before is not None:
            _require(_DOTTED, self.before, "call")

    @property
    def site(self) -> str:
        return self.target if self.before is None else f"{self.target}: before {self.before}()"


@dataclass(frozen=True, kw_only=True)
class CallGuard(_Guard):
    """Around the one assignment in a method whose value is a call of `call`; targets and arguments are upstream's.

    With `when`, an expression, a kernel runs only where it holds. With `forwarded`, the kernel gets a keyword for each
    (keyword, key), read from the `**mapping` that upstream passes on, and no other part of it. With `result`, that is
    the value, and the call may be any part of upstream's. `uses` are functions, "module:name", that `when` calls.
    """

    call: str
    when: str | None = None
    forwarded: tuple[tuple[str, str], ...] | None = None
    result: str | None = None
    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(_METHOD, self.target, "target")
        _require_since(self.since)
        _require(_DOTTED, self.call, "call")
        _require_used(self, self.when or "")
        for name in (name for pair in self.forwarded or () for name in pair):
            _require(_NAME, name, "name")
        for expression in (self.when, self.result):
            if expression is not None:
                _require_expression(expression)
        if self.result is not None and self.forwarded is not None:
            raise SpecError(f"{self.target}: what is forwarded to {self.call} is lost in {self.result!r}")

    @property
    def functions(self) -> tuple[str, ...]:
        return (*super().functions, *self.uses)

    @property
    def site(self) -> str:
        return f"{self.target}: {self.call}()"


@dataclass(frozen=True, kw_only=True)
class RegionGuard(_Guard):
    """Around the statements of a method from the one that calls `first` to the one that calls `last`.

    A kernel runs when `when` holds. It is called with what upstream gives to `first` (where `operand` is true), then
    `arguments`, then a keyword for each of `forwarded`: (name, default), read from the `**mapping` that upstream gives
    to `last`. Its value goes to `result`, and every name in `cleared` becomes None. Together these must be all that the
    region assigns and the method reads later. `uses` are functions, "module:name", that `when` or the arguments call.
    """

    first: str
    last: str
    when: str
    result: str
    arguments: tuple[str, ...]
    forwarded: tuple[tuple[str, int | None], ...] = ()
    cleared: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    operand: bool = True

    def __post_init__(self) -> None:
        _require(_METHOD, self.target, "target")
        _require_since(self.since)
        _require_used(self, " ".join((self.when, *self.arguments)))
        for callee in (self.first, self.last):
            _require(_DOTTED, callee, "call")
        for name in (self.result, *self.cleared, *(name for name, _ in self.forwarded)):
            _require(_NAME, name, "name")
        for expression in (self.when, f"kernel({', '.join(self.arguments)})"):
            _require_expression(expression)

    @property
    def functions(self) -> tuple[str, ...]:
        return (*super().functions, *self.uses)

    @property
    def site(self) -> str:
        return f"{self.target}: {self.first}() to {self.last}()"


@dataclass(frozen=True, kw_only=True)
class ForwardGuard(_Guard):
    """Outermost on a class, for a `forward` that a decorator swaps. A kernel gets `attributes` after its arguments."""

    attributes: tuple[str, ...]

    def __post_init__(self) -> None:
        _require_since(self.since)
        for name in (self.target, *self.attributes):
            _require(_NAME, name, "name")


Guard: TypeAlias = EntryGuard | CallGuard | RegionGuard | ForwardGuard


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All guards of one family; `source` is the dotted name of the transformers module they go into.

    `unguarded` names what upstream computes that an op would cover if its maths were that of a contract: a method with
    the reason. `untrained` are classes that only choose indices, so that no gradient comes back into them; `whole` are
    classes whose kernel stands for all that they hold, so that no module in them runs beside it.
    """

    family: str
    source: str
    guards: tuple[Guard, ...]
    unguarded: tuple[tuple[str, str], ...] = ()
    untrained: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.family, *self.untrained, *self.whole):
            _require(_NAME, name, "name")
        _require(_DOTTED, self.source, "source")
        if not self.source.startswith("transformers.models."):
            raise SpecError(f"{self.family}: source {self.source!r} is not a module of transformers.models")
        if not self.guards:
            raise SpecError(f"{self.family}: a spec without guards")
        for guard in self.guards:
            if not isinstance(guard, _Guard):
                raise SpecError(
                    f"{self.family}: {type(guard).__name__} among its guards: unpack what holds several with *"
                )
        for target, reason in self.unguarded:
            _require(_METHOD, target, "target")
            if not reason:
                raise SpecError(f"{self.family}: {target} is unguarded for no reason")
        sites = [guard.site for guard in self.guards]
        twice = sorted({site for site in sites if sites.count(site) > 1})
        if twice:
            raise SpecError(f"{self.family}: guarded twice: {', '.join(twice)}")

    def at(self, version: str) -> "ModelSpec":
        """The spec with the guards that stand in what is generated from that version of transformers."""
        return replace(self, guards=tuple(guard for guard in self.guards if guard.is_in(version)))


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _require_since(since: tuple[str, str] | None) -> None:
    if since is not None:
        release, before = since
        _require(_RELEASE, release, "release")
        if not before:
            raise SpecError(f"nothing is said of the maths before {release}")


def _require_used(guard: CallGuard | RegionGuard, expressions: str) -> None:
    for reference in guard.uses:
        _require(_REFERENCE, reference, "function")
        name = reference.partition(":")[2]
        if not re.search(rf"\b{name}\b", expressions):
            raise SpecError(f"{guard.target}: uses {reference!r}, but no expression of the guard names {name}")


def _require(pattern: re.Pattern[str], value: str, what: str) -> None:
    if not pattern.fullmatch(value):
        raise SpecError(f"{what} {value!r} is not of the form {pattern.pattern}")


def _require_expression(text: str) -> None:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise SpecError(f"not an expression: {text!r} ({error.msg})") from error
    # Every generated line carries a marker, so one expression is one line.
    if "\n" in text or "#" in text:
        raise SpecError(f"not an expression on one line: {text!r}")
