"""Backends: what one distribution offers through its entry point."""

from dataclasses import dataclass

from ._contract import OpContract
from ._device import DeviceKind
from ._errors import SpecError
from ._kernel import KernelSpec

# The versions of this interface that are read, and the newest, which a backend written now states (docs/stability.md).
API_VERSIONS = range(1, 2)
API_VERSION = API_VERSIONS[-1]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The object that an `opslot.backends` entry point names. Pure data: importing it loads no vendor library.

    `api` is the version of this interface that the author wrote against. One outside `API_VERSIONS` is refused as a
    whole.
    """

    api: int
    kernels: tuple[KernelSpec, ...] = ()
    contracts: tuple[OpContract, ...] = ()
    device_kinds: tuple[DeviceKind, ...] = ()

    def __post_init__(self) -> None:
        if type(self.api) is not int:
            raise SpecError(f"Backend.api must be a number such as {API_VERSION}, got {self.api!r}")
        if self.api not in API_VERSIONS:
            older, remedy = (
                ("the backend", "upgrade the distribution that brings it")
                if self.api < API_VERSIONS[0]
                else ("opslot", "upgrade opslot: pip install -U opslot")
            )
            raise SpecError(
                f"this backend is written for version {self.api} of opslot's backend API; this opslot speaks versions "
                f"{API_VERSIONS[0]} to {API_VERSION}. {older} is the older side: {remedy}"
            )
        for field, kind in (("kernels", KernelSpec), ("contracts", OpContract), ("device_kinds", DeviceKind)):
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
                raise SpecError(f"Backend.{field} must be a tuple of {kind.__name__}")
