"""Discovery: the process's registry, filled once from the installed distributions."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from ._attempt import Failure, attempt
from ._backend import Backend
from ._distributions import CORE, Offered, normal, offered
from ._environment import STRICT, strict
from ._errors import BackendError, OpslotError, SpecError, UnknownOp
from ._kernel import KernelSpec
from ._registry import BackendRecord, Registry
from ._selection import denied

if TYPE_CHECKING:
    from importlib.metadata import Distribution

# Reentrant, so that a backend which asks for the registry while it is loaded gets an error and not a deadlock. One that
# waits for a thread of its own that asks gets one too: the thread is given up on.
_lock = threading.RLock()
_PATIENCE = 60.0
_loading = False
_importing = ""
_registry: Registry | None = None


if hasattr(os, "register_at_fork"):
    # A fork waits until the registry is there, since its child would wait for a thread that it does not have.
    os.register_at_fork(
        before=lambda: _lock.acquire(timeout=_PATIENCE), after_in_parent=_lock.release, after_in_child=_lock.release
    )


def registry() -> Registry:
    """The registry of this process. The first call finds and loads the installed backends.

    Raises `ConfigError` when OPSLOT_BACKENDS or OPSLOT_STRICT cannot be read, `BackendError` when OPSLOT_STRICT is set
    and a backend fails, or when another thread does not come to an end with loading. The next call then starts anew.
    """
    global _registry, _loading
    if _registry is None:
        from importlib.metadata import distributions  # 20 ms that `import opslot` does not have to pay

        if not _lock.acquire(timeout=_PATIENCE):
            raise BackendError(
                f"another thread has been loading backends for {_PATIENCE:g} s, at last {_importing}, and may wait for "
                "this one: what is imported by a backend's entry point must not wait for a thread that asks for the "
                "registry; a backend offers its kernels as data"
            )
        try:
            if _loading:
                raise SpecError(
                    "the registry is asked for while backends are loaded: a backend offers its kernels as data"
                )
            if _registry is None:
                _loading = True
                try:
                    strictly = strict()  # before anything is imported
                    _registry = _checked(discover(distributions()), strictly)
                finally:
                    _loading = False
        finally:
            _lock.release()
    return _registry


def register(spec: KernelSpec, *, replace: bool = False) -> None:
    """Offer a kernel of this process alone, from a script or a notebook cell. See `Registry.register`."""
    registry().register(spec, replace=replace)


def discover(distributions: Iterable[Distribution]) -> Registry:
    """A registry filled from `distributions`, the core's own first, the others in order of their names.

    A backend that fails is kept as a record with its error; nothing of it remains and the others are not affected.
    One that OPSLOT_BACKENDS denies is kept as a record too, and is not imported.
    """
    found = Registry()
    offers = sorted(offered(distributions), key=lambda item: not item.is_core)
    refused = denied(offers)
    waiting = [_load(item, refused.get(item, "")) for item in offers]
    # A kernel may be for a contract that a later backend brings, so those who lack one wait while others progress.
    progress = True
    while waiting and progress:
        progress = False
        for record in list(waiting):
            settled = _settle(found, record, last_chance=False)
            if settled is not None:
                found.records.append(settled)
                waiting.remove(record)
                progress = True
    found.records += [settled for record in waiting if (settled := _settle(found, record, last_chance=True))]
    found.records.sort(key=lambda record: (record.distribution, record.name))
    return found


def _checked(found: Registry, strictly: bool) -> Registry:
    if not any(normal(record.distribution) == CORE for record in found.records):
        raise BackendError(
            "opslot's own metadata (its dist-info folder) is not on the path, so its ops are unknown: install opslot, "
            "and keep the metadata of what you bundle"
        )
    failed = [record for record in found.records if record.error is not None]
    if failed and strictly:
        raise BackendError(f"{STRICT} is set{found.failures()}") from failed[0].error
    return found


def _load(item: Offered, refusal: str) -> BackendRecord:
    record = BackendRecord(item.name, item.distribution, item.version, denied=refusal, remark=item.remark)
    if refusal:
        return record
    global _importing
    _importing = f"{item.name!r} of {item.distribution}"
    before, start = set(sys.modules), perf_counter()
    # What a backend raises is kept, shown by every listing and raised on request.
    outcome = attempt(lambda: _backend(item))
    record = _failed(record, outcome) if isinstance(outcome, Failure) else replace(record, backend=outcome)
    seconds = perf_counter() - start
    return replace(record, milliseconds=1000 * seconds, imported=_foreign(set(sys.modules) - before, item))


def _backend(item: Offered) -> Backend:
    if item.entry_point is None:
        raise BackendError(item.problem)
    if item.entry_point.pattern.match(item.entry_point.value) is None:
        raise SpecError(f"its entry point {item.name} = {item.entry_point.value} has not the form module:object")
    try:
        backend = item.entry_point.load()
    except (ImportError, TypeError, AttributeError) as error:
        from ._diagnosis import diagnose

        diagnosis = diagnose(item.entry_point, error)
        if diagnosis:
            raise BackendError(diagnosis) from error
        raise
    if not isinstance(backend, Backend):
        raise SpecError(f"{item.entry_point.value} is a {type(backend).__name__}, not an opslot.Backend")
    return backend


def _foreign(modules: set[str], item: Offered) -> tuple[str, ...]:
    """The packages among `modules` that are neither the backend's own nor what opslot itself brings."""
    own = re.split(r"[.:]", item.entry_point.value)[0].strip() if item.entry_point else ""
    roots = {module.partition(".")[0] for module in modules} - {own, "opslot", "packaging", "yaml"}
    return tuple(sorted(roots - sys.stdlib_module_names))


def _settle(found: Registry, record: BackendRecord, *, last_chance: bool) -> BackendRecord | None:
    """Add the record's backend; the record to keep, or None when it should be tried again later."""
    if record.backend is None:
        return record
    try:
        found.add(record.backend, record.distribution, record.version)
    except OpslotError as error:
        if isinstance(error, UnknownOp) and not last_chance:
            return None
        return _failed(record, Failure.of(error))
    return record


def _failed(record: BackendRecord, failure: Failure) -> BackendRecord:
    return replace(record, backend=None, error=failure.error, traceback=failure.traceback)
