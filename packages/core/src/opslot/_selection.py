"""The selection of backends that the environment variable OPSLOT_BACKENDS makes."""

import os
import re
from collections.abc import Sequence

from ._distributions import CORE, Offered, normal
from ._errors import ConfigError, nearest

VARIABLE = "OPSLOT_BACKENDS"
GRAMMAR = (
    "write the names of backends or distributions with commas between them, either those to load (liger,quack) or, "
    "each after a minus, those not to load (-acme,-liger); unset loads all, the empty string none but opslot's own"
)

_ITEM = r"-?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


def denied(found: Sequence[Offered]) -> dict[Offered, str]:
    """What the variable keeps from being imported, with the words that say so. opslot's own contracts always load.

    Raises `ConfigError` for a value that does not parse or a name that is not installed: a typo lets no code in.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return {}
    others = [item for item in found if not item.is_core]
    denies, names = _parse(text)
    named = {item for name in names for item in _named(name, denies, others, text)}
    return {item: f"denied by {VARIABLE}={text!r}" for item in others if (item in named) is denies}


def _parse(text: str) -> tuple[bool, list[str]]:
    """Whether the names are denied, and the names."""
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    signs = {item.startswith("-") for item in items}
    if len(signs) > 1 or not all(re.fullmatch(_ITEM, item) for item in items):
        raise ConfigError(f"environment variable {VARIABLE}={text!r} does not parse: {GRAMMAR}")
    return True in signs, [item.removeprefix("-") for item in items]


def _named(name: str, denies: bool, others: Sequence[Offered], text: str) -> list[Offered]:
    where = f"environment variable {VARIABLE}={text!r}"
    if normal(name) == CORE:
        if denies:
            raise ConfigError(f"{where}: opslot itself cannot be denied, since it brings the contracts of the ops")
        return []
    distribution = [item for item in others if normal(item.distribution) == normal(name)]
    backend = [item for item in others if normal(item.name) == normal(name)]
    if not distribution and not backend:
        valid = dict.fromkeys([item.name for item in others] + [item.distribution for item in others])
        raise ConfigError(
            f"{where}: no backend or distribution {name!r} is installed{nearest(name, valid)}; "
            f"installed: {', '.join(f'{i.name} (of {i.distribution})' for i in others) or 'none'}"
        )
    if denies:
        return [*distribution, *backend]
    if not distribution and len({normal(item.distribution) for item in backend}) > 1:
        owners = ", ".join(item.distribution for item in backend)
        raise ConfigError(f"{where}: several distributions have a backend {name!r}; name the distribution: {owners}")
    # A distribution's name is its own. A backend's is not, so another distribution must not slip in by it.
    return distribution or backend
