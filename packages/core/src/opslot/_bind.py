"""Binding: apply a configuration to one model, whole or not at all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._binding import Binding, Row, Write
from ._config import OpsConfig
from ._contract import OpContract
from ._device import Device
from ._discovery import registry as default_registry
from ._errors import BindError
from ._kernel import AUTO
from ._registry import Choice, Registry
from ._slot import OpSlot
from ._target import load_target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    Ops = OpsConfig | Mapping[str, Any] | str | Path | None


@dataclass(frozen=True)
class _Site:
    """One slot of one module."""

    name: str
    module: "torch.nn.Module"
    attribute: str
    slot: OpSlot


def bind(
    model: "torch.nn.Module", ops: "Ops" = None, *, device: Any = None, registry: Registry | None = None
) -> Binding:
    """Bind the kernels that `ops` chooses to the slots of `model`, and say what was done.

    `ops`: see `OpsConfig.parse`; None means "auto". `device`: what to judge kernels for, a `torch.device`, a string or
    a `Device`; by default the device that the model's parameters are on, or the present accelerator while they are on
    the CPU or on meta, since models are often built there and moved.

    Binding again replaces what an earlier binding wrote. Raises an `OpslotError` and leaves the model as it was when a
    name is unknown, an explicitly chosen kernel cannot run on the device, or a module cannot use it.
    """
    registry = registry or default_registry()
    config = OpsConfig.parse(ops)
    selected = config.select(registry)
    sites = list(_sites(model))
    if not sites:
        raise BindError(
            f"{type(model).__name__} has no slots. Declare OpSlot attributes in its classes, or for a transformers "
            "model use opslot_models.adopt(model, ops) or opslot_models.build_foundation_model(...)"
        )
    _check_attention(model, config)
    judged = registry.describe(device) if device is not None else _device_of(model, registry)

    rows, writes = [], []
    planner = _Planner(registry, judged)
    for site in sites:
        contract = registry.contract(site.slot.op, site.slot.variant)
        name, field = selected.get(contract.key, (config.default, "default"))
        choice, slot = planner.plan(site, contract, name)
        reason = choice.reason if name == AUTO else f"{choice.reason}: {field} in {config.origin}"
        rows.append(Row.of(site.name, site.attribute, contract, choice.offer, reason))
        writes.append(Write(site.module, site.attribute, site.module.__dict__.get(site.attribute), slot))
    used = {(row.op, row.variant) for row in rows}
    unused = {field for key, (_, field) in selected.items()} - {f for key, (_, f) in selected.items() if key in used}
    binding = Binding(model, judged, tuple(rows), tuple(writes), tuple(sorted(unused)))
    binding.apply()
    _log(binding)
    return binding


class _Planner:
    """Decides site by site, and loads each kernel once. Modules with one choice share one bound slot object."""

    def __init__(self, registry: Registry, device: Device) -> None:
        self._registry = registry
        self._device = device
        self._choices: dict[Any, Choice] = {}
        self._slots: dict[Any, OpSlot] = {}
        self._kernels: dict[str, Callable[..., Any]] = {}

    def plan(self, site: _Site, contract: OpContract, name: str) -> tuple[Choice, OpSlot | None]:
        """The choice for this site and the slot to write into its instance, None where the class's own is right."""
        dtypes = _dtypes(site.module)
        key = (contract.key, name, dtypes)
        if key not in self._choices:
            self._choices[key] = self._registry.choose(*contract.key, name, self._device, dtypes)
        choice = self._choices[key]
        if choice.offer is not None and (obstacle := _obstacle(site, contract)):
            if name != AUTO:
                raise BindError(
                    f"{site.name or type(site.module).__name__} cannot use kernel {name!r} for {contract}: {obstacle}. "
                    f"Choose {contract.op}: eager, or undo that first"
                )
            choice = Choice(None, f"auto: {obstacle}")
        return choice, self._slot(site, choice)

    def _slot(self, site: _Site, choice: Choice) -> OpSlot | None:
        if choice.offer is None:
            declared = getattr(type(site.module), site.attribute, None)
            return None if isinstance(declared, OpSlot) else site.slot.bound_to(None, None)
        identity = (site.slot.op, site.slot.variant, site.slot.activation, site.slot.check, choice.offer)
        if identity not in self._slots:
            self._slots[identity] = site.slot.bound_to(self._registry.load(choice.offer), choice.offer)
        return self._slots[identity]


def _sites(model: "torch.nn.Module") -> Iterator[_Site]:
    declared: dict[type, dict[str, OpSlot]] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in declared:
            everything = {a: v for cls in reversed(kind.__mro__) for a, v in vars(cls).items()}
            declared[kind] = {a: v for a, v in everything.items() if isinstance(v, OpSlot)}
        own = {a: v for a, v in vars(module).items() if isinstance(v, OpSlot)}
        for attribute, slot in {**declared[kind], **own}.items():
            yield _Site(name, module, attribute, slot)


def _device_of(model: "torch.nn.Module", registry: Registry) -> Device:
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return registry.describe(parameter.device)
    return registry.current_device()


def _dtypes(module: "torch.nn.Module") -> tuple[str, ...]:
    """The floating dtypes of the module's own parameters, or else of the first below it."""
    own = [p for p in module._parameters.values() if p is not None and p.is_floating_point()]
    parameters = own or [p for p in module.parameters() if p.is_floating_point()][:1]
    return tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _obstacle(site: _Site, contract: OpContract) -> str | None:
    """Why no kernel may run in place of this module's own code, or None."""
    forward = vars(site.module).get("forward")
    if forward is not None and not _reaches(forward, site.module):
        return f"its forward was replaced by {forward!r}, so the guard in {type(site.module).__name__} is never reached"
    if site.slot.activation is not None and contract.activation is not None:
        activation = getattr(site.module, site.slot.activation)
        if not _same_function(activation, load_target(contract.activation, f"the activation of {contract}")):
            return f"its activation {activation!r} is not the {contract.activation!r} of the contract"
    return site.slot.check(site.module) if site.slot.check is not None else None


def _reaches(forward: Any, module: "torch.nn.Module") -> bool:
    """Whether an instance's own forward still calls its class's, as accelerate's wrappers do and kernelize does not."""
    seen = 0
    while forward is not None and seen < 16:
        if getattr(forward, "__func__", forward) is type(module).forward:
            return True
        inner = getattr(forward, "__wrapped__", None)
        forward = inner if inner is not None else vars(module).get("_old_forward") if seen == 0 else None
        seen += 1
    return False


def _same_function(activation: Any, expected: Callable[..., Any]) -> bool:
    """Compare by values: names and classes of one function differ between libraries and versions."""
    import torch

    with torch.no_grad():
        points = torch.linspace(-32, 32, 129, device="cpu")
        return torch.allclose(activation(points), expected(points), rtol=1e-5, atol=1e-6)


def _check_attention(model: "torch.nn.Module", config: OpsConfig) -> None:
    wanted = config.attn_implementation
    actual = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if wanted is not None and wanted != actual:
        raise BindError(
            f"attn_implementation is {wanted!r} in {config.origin}, but this model has {actual!r}. Attention is chosen "
            "by transformers: pass attn_implementation when building the model, or call model.set_attn_implementation"
        )


def _log(binding: Binding) -> None:
    import logging

    logging.getLogger("opslot").info("%s", binding)
