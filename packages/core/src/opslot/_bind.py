"""Binding: apply a configuration to one model, whole or not at all."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._binding import Binding, Row, Write
from ._config import OpsConfig, Rule
from ._contract import Key, OpContract
from ._device import Device
from ._discovery import registry as default_registry
from ._environment import strict
from ._errors import BindError, ConfigError, OpslotError, TargetError, UnknownKernel, nearest
from ._kernel import AUTO, EAGER
from ._modules import canonical_modules, glob_pattern, matches
from ._obstacle import obstacle, parameter_dtypes
from ._provenance import Provenance
from ._registry import Choice, Offer, Registry
from ._report import counted
from ._slot import OpSlot

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    Ops = OpsConfig | Mapping[str, Any] | str | Path | None


@dataclass(frozen=True)
class _Site:
    """One slot of one module. A shared module has several names; the first is that of the report."""

    names: tuple[str, ...]
    module: "torch.nn.Module"
    attribute: str
    slot: OpSlot
    contract: OpContract

    def __str__(self) -> str:
        return self.names[0] or type(self.module).__name__


def bind(
    model: "torch.nn.Module",
    ops: "Ops" = None,
    *,
    device: Any = None,
    probe: bool | None = None,
    registry: Registry | None = None,
) -> Binding:
    """Bind the kernels that `ops` chooses to the slots of `model`, and say what was done.

    `ops`: see `OpsConfig.parse`; None means "auto". The variable OPSLOT_OPS wins over it. `device`: what to judge
    kernels for, a `torch.device`, a string ("cuda:1", or "cuda:sm_90" for another machine) or a `Device`; by default
    the device that the model's parameters are on, or the present accelerator while they are on the CPU or on meta,
    since models are often built there and moved.
    `probe`: first compare values and gradients of each chosen kernel with its contract's reference, on this device;
    None means what the configuration says (`probe: true`), by default no.

    Binding again replaces what an earlier binding wrote. Raises an `OpslotError` and leaves the model as it was when a
    name is unknown, an explicitly chosen kernel cannot run on the device, a module cannot use it, or a probe fails.
    """
    registry = registry or default_registry()
    config = OpsConfig.effective(ops)
    sites = list(_sites(model, registry))
    if not sites:
        raise BindError(
            f"{type(model).__name__} has no slots. Declare OpSlot attributes in its classes, or for a transformers "
            "model use opslot_models.adopt(model, ops) or opslot_models.build_foundation_model(...)"
        )
    rules = _Rules(config, registry, sites, model)
    attention = _attention(model, config)
    judged = registry.describe(device) if device is not None else _device_of(model, registry)

    rows, writes, chosen = [], [], []
    planner = _Planner(registry, judged, sites)
    for site in sites:
        name, why = rules.decide(site)
        choice, slot = planner.plan(site, name, why)
        reason = choice.reason if name == AUTO else f"{choice.reason}: {why}"
        source = planner.provenance(slot)
        rows.append(Row.of(site.names[0], site.attribute, site.contract, choice.offer, reason, source))
        if slot is not None and slot.offer is not None:
            chosen.append((site.names[0], site.contract, slot, parameter_dtypes(site.module)))
        writes.append(Write(site.module, site.names, site.attribute, slot, planner.original(site), site.contract))
    if config.setting("probe")[0] if probe is None else probe:
        from ._probe import probe as check

        check(chosen, model, judged, registry)
    failures = registry.missing().removeprefix(". ")
    binding = Binding(model, judged, tuple(rows), tuple(writes), rules.unused, failures, attention)
    with ExitStack() as undo:  # what a handler of the log raises is an error like any other
        undo.callback(_restore, _held(sites))
        binding.apply()
        _log(binding)
        undo.pop_all()
    return binding


@contextmanager
def bound(
    model: "torch.nn.Module",
    ops: "Ops" = None,
    *,
    device: Any = None,
    probe: bool | None = None,
    registry: Registry | None = None,
) -> Iterator[Binding]:
    """`bind` for the length of a `with` block. Afterwards the slots are what they were before, bound or not.

    The backward of what runs in the block belongs into it too: activation checkpointing runs the forward again then.
    """
    registry = registry or default_registry()
    before = _held(_sites(model, registry))
    binding = bind(model, ops, device=device, probe=probe, registry=registry)
    try:
        yield binding
    finally:
        _restore(before)


def _held(sites: Iterable[_Site]) -> list[tuple[Any, str, Any]]:
    """What each instance holds itself, for `_restore`."""
    return [(site.module, site.attribute, vars(site.module).get(site.attribute)) for site in sites]


def _restore(held: list[tuple[Any, str, Any]]) -> None:
    for module, attribute, slot in held:
        if slot is None:
            vars(module).pop(attribute, None)
        else:
            vars(module)[attribute] = slot


class _Rules:
    """What the configuration says about each site of one model."""

    def __init__(self, config: OpsConfig, registry: Registry, sites: list[_Site], model: "torch.nn.Module") -> None:
        self._default, origin = config.setting("default")
        self._default_why = f"default in {origin}" if self._default is not None else "default"
        self._default = self._default or AUTO
        rules = config.rules(registry)
        self._of: dict[Key | None, list[Rule]] = {}
        for rule in rules:
            self._of.setdefault(rule.key, []).append(rule)
        self._patterns = {rule.glob: glob_pattern(rule.glob) for rule in rules if rule.glob is not None}
        names = [name for name, _ in canonical_modules(model)] if self._patterns else []
        for rule in rules:
            if rule.glob is not None:
                _check_glob(rule, self._patterns[rule.glob], names, sites, model)
        present = {site.contract.op for site in sites}
        variants = {site.contract.key for site in sites}
        named = [rule for rule in rules if rule.glob is None and rule.kernel not in (AUTO, EAGER)]
        absent = [rule for rule in named if not _has_use(rule, present, variants)]
        self.unused = tuple(dict.fromkeys(f"{rule.field}: {rule.kernel} in {rule.origin}" for rule in absent))
        if self.unused and (config.setting("strict")[0] or strict()):
            raise ConfigError(
                f"{type(model).__name__} has no slot for {'; '.join(self.unused)}. Its ops: "
                f"{', '.join(sorted(present))}. Leave these out, or do without strict (the field, or OPSLOT_STRICT)"
            )

    def decide(self, site: _Site) -> tuple[str, str]:
        """The chosen name for a site, and where that was written. The last rule that matches decides."""
        mine = self._of.get(site.contract.key, [])
        last: dict[int, str] = {}  # the rule that decides under each name of the module, by its place
        for name in site.names:
            places = [i for i, r in enumerate(mine) if r.glob is None or matches(self._patterns[r.glob], name)]
            if places:
                last.setdefault(places[-1], name)
        if not last:
            return self._default, self._default_why
        special = {mine[place].kernel for place in last if mine[place].glob is not None}
        if len(special) > 1:
            rules = "; ".join(f"as {name!r}: {mine[place]}" for place, name in last.items())
            raise ConfigError(f"one shared module cannot have two kernels for {site.contract}: {rules}")
        rule = mine[max(last)]
        return rule.kernel, str(rule)


def _has_use(rule: Rule, ops: set[str], variants: set[Key]) -> bool:
    """A field speaks of all variants of its op; that a model lacks one is worth a word only when it was named."""
    if rule.key is None or rule.key[0] not in ops:
        return False
    return rule.key in variants or not _names_variant(rule)


def _names_variant(rule: Rule) -> bool:
    return rule.key is not None and rule.field.endswith((f".{rule.key[1]}", f"/{rule.key[1]}"))


def _check_glob(
    rule: Rule, pattern: "re.Pattern[str]", names: list[str], sites: list[_Site], model: "torch.nn.Module"
) -> None:
    """A glob that chooses for nothing is a mistake, unlike a field that a smaller model has no use for."""
    matched = [name for name in names if matches(pattern, name)]
    if not matched:
        raise ConfigError(f"{rule}: no module of {type(model).__name__} matches{nearest(str(rule.glob), names)}")
    op = rule.key[0] if rule.key else rule.field
    if rule.key is not None and _names_variant(rule):
        op = "/".join(rule.key)
    owners = {name for site in sites if op in (site.contract.op, str(site.contract)) for name in site.names}
    if not owners.intersection(matched):
        some = ", ".join(sorted(owners)[:3]) or "none in this model"
        raise ConfigError(
            f"{rule}: it matches {counted(len(matched), 'module')}, such as {matched[0]!r}, but none has a slot of "
            f"{op}. Modules with one: {some}"
        )


class _Planner:
    """Decides site by site, and loads each kernel once. Modules with one choice share one bound slot object."""

    def __init__(self, registry: Registry, device: Device, sites: list[_Site]) -> None:
        self._registry = registry
        self._device = device
        self._present = sorted({site.contract.key for site in sites})
        self._choices: dict[Any, Choice] = {}
        self._slots: dict[Any, OpSlot] = {}
        self._provenances: dict[Offer, Provenance] = {}

    def plan(self, site: _Site, name: str, why: str) -> tuple[Choice, OpSlot | None]:
        """The choice for this site and the slot to write into its instance, None where the class's own is right."""
        dtypes = parameter_dtypes(site.module)
        key = (site.contract.key, name, dtypes)
        if key not in self._choices:
            try:
                self._choices[key] = self._registry.choose(*site.contract.key, name, self._device, dtypes)
            except OpslotError as error:
                advice = self._advice(site.contract.op, name) if isinstance(error, UnknownKernel) else ""
                raise type(error)(f"{site}, chosen by {why}: {error}{advice}") from (error.__cause__ or error)
        choice = self._choices[key]
        if choice.offer is not None and (problem := obstacle(site.module, site.attribute, site.contract)):
            if name != AUTO:
                raise BindError(
                    f"{site} cannot use kernel {name!r} for {site.contract}, chosen by {why}: {problem}. "
                    f"Choose {site.contract.op}: eager, or undo that first"
                )
            choice = Choice(None, f"auto: {problem}")
        return choice, self._slot(site, choice)

    def _advice(self, op: str, name: str) -> str:
        """What chooses this kernel for those variants of the model that have it; empty where none has."""
        having = self._registry.variants_with(op, name)
        mine = [variant for key, variant in self._present if key == op]
        each = ", ".join(f"{variant}: {name if variant in having else AUTO}" for variant in mine)
        return f". For this model write {op}: {{{each}}}" if having else ""

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
            try:
                kernel = self._registry.load(choice.offer)
            except TargetError as error:
                raise TargetError(f"{site}: {error}\n  choose {site.contract.op}: eager, or another kernel") from error
            self._slots[identity] = site.slot.bound_to(kernel, choice.offer)
        return self._slots[identity]


def _sites(model: "torch.nn.Module", registry: Registry) -> Iterator[_Site]:
    if not hasattr(model, "named_modules"):
        raise BindError(f"{model!r} is not a torch.nn.Module")
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in canonical_modules(model):
        names.setdefault(module, []).append(name)
    declared: dict[type, dict[str, OpSlot]] = {}
    for module, mine in names.items():
        kind = type(module)
        if kind not in declared:
            everything = {a: v for cls in reversed(kind.__mro__) for a, v in vars(cls).items()}
            declared[kind] = {a: v for a, v in everything.items() if isinstance(v, OpSlot)}
            for attribute, slot in declared[kind].items():
                if slot.kernel is not None:
                    raise BindError(
                        f"{kind.__qualname__}.{attribute} is a class attribute that holds a kernel ({slot!r}), so no "
                        "module could be without it: declare it unbound"
                    )
        own = {a: v for a, v in vars(module).items() if isinstance(v, OpSlot)}
        for attribute, slot in {**declared[kind], **own}.items():
            yield _Site(tuple(mine), module, attribute, slot, registry.contract(slot.op, slot.variant))


def _device_of(model: "torch.nn.Module", registry: Registry) -> Device:
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return registry.describe(parameter.device)
    return registry.current_device()


def _attention(model: "torch.nn.Module", config: OpsConfig) -> str:
    """What transformers runs attention with, for the report. Raises `BindError` when the configuration says another."""
    wanted, origin = config.setting("attn_implementation")
    actual: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if wanted is not None and wanted != actual:
        raise BindError(
            f"attn_implementation is {wanted!r} in {origin}, but this model has {actual!r}. Attention is chosen "
            "by transformers: pass attn_implementation when building the model, or call model.set_attn_implementation"
        )
    return actual or ""


def _log(binding: Binding) -> None:
    import logging

    logger = logging.getLogger("opslot")
    # The record carries the binding: a handler on this logger is how a framework learns of every bind.
    logger.info("%s", binding, extra={"opslot_binding": binding})
    for choice in binding.unused:
        logger.warning("opslot: %s has no effect, this model has no such slot", choice)
