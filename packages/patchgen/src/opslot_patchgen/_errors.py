"""LEAF module. One class per kind of refusal; a message begins with `file:line` wherever there is one."""


class PatchgenError(ValueError):
    """The generator refuses: what it would write could not be trusted."""

    exit_code = 4


class SpecError(PatchgenError):
    """A spec cannot be imported, has no SPEC, or contradicts itself."""


class SourceError(PatchgenError):
    """The upstream file is absent, or written in a way that splicing does not handle."""


class TargetGone(PatchgenError):
    """Upstream no longer has a class, method, call or name that a spec relies on."""

    exit_code = 3


class AmbiguousTarget(PatchgenError):
    """Several places answer to one target, and choosing one would be a guess."""


class UnreachableGuard(PatchgenError):
    """A decorator, an assignment or a subclass puts another body in the place of the guarded one: it may never run."""


class NameCollision(PatchgenError):
    """Upstream already uses a name that the generated lines need."""


class UpstreamEscape(PatchgenError):
    """The source builds a submodule through AutoModel, which yields upstream's classes: no slots in them."""


class LockError(PatchgenError):
    """A lock is absent or not one, or a committed file is not the one that was locked."""


class FetchError(PatchgenError):
    """A release of transformers cannot be fetched."""


class InverseError(PatchgenError):
    """Undoing our lines does not give upstream's bytes back."""
