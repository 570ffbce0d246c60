"""The check of a backend that its author runs: what can be judged without the accelerator it is for.

What other people's code does when it is imported is seen from outside, in fresh interpreters: whatever it raises, even
the end of its process, is a result. A kernel whose requirements do not hold here and that does not import is reported
as not checked, never as right or wrong.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distribution, packages_distributions
from types import TracebackType
from typing import Any

from opslot import API_VERSION, API_VERSIONS, BackendRecord, KernelSpec, OpContract, TargetError, registry
from opslot._distributions import GROUP, normal
from opslot._environment import STRICT
from opslot._errors import nearest
from opslot._selection import VARIABLE
from opslot._target import check_kernel, load_target
from opslot.tools.backends import drags
from opslot.tools.output import quiet_registry

_LICENCE_FILE = re.compile(r"(^|/)(licen[cs]e|copying)[^/]*$", re.IGNORECASE)
_NAMESPACE_INIT = "opslot_backends/__init__.py"


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
    heavy = _vendors(record) & set(alone.imported)
    if heavy:
        rule = "importing the entry point must load neither torch nor what the kernels need; name targets as strings"
        yield Finding(subject, "problem", f"{drags(alone)}: {', '.join(sorted(heavy))}. {rule}")
    else:
        yield Finding(subject, "ok", f"lazy: imported in {alone.milliseconds:.0f} ms without torch or a vendor library")
        if alone.imported:
            yield Finding(subject, "hint", drags(alone))
    if record.remark:
        yield Finding(subject, "hint", record.remark)


def _vendors(record: BackendRecord) -> set[str]:
    """torch, and the top-level modules that the kernels' requirements stand for."""
    assert record.backend is not None
    needed = [spec.requires for spec in record.backend.kernels]
    modules = {"torch", *(module.partition(".")[0] for requires in needed for module in requires.modules)}
    packages = {normal(re.split(r"[^\w.-]", text)[0]) for requires in needed for text in requires.packages}
    installed = packages_distributions().items() if packages else ()
    return modules | {module for module, owners in installed if packages & {normal(owner) for owner in owners}}


def _targets(record: BackendRecord) -> Iterator[Finding]:
    if record.backend is None:
        return
    device = registry().current_device()
    own = _own_modules(distribution(record.distribution))
    for item, outcome in zip(_items(record), _outcomes(record), strict=True):
        if isinstance(item, KernelSpec):
            what, target, unmet = "kernel", item.target, item.unmet(device)
            good = "its target resolves and its signature is that of the contract"
        else:
            what, target, unmet, good = "contract", item.reference, (), "its reference and samples resolve"
        here = f"its requirements do not hold here: {'; '.join(unmet)}" if unmet else "torch is not installed"
        missing = str(outcome["missing"] or "").partition(".")[0]
        # What a vendor's module lacks may be there in the version that is required.
        ours = not isinstance(target, str) or re.split(r"[.:]", target)[0] in own
        misfit = outcome["imported"] and (ours or not unmet)
        if not outcome["error"]:
            verdict, detail = "ok", good + (f"; {here}" if unmet else "")
        elif misfit or missing in own or not (unmet or missing == "torch"):
            verdict, detail = "problem", outcome["error"]
        else:
            verdict, detail = "not checked", f"cannot import here: {outcome['error']} ({here})"
        yield Finding(f"{what} {item}", verdict, detail)


def _items(record: BackendRecord) -> list[OpContract | KernelSpec]:
    assert record.backend is not None
    return [*record.backend.contracts, *record.backend.kernels]


def _own_modules(found: Distribution) -> set[str]:
    """The top-level modules that the distribution brings; an editable installation lists only its entry points'."""
    listed = {file.parts[0].removesuffix(".py") for file in found.files or () if file.suffix == ".py"}
    return listed | {point.module.partition(".")[0] for point in found.entry_points.select(group=GROUP)}


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


def _examine(item: OpContract | KernelSpec) -> dict[str, Any]:
    imported = False
    try:
        if isinstance(item, OpContract):
            item.signature()
            load_target(item.samples, f"the samples of {item}")
        else:
            kernel = load_target(item.target, f"kernel {item}")
            imported = True
            if item.nested is not None:
                load_target(item.nested, f"the nested backend of {item}")
            check_kernel(kernel, registry().contract(item.op, item.variant).signature(), f"kernel {item}")
    except TargetError as error:
        cause = error.__cause__
        return _outcome(str(error), cause, imported=imported or cause is None)
    return _outcome("")


def _outcome(error: str, cause: BaseException | None = None, *, imported: bool = False) -> dict[str, Any]:
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    return {"error": error, "missing": missing, "imported": imported, "fatal": False}


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
    metadata, files = found.metadata, [str(file).replace(os.sep, "/") for file in found.files or ()]
    classifiers = metadata.get_all("Classifier") or []
    licence = [metadata[field] for field in ("License-Expression", "License") if field in metadata]
    licence = [text for text in licence if text not in ("", "UNKNOWN")] or [
        c for c in classifiers if c[:7] == "License"
    ]
    texts = metadata.get_all("License-File") or [file for file in files if _LICENCE_FILE.search(file)]
    if licence:
        yield Finding("licence", "ok", licence[0].splitlines()[0])
    else:
        yield Finding("licence", "problem", "the metadata names none: set `license` in pyproject.toml")
    if texts:
        yield Finding("licence file", "ok", texts[0])
    else:
        yield Finding("licence file", "problem", "there is none: set `license-files` in pyproject.toml")
    if _NAMESPACE_INIT in files:
        yield Finding(
            "namespace", "problem", f"it brings {_NAMESPACE_INIT}, which hides the backends of others: delete it"
        )
    if not _typed(found, files):
        yield Finding("types", "hint", "there is no py.typed, so type checkers ignore the annotations")


def _typed(found: Distribution, files: list[str]) -> bool:
    """Whether a py.typed lies beside an entry point's module or above it; an editable installation lists no files."""
    beside = []
    for point in found.entry_points.select(group=GROUP):
        parts = point.module.split(".")
        modules = [sys.modules.get(".".join(parts[: end + 1])) for end in range(len(parts))]
        beside += [os.path.dirname(module.__file__) for module in modules if module is not None and module.__file__]
    return any(file.endswith("/py.typed") for file in files) or any(
        os.path.isfile(os.path.join(folder, "py.typed")) for folder in beside
    )
