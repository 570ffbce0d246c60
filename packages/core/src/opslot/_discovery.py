"""Discovery: the process's registry, filled once from the installed distributions."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._backend import Backend
from ._errors import OpslotError, SpecError, UnknownOp
from ._kernel import KernelSpec
from ._registry import BackendRecord, Registry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "opslot.backends"

# Reentrant, so that a backend which asks for the registry while it is loaded gets an error and not a deadlock.
_lock = threading.RLock()
_loading = False
_registry: Registry | None = None


def registry() -> Registry:
    """The registry of this process. The first call finds and loads the installed backends."""
    global _registry, _loading
    if _registry is None:
        from importlib.metadata import entry_points  # 20 ms that `import opslot` does not have to pay

        with _lock:
            if _loading:
                raise SpecError(
                    "the registry is asked for while backends are loaded: a backend offers its kernels as data"
                )
            if _registry is None:
                _loading = True
                try:
                    _registry = discover(entry_points(group=GROUP))
                finally:
                    _loading = False
    return _registry


def register(spec: KernelSpec, *, replace: bool = False) -> None:
    """Offer a kernel of this process alone, from a script or a notebook cell. See `Registry.register`."""
    registry().register(spec, replace=replace)


def discover(entry_points: Iterable[EntryPoint]) -> Registry:
    """A registry filled from `entry_points`, the core's own first, the others in order of their distributions' names.

    A backend that fails is kept as a record with its error; nothing of it remains and the others are not affected.
    """
    found = Registry()
    waiting = [_load(*identity, entry_point) for identity, entry_point in sorted(_distinct(entry_points).items())]
    waiting.sort(key=lambda record: record.distribution != "opslot")
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


def _distinct(entry_points: Iterable[EntryPoint]) -> dict[tuple[str, str, str], EntryPoint]:
    """Entry points by (distribution, name, version); one project often leaves two metadata folders behind."""
    distinct, seen = {}, set()
    for entry_point in entry_points:
        # An interrupted installation leaves metadata without a name.
        distribution = getattr(entry_point.dist, "name", None) or "?"
        version = getattr(entry_point.dist, "version", None) or ""
        if (distribution, entry_point.name, entry_point.value) not in seen:
            seen.add((distribution, entry_point.name, entry_point.value))
            distinct[distribution, entry_point.name, version] = entry_point
    return distinct


def _load(distribution: str, name: str, version: str, entry_point: EntryPoint) -> BackendRecord:
    try:
        backend = entry_point.load()
        if not isinstance(backend, Backend):
            raise SpecError(f"{entry_point.value} is a {type(backend).__name__}, not an opslot.Backend")
    except KeyboardInterrupt:
        raise
    # The one broad except of this code base: a backend is other people's code, and whatever it raises, SystemExit and
    # the panics of extension modules included, must not take the others down. The error is kept, shown by every
    # listing and raised on request.
    except BaseException as error:  # noqa: BLE001
        return _failed(name, distribution, version, error)
    return BackendRecord(name, distribution, version, backend)


def _settle(found: Registry, record: BackendRecord, *, last_chance: bool) -> BackendRecord | None:
    """Add the record's backend; the record to keep, or None when it should be tried again later."""
    if record.backend is None:
        return record
    try:
        found.add(record.backend, record.distribution, record.version)
    except OpslotError as error:
        if isinstance(error, UnknownOp) and not last_chance:
            return None
        return _failed(record.name, record.distribution, record.version, error)
    return record


def _failed(name: str, distribution: str, version: str, error: BaseException) -> BackendRecord:
    import traceback

    return BackendRecord(name, distribution, version, error=error, traceback="".join(traceback.format_exception(error)))
