"""The switch OPSLOT_STRICT. OPSLOT_OPS is read in `_config`, OPSLOT_BACKENDS in `_selection`."""

import os

from ._errors import ConfigError

STRICT = "OPSLOT_STRICT"
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def strict() -> bool:
    """Whether what opslot would only report is an error in this run. Raises `ConfigError` for a value of no meaning."""
    value = os.environ.get(STRICT, "")
    if value.lower() not in _SWITCH:
        raise ConfigError(
            f"environment variable {STRICT}={value!r}: write 1 or true for strict, 0, false or leave it out"
        )
    return _SWITCH[value.lower()]
