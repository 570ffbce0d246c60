"""Provenance: which code a loaded kernel is, as far as this process can tell."""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ._device import Device
from ._errors import SpecError
from ._installed import Installed, parse_requirement
from ._registry import PROCESS_LOCAL, Offer
from ._target import code_of, load_target, source_name

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Provenance:
    """The source and nested backend of one kernel; both empty for eager.

    `source` is "sha256:..." of the source file that a "module:attr" target names, "code:..." of the code of a function
    that is the target itself, or "unknown" where no file can be read. `nested` is what `KernelSpec.nested` returned.
    """

    source: str = ""
    nested: str = ""

    @classmethod
    def of(cls, offer: Offer, kernel: Callable[..., Any]) -> "Provenance":
        target = offer.spec.target
        if isinstance(target, str):
            source = _source(target.partition(":")[0], inspect.unwrap(kernel))
        else:
            source = f"code:{digest([source_name(target), code_of(target)])}"
        return cls(source, _nested(offer))


def _source(named: str, kernel: Callable[..., Any]) -> str:
    """Of the module that the target names, and of the one in the same package that really defines the function."""
    import hashlib

    home = getattr(kernel, "__module__", None) or named
    modules = [named, home] if home != named and home.split(".")[0] == named.split(".")[0] else [named]
    files = [data for name in modules if (data := _file(name)) is not None]
    return f"sha256:{hashlib.sha256(b''.join(files)).hexdigest()}" if len(files) == len(modules) else UNKNOWN


def _file(module: str) -> bytes | None:
    """The bytes that the module was loaded from: its source, in a folder or a zip, or its extension library."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    read = getattr(getattr(spec, "loader", None), "get_data", None)
    if spec is None or spec.origin is None or read is None:
        return None
    try:
        data: bytes = read(spec.origin)
    except (OSError, ImportError, ValueError):  # deleted since, or a loader that cannot after all
        return None
    return data


def _nested(offer: Offer) -> str:
    if offer.spec.nested is None:
        return ""
    nested = load_target(offer.spec.nested, f"the nested backend of kernel {offer.spec} of {offer.distribution}")()
    if not isinstance(nested, str):
        raise SpecError(f"kernel {offer.spec}: nested must return a string, got {nested!r}")
    return nested


def libraries(offers: Iterable[Offer], device: Device) -> dict[str, str]:
    """The versions of what is behind kernels, by name; empty for a distribution that has none.

    Those are the distributions that offer them, what these kernels require, and triton where `device` may run it.
    """
    here = Installed.here()

    def found(distribution: str) -> str:
        return next(iter(here.versions(distribution)), "")

    used = list(offers)
    names = {parse_requirement(package).name for offer in used for package in offer.spec.requires.packages}
    versions = {offer.distribution: offer.version for offer in used if offer.distribution != PROCESS_LOCAL}
    versions |= {name: found(name) for name in names - versions.keys()}
    if device.kind != "cpu" and (triton := found("triton")):
        versions["triton"] = triton
    return dict(sorted(versions.items()))


def digest(data: Any) -> str:
    """A short hash of plain data, the same in every process."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
