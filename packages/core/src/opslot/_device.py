"""Devices: what kernels run on, and the kinds that tell them apart."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._errors import OpslotError, SpecError, nearest
from ._target import Target, check_target, load_target

if TYPE_CHECKING:
    import torch

Probe = Callable[[int], tuple[str, str] | None]


@dataclass(frozen=True)
class Device:
    """What a kernel is judged against: `Device("cuda", "sm_90", "NVIDIA H200")`.

    `kind` is the name of a `DeviceKind`, not torch's device type: a ROCm build of torch calls its devices "cuda", and
    they are of kind "rocm" here. `arch` is "sm_90", "gfx942", "Ascend910B3", ..., empty where a kind has none.
    """

    kind: str
    arch: str = ""
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> "Device":
        """The device that "kind", "kind:arch" or "kind:arch:name" describes; it need not be here.

        Whether there is such a kind is judged by `Registry.target`.
        """
        kind, colon, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        arch, _, name = rest.partition(":")
        good = f"such as {', '.join(_target(kind) for kind in CORE_KINDS)}"
        if arch.isdecimal():
            raise OpslotError(f"target {text!r}: {arch} counts a device; a target has an architecture, {good}")
        if not re.fullmatch(r"[A-Za-z]\w*", kind) or (colon and not re.fullmatch(r"[\w.+-]+", arch)):
            raise OpslotError(f"target {text!r}: expected a kind and an architecture, {good}")
        return cls(kind, arch, name)

    def __str__(self) -> str:
        detail = ", ".join(part for part in (self.arch, self.name) if part)
        return f"{self.kind} ({detail})" if detail else self.kind


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """How to recognise one kind of device.

    `torch_type` is the `torch.device.type` under which its devices appear. `probe(index)` returns `(arch, name)` of
    that device, or None when the device is not of this kind; it may import torch. `example` is one such arch: when
    given, the others begin with the same letters and, where it has one, a digit after them. A target is held to that.
    """

    name: str
    torch_type: str
    probe: Target
    example: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.name, self.torch_type, self.example)):
            raise SpecError(f"DeviceKind: name, torch_type and example must be strings, got {self!r}")
        if not self.name.isidentifier() or not self.torch_type:
            raise SpecError(f"DeviceKind: name must be a word, and torch_type one of torch's, got {self!r}")
        check_target(self.probe, f"device kind {self.name!r}")


def parse_target(text: str, kinds: Iterable[DeviceKind]) -> Device:
    """The device of another machine, "cuda:sm_90". Raises `OpslotError` unless it is of one of the kinds."""
    device = Device.parse(text)
    known = {kind.name: kind for kind in kinds}
    if device.kind not in known:
        raise OpslotError(
            f"target {text!r}: unknown kind {device.kind!r}{nearest(device.kind, known)}; "
            f"known: {', '.join(_target(known[name]) for name in sorted(known))}"
        )
    example = known[device.kind].example
    if device.arch and not _is_like(example, device.arch):
        raise OpslotError(f"target {text!r}: an architecture of kind {device.kind!r} looks like {example}")
    return device


def is_present(device: "torch.device") -> bool:
    count = _count(device)
    return count is None or (device.index or 0) < count


def describe(device: "torch.device", kinds: Iterable[DeviceKind]) -> Device:
    """The `Device` of a torch device. Raises `OpslotError` when it is not there, or no kind recognises it."""
    if not is_present(device):
        raise OpslotError(
            f"device {str(device)!r} is not present: torch sees {_count(device)} devices of type {device.type!r}"
        )
    for kind in kinds:
        if kind.torch_type == device.type:
            probe: Probe = load_target(kind.probe, f"the probe of device kind {kind.name!r}")
            found = probe(device.index or 0)
            if found is not None:
                return Device(kind.name, *found)
    known = ", ".join(sorted(kind.name for kind in kinds))
    raise OpslotError(f"no installed backend knows devices of torch type {device.type!r} (known kinds: {known})")


def current_device(kinds: Iterable[DeviceKind]) -> Device:
    """The present accelerator, else the CPU: what a model is bound for when its caller names no device."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return Device("cpu", name="torch is not installed")
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # of torch, or of a vendor's library that torch loads itself
        raise OpslotError(f"torch cannot be imported: {error} (see `opslot doctor`)") from error

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return describe(torch.device("cpu"), kinds)
    return describe(torch.device(accelerator.type, torch.accelerator.current_device_index()), kinds)


def _count(device: "torch.device") -> int | None:
    """How many devices of this type torch sees; None where it does not count them."""
    import torch

    count: Callable[[], int] | None = getattr(getattr(torch, device.type, None), "device_count", None)
    return None if count is None else count()


def _target(kind: DeviceKind) -> str:
    return f"{kind.name}:{kind.example}" if kind.example else kind.name


def _is_like(example: str, arch: str) -> bool:
    """Whether `arch` begins with the letters of the example, and a digit follows where one does there."""
    letters = re.split(r"\d", example)[0]
    digit = r"\d" if letters != example else ""
    return re.match(re.escape(letters) + digit, arch) is not None


def _probe_cuda(index: int) -> tuple[str, str] | None:
    import torch

    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}", torch.cuda.get_device_name(index)


def _probe_rocm(index: int) -> tuple[str, str] | None:
    import torch

    if torch.version.hip is None:
        return None
    # "gfx90a:sramecc+:xnack-": what follows the colon is configuration, not architecture.
    return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0], torch.cuda.get_device_name(index)


def _probe_npu(index: int) -> tuple[str, str] | None:
    import torch

    name: str = torch.npu.get_device_name(index)  # type: ignore[attr-defined]  # torch_npu adds this module
    return name, name


def _probe_xpu(index: int) -> tuple[str, str] | None:
    import torch

    return "", torch.xpu.get_device_name(index)


def _probe_mps(index: int) -> tuple[str, str] | None:
    return "", "Apple GPU"


def _probe_cpu(index: int) -> tuple[str, str] | None:
    import platform

    return platform.machine(), ""


CORE_KINDS = (
    DeviceKind(name="cuda", torch_type="cuda", probe=_probe_cuda, example="sm_90"),
    DeviceKind(name="rocm", torch_type="cuda", probe=_probe_rocm, example="gfx942"),
    DeviceKind(name="npu", torch_type="npu", probe=_probe_npu, example="Ascend910B3"),
    DeviceKind(name="xpu", torch_type="xpu", probe=_probe_xpu),
    DeviceKind(name="mps", torch_type="mps", probe=_probe_mps),
    DeviceKind(name="cpu", torch_type="cpu", probe=_probe_cpu),
)
