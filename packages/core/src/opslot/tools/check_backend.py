"""The check of a backend that its author runs: what can be judged without the accelerator it is for.

What other people's code does when it is imported is seen from outside, in fresh interpreters: whatever it raises, even
the end of its process, is a result. A kernel whose requirements do not hold here and that does not import is reported
as not checked, never as right or wrong.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distribution, distributions
from types import TracebackType
from typing import Any

from opslot import API_VERSION, API_VERSIONS, BackendRecord, DeviceKind, KernelSpec, OpContract, TargetError, registry
from opslot._distributions import GROUP, Folder, normal, project_of, text_of
from opslot._environment import STRICT
from opslot._errors import nearest
from opslot._selection import VARIABLE
from opslot._target import Target, check_kernel, load_target
from opslot.tools.backends import drags
from opslot.tools.metadata import files, malformed, modules
from opslot.tools.output import quiet_registry

_LICENCE_FILE = re.compile(r"(^|/)(licen[cs]e|copying)[^/]*$", re.IGNORECASE)
_NAMESPACE_INIT = "opslot_backends/__init__.py"


_Item = OpContract | KernelSpec | DeviceKind


@dataclass(frozen=True)
class Finding:
    """`verdict` is "ok", "problem", "not checked" or "hint"."""

    subject: str
    verdict: str
    detail: str


def find(name: str) -> tuple[list[BackendRecord], str]:
    """The records of the distribution, or the distribution of the backend, called `name`; or why there is none."""
    records = quiet_registry().records
    mine = [r for r in records if normal(r.distribution) == normal(name)]
    mine = mine or [r for r in records if normal(r.name) == normal(name)]
    if len({record.distribution for record in mine}) == 1:
        denied = "; ".join(record.denied for record in mine if record.denied)
        return mine, f"{name!r} is {denied}" if denied else ""
    valid = sorted({name for record in records for name in (record.distribution, record.name)})
    if mine:
        return [], f"several distributions have a backend {name!r}: {', '.join(sorted(r.distribution for r in mine))}"
    return [], f"no installed distribution {name!r} has a backend{nearest(name, valid)}; installed: {', '.join(valid)}"


def check(records: list[BackendRecord]) -> list[Finding]:
    """Judge all backends of one distribution, and what its metadata says."""
    findings = []
    for record in records:
        findings += [*_load(record), *_targets(record)]
    return findings + list(_metadata(distribution(records[0].distribution)))


def _load(record: BackendRecord) -> Iterator[Finding]:
    subject = f"backend {record.name}"
    if record.backend is None:
        yield Finding(subject, "problem", f"failed to load: {record.message}")
        return
    versions = f"{API_VERSIONS[0]} to {API_VERSION}"
    yield Finding(subject, "ok", f"API version {record.backend.api}; this opslot speaks {versions}")
    # Alone, since in this process another backend may have imported the same library first.
    lines, end = _python("alone", record, environment={VARIABLE: record.distribution, STRICT: "0"})
    if not lines:
        yield Finding(subject, "problem", f"without the other backends it cannot be imported: {end}")
        return
    alone = replace(record, imported=tuple(lines[0][0]), milliseconds=lines[0][1])
    heavy = _vendors(record, alone.imported) & set(alone.imported)
    if heavy:
        rule = "importing the entry point must load neither torch nor what the kernels need; name targets as strings"
        yield Finding(subject, "problem", f"{drags(alone)}: {', '.join(sorted(heavy))}. {rule}")
    else:
        yield Finding(subject, "ok", f"lazy: imported in {alone.milliseconds:.0f} ms without torch or a vendor library")
        if alone.imported:
            yield Finding(subject, "hint", drags(alone))
    if record.remark:
        yield Finding(subject, "hint", record.remark)


def _vendors(record: BackendRecord, imported: Iterable[str]) -> set[str]:
    """torch, and the top-level modules that the kernels' requirements stand for.

    An editable installation does not list its modules: those `imported` from its project are.
    """
    assert record.backend is not None
    needed = [spec.requires for spec in record.backend.kernels]
    named = {"torch", *(module.partition(".")[0] for requires in needed for module in requires.modules)}
    packages = {normal(re.split(r"[^\w.-]", text)[0]) for requires in needed for text in requires.packages}
    for found in distributions() if packages else ():
        if normal(Folder(found).name) in packages:
            named |= modules(found) | {name for name in imported if _from_project(name, found)}
    return named


def _from_project(module: str, found: Distribution) -> bool:
    project, installed = project_of(found), os.path.realpath(str(found.locate_file("")))
    loaded = sys.modules.get(module)
    places = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    files = [os.path.realpath(place) for place in places if place]
    # A virtual environment often lies in the project itself.
    return bool(project) and any(f.startswith(project + os.sep) and not f.startswith(installed + os.sep) for f in files)


def _targets(record: BackendRecord) -> Iterator[Finding]:
    if record.backend is None:
        return
    device = registry().current_device()
    own = _own_modules(distribution(record.distribution))
    for item, outcome in zip(_items(record), _outcomes(record), strict=True):
        unmet = item.unmet(device) if isinstance(item, KernelSpec) else ()
        good = f"its {', '.join(_parts(item))} can be imported and called as opslot does"
        here = f"its requirements do not hold here: {'; '.join(unmet)}" if unmet else "torch is not installed"
        elsewhere = bool(unmet)
        if isinstance(item, DeviceKind):
            elsewhere, here = True, "this may be a machine without such devices"
        missing = str(outcome["missing"] or "").partition(".")[0]
        # What a vendor's module lacks may be there in the version that is required.
        misfit = outcome["imported"] and (outcome["module"] in {"", *own} or not elsewhere)
        # Of our own modules what does not even parse is wrong wherever it runs.
        misfit = misfit or any(_is_in(outcome["syntax"], module) for module in own)
        if not outcome["error"]:
            verdict, detail = "ok", good + (f"; {here}" if unmet else "")
        elif misfit or missing in own or not (elsewhere or missing == "torch"):
            verdict, detail = "problem", outcome["error"]
        else:
            verdict, detail = "not checked", f"cannot import here: {outcome['error']} ({here})"
        yield Finding(_subject(item), verdict, detail)


def _items(record: BackendRecord) -> list[_Item]:
    assert record.backend is not None
    return [*record.backend.contracts, *record.backend.kernels, *record.backend.device_kinds]


def _subject(item: _Item) -> str:
    if isinstance(item, DeviceKind):
        return f"device kind {item.name}"
    return f"{'kernel' if isinstance(item, KernelSpec) else 'contract'} {item}"


def _parts(item: _Item) -> dict[str, Target]:
    """The targets of an item by what they are."""
    if isinstance(item, KernelSpec):
        parts = {"target": item.target, "nested": item.nested}
    elif isinstance(item, DeviceKind):
        parts = {"probe": item.probe}
    else:
        parts = {"reference": item.reference, "samples": item.samples, "activation": item.activation}
        if item.workload is not None:
            parts |= {"workload's problem": item.workload.problem, "workload's flops": item.workload.flops}
    return {name: target for name, target in parts.items() if target is not None}


def _is_in(file: str, module: str) -> bool:
    """Whether the file is that of the top-level module, or below it."""
    found = importlib.util.find_spec(module) if file else None
    folders = [os.path.realpath(folder) + os.sep for folder in (found and found.submodule_search_locations) or ()]
    return found is not None and (found.origin == file or os.path.realpath(file).startswith(tuple(folders)))


def _own_modules(found: Distribution) -> set[str]:
    """The top-level modules that the distribution brings; an editable installation lists only its entry points'."""
    return modules(found) | {point.module.partition(".")[0] for point in found.entry_points.select(group=GROUP)}


def _outcomes(record: BackendRecord) -> list[dict[str, Any]]:
    """What became of each item. A process that dies of one is followed by another for the rest."""
    outcomes: list[dict[str, Any]] = []
    while len(outcomes) < len(_items(record)):
        lines, end = _python("examine", record, len(outcomes))
        outcomes += lines
        if len(outcomes) < len(_items(record)) and not (lines and lines[-1]["fatal"]):
            outcomes.append(_outcome(f"the process that imported it ended: {end}"))
    return outcomes


# What the child reports begins with it: others may print while Python starts.
MARK = "opslot-report: "
_PATIENCE = 120.0


def _python(
    what: str, record: BackendRecord, *arguments: Any, environment: dict[str, str] | None = None
) -> tuple[list[Any], str]:
    """The lines that `child` reports in a fresh interpreter with this one's path, and how it ended."""
    code = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from opslot.tools.check_backend import child; child()"
    )
    work = json.dumps([what, record.distribution, record.name, *arguments])
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path), work],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return [], f"no end after {_PATIENCE} s"
    last = done.stderr.strip().splitlines()[-1:]
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in lines], " ".join([f"exit code {done.returncode}", *last])


def child() -> None:
    """In the fresh interpreter: report to the real standard output, where no imported library can write."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    what, owner, name, *arguments = json.loads(sys.argv[2])
    (record,) = [r for r in registry().records if (r.distribution, r.name) == (owner, name)]
    if what == "alone":
        print(MARK + json.dumps([record.imported, record.milliseconds]), file=report, flush=True)
        return
    for item in _items(record)[arguments[0] :]:
        with _Reporting(report):
            outcome = _examine(item)
        print(MARK + json.dumps(outcome), file=report, flush=True)


def _examine(item: _Item) -> dict[str, Any]:
    for part, target in _parts(item).items():
        imported = False
        try:
            function = load_target(target, f"the {part} of {_subject(item)}")
            imported = True
            _check_call(item, part, function)
        except TargetError as error:
            module = re.split(r"[.:]", target)[0] if isinstance(target, str) else ""
            cause = error.__cause__
            return _outcome(str(error), cause, imported=imported or cause is None, module=module)
    return _outcome("")


def _check_call(item: _Item, part: str, function: Any) -> None:
    """Raise `TargetError` unless the function takes the arguments with which opslot calls it."""
    if isinstance(item, KernelSpec) and part == "target":
        check_kernel(function, registry().contract(item.op, item.variant).signature(), f"kernel {item}")
        return
    shapes = item.workload.shapes.values() if isinstance(item, OpContract) and item.workload is not None else ()
    drawn: tuple[Any, ...] = ("cpu", None, 0)  # device, dtype, seed
    calls: dict[str, list[tuple[tuple[Any, ...], Mapping[str, int]]]] = {
        "nested": [((), {})],
        "probe": [((0,), {})],
        "samples": [(drawn, {})],
        "activation": [((None,), {})],
        "workload's problem": [(drawn, shape) for shape in shapes],
        "workload's flops": [((), shape) for shape in shapes],
    }
    owner = f"the {part} of {_subject(item)}"
    if not callable(function):
        raise TargetError(f"{owner}: {type(function).__name__} object is not callable")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function written in C
        return
    for arguments, keywords in calls.get(part, ()):
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise TargetError(f"{owner}: it cannot be called as opslot calls it: {error}") from error


def _outcome(
    error: str, cause: BaseException | None = None, *, imported: bool = False, module: str = ""
) -> dict[str, Any]:
    """`missing` is a module that is not there, `module` that of the target, `syntax` a file that does not parse."""
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    syntax = cause.filename if isinstance(cause, SyntaxError) else None
    return {
        "error": error,
        "missing": missing,
        "imported": imported,
        "module": module,
        "syntax": syntax or "",
        "fatal": False,
    }


class _Reporting:
    """Reports what passes through, and lets it pass: it ends this process, and the parent goes on in another."""

    def __init__(self, report: Any) -> None:
        self._report = report

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            outcome = {**_outcome(f"{type(error).__name__}: {error}", error), "fatal": True}
            print(MARK + json.dumps(outcome), file=self._report, flush=True)


def _metadata(found: Distribution) -> Iterator[Finding]:
    if problem := malformed(found):
        yield Finding("metadata", "problem", problem)
        return
    metadata, listed = found.metadata, files(found)
    classifiers = metadata.get_all("Classifier") or []
    licence = [metadata[field] for field in ("License-Expression", "License") if field in metadata]
    licence = [text for text in licence if text not in ("", "UNKNOWN")] or [
        c for c in classifiers if c[:7] == "License"
    ]
    named = metadata.get_all("License-File") or []
    texts = [file for file in named if _brings(found, file)]
    texts = texts or [file for file in listed if _LICENCE_FILE.search(file) and _exists(found, file)]
    if licence:
        yield Finding("licence", "ok", licence[0].splitlines()[0])
    else:
        yield Finding("licence", "problem", "the metadata names none: set `license` in pyproject.toml")
    if texts:
        yield Finding("licence file", "ok", texts[0])
    else:
        lost = f"its metadata names {', '.join(named)}, which it does not bring" if named else "there is none"
        yield Finding("licence file", "problem", f"{lost}: set `license-files` in pyproject.toml")
    if _NAMESPACE_INIT in listed:
        yield Finding(
            "namespace", "problem", f"it brings {_NAMESPACE_INIT}, which hides the backends of others: delete it"
        )
    if not _typed(found, listed):
        yield Finding("types", "hint", "there is no py.typed, so type checkers ignore the annotations")


def _brings(found: Distribution, file: str) -> bool:
    """Whether a licence file is there: where PEP 639 puts it, where older tools do, or in an editable project."""
    project = project_of(found)
    beside = bool(project) and os.path.isfile(os.path.join(project, file))
    return beside or bool(text_of(found, f"licenses/{file}") or text_of(found, file))


def _exists(found: Distribution, file: str) -> bool:
    place: Any = found.locate_file(file)  # a path, or one into a zip; typeshed knows only what both can join
    there: bool = place.exists()
    return there


def _typed(found: Distribution, listed: list[str]) -> bool:
    """Whether a py.typed lies beside an entry point's module or above it; an editable installation lists no files."""
    beside = []
    for point in found.entry_points.select(group=GROUP):
        parts = point.module.split(".")
        loaded = [sys.modules.get(".".join(parts[: end + 1])) for end in range(len(parts))]
        beside += [os.path.dirname(module.__file__) for module in loaded if module is not None and module.__file__]
    return any(file.endswith("/py.typed") for file in listed) or any(
        os.path.isfile(os.path.join(folder, "py.typed")) for folder in beside
    )
