"""The switch OPSLOT_STRICT, and what is wrong with OPSLOT_CACHE, which opslot-models reads.

OPSLOT_OPS is read in `_config`, OPSLOT_BACKENDS in `_selection`.
"""

import os

from ._errors import ConfigError

STRICT = "OPSLOT_STRICT"
CACHE = "OPSLOT_CACHE"
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def strict() -> bool:
    """Whether what opslot would only report is an error in this run. Raises `ConfigError` for a value of no meaning."""
    value = os.environ.get(STRICT, "")
    if value.lower() not in _SWITCH:
        raise ConfigError(
            f"environment variable {STRICT}={value!r}: write 1 or true for strict, 0, false or leave it out"
        )
    return _SWITCH[value.lower()]


def cache_problem() -> str | None:
    """Why opslot-models would refuse the cache that is chosen, before it looks at the folder."""
    value = os.environ.get(CACHE, "")
    if not value or os.path.isabs(value):
        return None
    return f"environment variable {CACHE}={value!r}: write an absolute path"
