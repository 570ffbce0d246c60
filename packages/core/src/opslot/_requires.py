"""What a kernel needs in order to run."""

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._device import Device
from ._errors import SpecError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# What most packages look like. Right without asking packaging, whose import costs more than the rest of discovery.
_RANGE = r"(?:>=|<=|==|!=|>|<)\d+(?:\.\d+)*"
_PLAIN = re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:{_RANGE}(?:,{_RANGE})*)?")
_ARCH_RANGE = re.compile(r"(?P<family>[A-Za-z]+_)(?P<low>\d+)\.\.(?:(?P=family)(?P<high>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Requires:
    """Requirements of a kernel: every one must hold.

    `devices`: kinds ("cuda", "rocm", "npu", ...); empty means any.
    `archs`: each an exact name ("sm_90", "gfx942"), a prefix ("Ascend910B*") or a range of a numbered family, ends
    included ("sm_80..", "sm_80..sm_90"); empty means any. One match is enough.
    `packages`: distributions with version ranges, as in PEP 508 ("liger-kernel>=0.8.5,<0.9").
    `modules`: top-level modules that must be importable, where no distribution name says so.
    """

    devices: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("devices", "archs", "packages", "modules"):
            check_strings(f"Requires.{field}", getattr(self, field))
        for arch in self.archs:
            span = _ARCH_RANGE.fullmatch(arch)
            if ".." in arch and (span is None or int(span["low"]) > int(span["high"] or span["low"])):
                raise SpecError(f"Requires.archs: {arch!r} is not a range like 'sm_80..' or 'sm_80..sm_90'")
        for package in self.packages:
            if not _PLAIN.fullmatch(package):
                _requirement(package)

    def unmet(self, device: Device) -> tuple[str, ...]:
        """The reasons why these requirements do not hold on `device` in this environment; empty when they do."""
        reasons = []
        if self.devices and device.kind not in self.devices:
            reasons.append(f"needs a {' or '.join(self.devices)} device, this is {device}")
        elif self.archs and not any(_matches(arch, device.arch) for arch in self.archs):
            reasons.append(f"needs architecture {' or '.join(self.archs)}, this is {device}")
        reasons += [reason for reason in map(_missing_package, self.packages) if reason]
        reasons += [f"needs the module {name!r}" for name in self.modules if not _importable(name)]
        return tuple(reasons)


def check_strings(what: str, value: object) -> None:
    """Raise `SpecError` unless `value` is a tuple of strings; a bare string would be taken letter by letter."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
        raise SpecError(f"{what} must be a tuple of strings, got {value!r}")


def _matches(wanted: str, arch: str) -> bool:
    span = _ARCH_RANGE.fullmatch(wanted)
    if span is None:
        return arch.startswith(wanted[:-1]) if wanted.endswith("*") else arch == wanted
    number = re.fullmatch(re.escape(span["family"]) + r"(\d+)[a-z]?", arch)
    return number is not None and int(span["low"]) <= int(number[1]) <= int(span["high"] or number[1])


def _missing_package(text: str) -> str:
    import importlib.metadata

    requirement = _requirement(text)
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"needs {text}, which is not installed (pip install '{text}')"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"needs {text}, {found} is installed (pip install '{text}')"


def _requirement(text: str) -> "Requirement":
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise SpecError(f"Requires.packages: {text!r} is not a PEP 508 requirement: {error}") from error


def _importable(name: str) -> bool:
    import importlib.util

    top = name.partition(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None
