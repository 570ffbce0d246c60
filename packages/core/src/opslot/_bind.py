"""Binding: apply a configuration to one model, whole or not at all."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._binding import Binding, Row, Write
from ._config import OpsConfig
from ._contract import OpContract
from ._device import Device
from ._discovery import registry as default_registry
from ._errors import BindError
from ._kernel import AUTO
from ._obstacle import obstacle, parameter_dtypes
from ._provenance import Provenance
from ._registry import Choice, Offer, Registry
from ._slot import OpSlot

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
    if not hasattr(model, "named_modules"):
        raise BindError(f"{model!r} is not a torch.nn.Module")
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
        rows.append(Row.of(site.name, site.attribute, contract, choice.offer, reason, planner.provenance(slot)))
        writes.append(Write(site.module, site.attribute, slot, planner.original(site), contract))
    used = {(row.op, row.variant) for row in rows}
    unused = {field for key, (_, field) in selected.items()} - {f for key, (_, f) in selected.items() if key in used}
    failures = registry.failures().removeprefix(". ")
    binding = Binding(model, judged, tuple(rows), tuple(writes), tuple(sorted(unused)), failures)
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
        self._provenances: dict[Offer, Provenance] = {}

    def plan(self, site: _Site, contract: OpContract, name: str) -> tuple[Choice, OpSlot | None]:
        """The choice for this site and the slot to write into its instance, None where the class's own is right."""
        dtypes = parameter_dtypes(site.module)
        key = (contract.key, name, dtypes)
        if key not in self._choices:
            self._choices[key] = self._registry.choose(*contract.key, name, self._device, dtypes)
        choice = self._choices[key]
        if choice.offer is not None and (problem := obstacle(site.module, site.attribute, contract)):
            if name != AUTO:
                raise BindError(
                    f"{site.name or type(site.module).__name__} cannot use kernel {name!r} for {contract}: {problem}. "
                    f"Choose {contract.op}: eager, or undo that first"
                )
            choice = Choice(None, f"auto: {problem}")
        return choice, self._slot(site, choice)

    def original(self, site: _Site) -> OpSlot | None:
        """The slot without a kernel: None for the class's own, an unbound one where `__init__` made it."""
        declared = getattr(type(site.module), site.attribute, None)
        return None if isinstance(declared, OpSlot) else site.slot.bound_to(None, None)

    def provenance(self, slot: OpSlot | None) -> Provenance:
        if slot is None or slot.offer is None or slot.kernel is None:
            return Provenance()
        if slot.offer not in self._provenances:
            self._provenances[slot.offer] = Provenance.of(slot.offer, slot.kernel)
        return self._provenances[slot.offer]

    def _slot(self, site: _Site, choice: Choice) -> OpSlot | None:
        if choice.offer is None:
            return self.original(site)
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

    # The record carries the binding: a handler on this logger is how a framework learns of every bind.
    logging.getLogger("opslot").info("%s", binding, extra={"opslot_binding": binding})
