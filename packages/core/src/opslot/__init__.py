"""opslot: choose which kernel runs each operation of a model.

Declare `OpSlot`s in a model, or take a model from opslot-models; `bind(model, {"rms_norm": "torch"})` puts kernels of
the installed backends into them and returns a `Binding` that says what runs where and why.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._backend import API_VERSION as API_VERSION
    from ._backend import API_VERSIONS as API_VERSIONS
    from ._backend import Backend as Backend
    from ._bind import bind as bind
    from ._bind import bound as bound
    from ._binding import Binding as Binding
    from ._binding import Row as Row
    from ._config import OpsConfig as OpsConfig
    from ._contract import OpContract as OpContract
    from ._contract import Sample as Sample
    from ._contract import Tolerance as Tolerance
    from ._contract import Workload as Workload
    from ._device import Device as Device
    from ._device import DeviceKind as DeviceKind
    from ._discovery import register as register
    from ._discovery import registry as registry
    from ._errors import BackendError as BackendError
    from ._errors import BindError as BindError
    from ._errors import ConfigError as ConfigError
    from ._errors import DuplicateError as DuplicateError
    from ._errors import KernelUnavailable as KernelUnavailable
    from ._errors import OpslotError as OpslotError
    from ._errors import SpecError as SpecError
    from ._errors import TargetError as TargetError
    from ._errors import UnknownKernel as UnknownKernel
    from ._errors import UnknownOp as UnknownOp
    from ._installed import Installed as Installed
    from ._kernel import AUTO as AUTO
    from ._kernel import EAGER as EAGER
    from ._kernel import KernelSpec as KernelSpec
    from ._kernel import Priority as Priority
    from ._proof import Miss as Miss
    from ._proof import Proof as Proof
    from ._registry import PROCESS_LOCAL as PROCESS_LOCAL
    from ._registry import BackendRecord as BackendRecord
    from ._registry import Choice as Choice
    from ._registry import Offer as Offer
    from ._registry import Registry as Registry
    from ._requires import Requires as Requires
    from ._slot import OpSlot as OpSlot
    from ._slot import guard_forward as guard_forward

# `import opslot` costs a few milliseconds because each name is loaded from its module on first use (PEP 562).
_NAMES = {
    "_backend": ("API_VERSION", "API_VERSIONS", "Backend"),
    "_bind": ("bind", "bound"),
    "_binding": ("Binding", "Row"),
    "_config": ("OpsConfig",),
    "_contract": ("OpContract", "Sample", "Tolerance", "Workload"),
    "_device": ("Device", "DeviceKind"),
    "_discovery": ("register", "registry"),
    "_errors": (
        "BackendError",
        "BindError",
        "ConfigError",
        "DuplicateError",
        "KernelUnavailable",
        "OpslotError",
        "SpecError",
        "TargetError",
        "UnknownKernel",
        "UnknownOp",
    ),
    "_installed": ("Installed",),
    "_kernel": ("AUTO", "EAGER", "KernelSpec", "Priority"),
    "_proof": ("Miss", "Proof"),
    "_registry": ("PROCESS_LOCAL", "BackendRecord", "Choice", "Offer", "Registry"),
    "_requires": ("Requires",),
    "_slot": ("OpSlot", "guard_forward"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)  # derived, so that a name cannot be public in one list only


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'opslot' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"opslot.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
