"""What a kernel needs in order to run."""

import re
from dataclasses import dataclass

from ._device import Device
from ._errors import SpecError
from ._installed import Environment, Installed, parse_requirement

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
    `packages`: distributions with version ranges ("liger-kernel>=0.8.5,<0.9"), without markers, extras or URLs.
    `modules`: top-level modules that must be importable, where no distribution name says so. A lock file cannot tell
    whether they are there, so a kernel that names one is never usable in an answer for another machine; but for
    "triton", whose distributions are known.
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
                parse_requirement(package)

    def unmet(self, device: Device, installed: Installed | None = None) -> tuple[str, ...]:
        """The reasons why these requirements do not hold on `device`; empty when they do.

        `installed` are the packages to judge by, those of this environment when None.
        """
        installed = installed or Environment()
        reasons = []
        if self.devices and device.kind not in self.devices:
            reasons.append(f"needs a {' or '.join(self.devices)} device, this is {device}")
        elif self.archs and not any(_matches(arch, device.arch) for arch in self.archs):
            unknown = "" if device.arch else ", whose architecture is not known"
            reasons.append(f"needs architecture {' or '.join(self.archs)}, this is {device}{unknown}")
        reasons += [*map(installed.lacks, self.packages), *map(installed.lacks_module, self.modules)]
        return tuple(filter(None, reasons))


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
