"""Backends: what one distribution offers through its entry point."""

from dataclasses import dataclass

from ._contract import OpContract
from ._device import DeviceKind
from ._errors import SpecError
from ._kernel import KernelSpec

API_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The object that an `opslot.backends` entry point names. Pure data: importing it loads no vendor library.

    `api` is the version of this interface that the author wrote against. An unsupported one is refused as a whole.
    """

    api: int
    kernels: tuple[KernelSpec, ...] = ()
    contracts: tuple[OpContract, ...] = ()
    device_kinds: tuple[DeviceKind, ...] = ()

    def __post_init__(self) -> None:
        if self.api != API_VERSION:
            raise SpecError(f"this backend speaks opslot's backend API {self.api!r}; this opslot speaks {API_VERSION}")
        for field, kind in (("kernels", KernelSpec), ("contracts", OpContract), ("device_kinds", DeviceKind)):
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
                raise SpecError(f"Backend.{field} must be a tuple of {kind.__name__}")
