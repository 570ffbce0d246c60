"""The errors that opslot raises, one class per mistake. All of them are `ValueError`s."""

from collections.abc import Iterable


class OpslotError(ValueError):
    """Base of every error that opslot raises for something its caller can change."""


class SpecError(OpslotError):
    """A contract, kernel, requirement or backend is described wrongly by its author."""


class DuplicateError(OpslotError):
    """A name is registered twice, or a bare name is offered by two distributions."""


class UnknownOp(OpslotError, LookupError):
    """No installed backend brings a contract for this op and variant."""


class UnknownKernel(OpslotError, LookupError):
    """No installed backend offers a kernel of this name for this op and variant."""


class KernelUnavailable(OpslotError, RuntimeError):
    """The kernel exists, but it cannot run here: the message lists every reason."""


class BackendError(OpslotError, RuntimeError):
    """The backend that was asked for failed to load. `__cause__` is what it raised."""


class TargetError(OpslotError, RuntimeError):
    """A `"module:attr"` target does not resolve, or is not a function that fits its contract."""


class ConfigError(OpslotError):
    """A configuration that cannot be read, or that names a field which does not exist."""


class BindError(OpslotError):
    """The model cannot use what was chosen for it. The model is as it was before."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the closest valid name, or an empty string."""
    import difflib  # only wanted once something has already gone wrong

    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
