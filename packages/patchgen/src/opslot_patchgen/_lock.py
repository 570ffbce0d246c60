"""What generation saw upstream: per target its maths and that of what it depends on, written beside the models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opslot_patchgen._catalogue import Catalogue, Fingerprint
from opslot_patchgen._errors import LockError
from opslot_patchgen._source import Source
from opslot_patchgen._spec import ForwardGuard, ModelSpec

LOCK = "lock.json"


@dataclass(frozen=True)
class Target:
    """A method that guards stand in or over. `guards` holds the kind of each, `slots` what it is for."""

    guards: tuple[str, ...]
    slots: tuple[str, ...]
    code: Fingerprint
    depends: Mapping[str, Fingerprint]

    @property
    def inside(self) -> bool:
        """Whether a guard stands in the body, where a decorator that swaps the body makes it unreachable."""
        return any(kind != ForwardGuard.__name__ for kind in self.guards)


@dataclass(frozen=True)
class Family:
    source: str
    sha256: str
    maths: str
    targets: Mapping[str, Target]


@dataclass(frozen=True)
class Lock:
    transformers: str
    families: Mapping[str, Family]

    def text(self) -> str:
        data = {
            "transformers": self.transformers,
            "families": {name: _family_data(family) for name, family in self.families.items()},
        }
        return json.dumps(data, indent=1, sort_keys=True) + "\n"


def read_lock(path: Path) -> Lock:
    """Raises `LockError` for a file that is absent or not a lock."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        families = {name: _family(values) for name, values in data["families"].items()}
        return Lock(transformers=str(data["transformers"]), families=families)
    except FileNotFoundError as error:
        raise LockError(f"{path}: no such file; `opslot-patchgen generate` writes it") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise LockError(f"{path}: not a lock ({why}); `opslot-patchgen generate` writes it anew") from error


def lock_family(spec: ModelSpec, source: Source) -> Family:
    """The lock of one family whose targets are all there."""
    catalogue = Catalogue(source)
    guards: dict[str, list[tuple[str, str]]] = {}
    for guard in spec.at(source.version).guards:
        name = f"{guard.target}.forward" if isinstance(guard, ForwardGuard) else guard.target
        guards.setdefault(name, []).append((type(guard).__name__, guard.slot.marker))
    return Family(
        source=source.module,
        sha256=source.sha256,
        maths=catalogue.maths,
        targets={name: lock_target(catalogue, name, found) for name, found in guards.items()},
    )


def lock_target(catalogue: Catalogue, name: str, guards: list[tuple[str, str]]) -> Target:
    return Target(
        guards=tuple(kind for kind, _ in guards),
        slots=tuple(slot for _, slot in guards),
        code=catalogue.fingerprint(name),
        depends={used: catalogue.fingerprint(used) for used in catalogue.dependencies(name)},
    )


def _family_data(family: Family) -> dict[str, Any]:
    targets = {
        name: {
            **_code_data(target.code),
            "guards": list(target.guards),
            "slots": list(target.slots),
            "depends": {used: _code_data(code) for used, code in target.depends.items()},
        }
        for name, target in family.targets.items()
    }
    return {"source": family.source, "sha256": family.sha256, "maths": family.maths, "targets": targets}


def _code_data(code: Fingerprint) -> dict[str, Any]:
    return {"maths": code.maths, "decorators": list(code.decorators), "parameters": list(code.parameters)}


def _family(data: dict[str, Any]) -> Family:
    targets = {
        name: Target(
            guards=tuple(values["guards"]),
            slots=tuple(values["slots"]),
            code=_code(values),
            depends={used: _code(code) for used, code in values["depends"].items()},
        )
        for name, values in data["targets"].items()
    }
    return Family(source=data["source"], sha256=data["sha256"], maths=data["maths"], targets=targets)


def _code(data: dict[str, Any]) -> Fingerprint:
    return Fingerprint(data["maths"], tuple(data["decorators"]), tuple(data["parameters"]))
