"""The registry: which contracts and kernels there are, and which kernel a name means."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ._backend import Backend
from ._catalog import distribution_of
from ._contract import Key, OpContract
from ._device import Device, DeviceKind, current_device, describe, is_present, parse_target
from ._distributions import normal
from ._errors import (
    BackendError,
    DuplicateError,
    KernelUnavailable,
    OpslotError,
    SpecError,
    UnknownKernel,
    UnknownOp,
    nearest,
)
from ._installed import Installed
from ._kernel import AUTO, EAGER, KernelSpec, Priority
from ._limits import forward_only, limited, nondeterministic
from ._target import check_kernel, code_of, load_target, source_name

if TYPE_CHECKING:
    import torch

PROCESS_LOCAL = "process-local"


@dataclass(frozen=True)
class Offer:
    """A kernel together with the distribution that brings it, or "process-local" for one of this process alone."""

    spec: KernelSpec
    distribution: str
    version: str = ""

    @property
    def selector(self) -> str:
        """The config value that means this kernel even when another distribution offers the same name."""
        return f"{self.distribution}:{self.spec.name}"

    def __str__(self) -> str:
        return f"{self.spec.name} ({' '.join(part for part in (self.distribution, self.version) if part)})"


@dataclass(frozen=True)
class Choice:
    """A decision with its reason. `offer` is None for eager: the model's own code runs."""

    offer: Offer | None
    reason: str


@dataclass(frozen=True)
class BackendRecord:
    """One backend as it was found: loaded, or failed with what it raised and the traceback as text, or `denied`.

    `imported` are the packages besides its own that its entry point brought into the process, in `milliseconds` in all.
    `remark` says what is odd about its installation.
    """

    name: str
    distribution: str
    version: str
    backend: Backend | None = None
    error: BaseException | None = None
    traceback: str = ""
    _: KW_ONLY
    denied: str = ""
    imported: tuple[str, ...] = ()
    milliseconds: float = 0.0
    remark: str = ""

    @property
    def message(self) -> str:
        """What was raised, as text that can be printed; an exception of others may not even do that."""
        if self.error is None:
            return ""
        from traceback import TracebackException

        text = f"{type(self.error).__name__}: {TracebackException.from_exception(self.error)}"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Registry:
    """Contracts, kernels and device kinds by name. A backend is taken whole or not at all."""

    def __init__(self) -> None:
        self._contracts: dict[Key, OpContract] = {}
        self._aliases: dict[Key, Key] = {}
        self._offers: dict[Key, list[Offer]] = {}
        self._kinds: dict[str, DeviceKind] = {}
        self.records: list[BackendRecord] = []

    def add(self, backend: Backend, distribution: str, version: str = "") -> None:
        """Take everything that `backend` offers, or raise and take nothing."""
        contracts = {**self._contracts, **_unique(backend.contracts, self._contracts, "contract")}
        kinds = {**self._kinds, **_unique(backend.device_kinds, self._kinds, "device kind")}
        aliases = dict(self._aliases)
        fields = {name: contract.op for contract in self._contracts.values() for name in contract.config_fields()}
        for contract in backend.contracts:
            if contract.key in aliases:
                raise DuplicateError(f"contract {contract}: this is an alias of {'/'.join(aliases[contract.key])}")
            for alias in contract.aliases:
                op, _, variant = alias.partition("/")
                if (op, variant) in contracts or (op, variant) in aliases:
                    raise DuplicateError(f"contract {contract}: its alias {alias!r} is the name of another contract")
                aliases[op, variant] = contract.key
            for name in contract.config_fields():
                if fields.setdefault(name, contract.op) != contract.op:
                    raise DuplicateError(
                        f"contract {contract}: the config field {name!r} is that of op {fields[name]!r}"
                    )
        offers = {key: list(known) for key, known in self._offers.items()}
        for spec in backend.kernels:
            key = aliases.get((spec.op, spec.variant), (spec.op, spec.variant))
            if key not in contracts:
                raise UnknownOp(
                    f"kernel {spec}: there is no contract {spec.op}/{spec.variant}{_variants(spec.op, contracts)}"
                )
            mine = offers.setdefault(key, [])
            for other in mine:
                if other.distribution == distribution and (taken := _names(spec) & _names(other.spec)):
                    raise DuplicateError(f"kernel {spec}: {distribution} uses the name {min(taken)!r} twice")
            mine.append(Offer(spec, distribution, version))
        self._contracts, self._kinds, self._aliases, self._offers = contracts, kinds, aliases, offers

    def register(self, spec: KernelSpec, *, replace: bool = False) -> None:
        """Offer a kernel from a script or notebook, in this process alone.

        Running the same definition again replaces it, as a notebook cell does. Another function under a taken name
        raises `DuplicateError`, unless `replace=True`.
        """
        if not isinstance(spec, KernelSpec):
            raise SpecError(f"register takes a KernelSpec(op=..., name=..., target=function), got {spec!r}")
        key = self.contract(spec.op, spec.variant).key
        offers = self._offers.get(key, [])
        taken = [old for old in offers if _names(spec) & _names(old.spec)]
        for old in taken:
            if old.distribution != PROCESS_LOCAL:
                raise DuplicateError(f"kernel {spec}: {old} has this name already; choose another")
            if not replace and _origin(old.spec) != _origin(spec):
                raise DuplicateError(f"kernel {spec}: registered before, from another function; pass replace=True")
        self._offers[key] = [*(old for old in offers if old not in taken), Offer(spec, PROCESS_LOCAL)]

    def contracts(self) -> tuple[OpContract, ...]:
        return tuple(self._contracts[key] for key in sorted(self._contracts))

    def contract(self, op: str, variant: str = "standard") -> OpContract:
        """The contract of `(op, variant)`, which may be aliases. Raises `UnknownOp`."""
        found = self._contracts.get(self._aliases.get((op, variant), (op, variant)))
        if found is not None:
            return found
        ops = {known for known, _ in self._contracts}
        if op in ops:
            raise UnknownOp(f"op {op!r} has no variant {variant!r}{_variants(op, self._contracts)}")
        raise UnknownOp(f"unknown op {op!r}{nearest(op, ops)}; known: {_list(sorted(ops))}{self.missing()}")

    def offers(self, op: str, variant: str = "standard") -> tuple[Offer, ...]:
        """Every kernel for this contract, usable here or not, by name."""
        key = self.contract(op, variant).key
        return tuple(sorted(self._offers.get(key, ()), key=lambda o: (o.spec.name, o.distribution)))

    def offer(self, op: str, variant: str, name: str) -> Offer:
        """The one kernel that `name` or `distribution:name` means.

        Raises `UnknownKernel`, `DuplicateError` when two distributions offer the bare name, `BackendError` when
        `name` is that of a backend which failed to load or is denied.
        """
        contract = self.contract(op, variant)
        distribution, _, bare = name.rpartition(":")
        offers = self.offers(op, variant)
        mine = [o for o in offers if not distribution or normal(o.distribution) == normal(distribution)]
        # A name as it is written wins over what is left of it without the contract's prefix.
        names = (bare, bare.removeprefix(contract.prefix))
        found = next((hits for wanted in names if (hits := [o for o in mine if wanted in _names(o.spec)])), [])
        if len(found) == 1:
            return found[0]
        if found:
            raise DuplicateError(
                f"kernel {name!r} for {contract} is offered by several distributions; "
                f"choose one of: {_list(o.selector for o in found)}"
            )
        absent = None if distribution else distribution_of(contract.op, names[-1])
        wanted_distribution = normal(distribution or absent or "")
        for record in self.records:
            meant = normal(record.distribution) == wanted_distribution or (not distribution and record.name in names)
            who = (
                f"kernel {name!r} for {contract.op}: backend {record.name!r} of {record.distribution} {record.version}"
            )
            if meant and record.denied:
                raise BackendError(f"{who} is {record.denied}")
            if meant and record.error is not None:
                raise BackendError(f"{who} failed to load: {record.message}") from record.error
        bare_names = [o.spec.name for o in offers]
        valid = [EAGER, AUTO, *(o.spec.name if bare_names.count(o.spec.name) == 1 else o.selector for o in offers)]
        selectors = [o.selector for o in offers] if distribution else valid
        hint = f"; {absent} would bring it, and is not installed" if absent else nearest(name, selectors)
        having = self.variants_with(contract.op, name)
        if having:
            hint = f"; {_list(having)} {'has' if len(having) == 1 else 'have'} one"
        raise UnknownKernel(f"no kernel {name!r} for {contract}{hint}; known: {_list(valid)}{self.missing()}")

    def variants_with(self, op: str, name: str) -> list[str]:
        """The variants of an op that have a kernel of this name."""
        _, _, bare = name.rpartition(":")
        mine = [contract for contract in self.contracts() if contract.op == op]
        return [
            contract.variant
            for contract in mine
            if any(
                {bare, bare.removeprefix(contract.prefix)} & _names(o.spec) for o in self._offers.get(contract.key, ())
            )
        ]

    def choose(
        self,
        op: str,
        variant: str,
        name: str,
        device: Device,
        dtypes: tuple[str, ...] = (),
        installed: Installed | None = None,
    ) -> Choice:
        """What `name` means on `device` for a module whose parameters are of `dtypes`.

        `installed` are the packages of another machine, `Installed.read("uv.lock")`; None means those here.
        Raises `KernelUnavailable` with every reason for an explicit name that cannot run.
        """
        if name == EAGER:
            return Choice(None, "asked for")
        if name == AUTO:
            return self._auto(op, variant, device, dtypes, installed)
        if name == (prefix := self.contract(op, variant).prefix).rstrip("_") and prefix:
            # A prefix alone once meant "the fused kernel of this machine"; unlike auto, it never means eager.
            choice = self._auto(op, variant, device, dtypes, installed)
            if choice.offer is None:
                raise KernelUnavailable(
                    f"{name!r} for {op}/{variant} needs a kernel, and there is none: {choice.reason}"
                )
            return Choice(choice.offer, f"{name!r} is deprecated, name the kernel or write auto; {choice.reason}")
        offer = self.offer(op, variant, name)
        reasons = _unmet(offer, device, dtypes, installed)
        if reasons:
            here = "here" if installed is None else f"with {installed}"
            raise KernelUnavailable(
                f"kernel {name!r} for {op}/{variant} cannot run {here}: {'; '.join(reasons)}. "
                f"Usable {here}: {_list(self.list_available(op, variant, device, dtypes, installed))}"
            )
        return Choice(offer, "asked for")

    def _auto(
        self, op: str, variant: str, device: Device, dtypes: tuple[str, ...], installed: Installed | None
    ) -> Choice:
        offers = self.offers(op, variant)
        why_not = {o.selector: "; ".join(_unmet(o, device, dtypes, installed)) for o in offers}
        ranked = [o for o in offers if _automatic(o.spec) and not why_not[o.selector]]
        if ranked:
            best = max(o.spec.priority for o in ranked)
            first, *ties = [o for o in ranked if o.spec.priority == best]
            also = f", first by name before {_list(o.spec.name for o in ties)}" if ties else ""
            also += f", measured in {first.spec.measured}" if first.spec.measured else ""
            return Choice(first, f"auto: {best.name} is the highest band usable on {device.kind}{also}")
        if not offers:
            return Choice(None, "auto: no installed backend offers a kernel")
        reasons = [f"{o.spec.name} {why_not[o.selector] or 'is chosen only by name'}" for o in offers]
        return Choice(None, f"auto: {', '.join(reasons)}")

    def load(self, offer: Offer) -> Callable[..., Any]:
        """Import the kernel and check that it can be called as its contract says. Raises `TargetError`.

        A kernel whose spec limits devices or dtypes, has no backward or does not claim to be deterministic comes
        wrapped: a call outside these limits raises `KernelUnavailable`.
        """
        spec = offer.spec
        owner = f"kernel {spec} of {offer.distribution}"
        kernel = load_target(spec.target, owner)
        signature = self.contract(spec.op, spec.variant).signature()
        check_kernel(kernel, signature, owner)
        if not spec.deterministic:
            kernel = nondeterministic(kernel, owner, spec.op)
        if not spec.backward:
            kernel = forward_only(kernel, owner)
        if spec.requires.devices or spec.requires.archs or spec.dtypes:
            kernel = limited(
                kernel, tuple(signature.parameters), lambda device, dtype: self._refusal(offer, device, dtype)
            )
        return kernel

    def _refusal(self, offer: Offer, device: "torch.device", dtype: "torch.dtype") -> str:
        """Why the loaded kernel cannot take a tensor of this device and dtype; empty when it can."""
        spec, dtypes, usable = offer.spec, (str(dtype).removeprefix("torch."),), ""
        if device.type == "meta" or not is_present(device):  # a tensor without data, traced for another machine
            reasons = spec.refused(dtypes)
        else:
            try:
                there = self.describe(device)
            except OpslotError as error:  # no kind knows such devices
                reasons = (str(error),)
            else:
                reasons = spec.unmet(there, dtypes)
                usable = f" (usable there: {_list(self.list_available(spec.op, spec.variant, there, dtypes))})"
        if not reasons:
            return ""
        return (
            f"kernel {spec} of {offer.distribution} was called with a {dtypes[0]} tensor on {device}: "
            f"{'; '.join(reasons)}. Move or cast the tensor, or bind another kernel, {spec.op}: eager{usable}"
        )

    def resolve(self, op: str, variant: str, name: str, device: Device | None = None) -> Callable[..., Any] | None:
        """The callable that `name` means on `device` (default: the present one). None for eager.

        Raises `UnknownOp` and `UnknownKernel` (`LookupError`), `KernelUnavailable` (`RuntimeError`).
        """
        offer = self.choose(op, variant, name, device or self.current_device()).offer
        return None if offer is None else self.load(offer)

    def list_available(
        self,
        op: str,
        variant: str = "standard",
        device: Device | None = None,
        dtypes: tuple[str, ...] = (),
        installed: Installed | None = None,
    ) -> list[str]:
        """The names that `resolve` takes on `device`: "eager" first, then each kernel that is usable there."""
        device = device or self.current_device()
        usable = [o for o in self.offers(op, variant) if not _unmet(o, device, dtypes, installed)]
        names = [o.spec.name for o in usable]
        return [EAGER, *(o.spec.name if names.count(o.spec.name) == 1 else o.selector for o in usable)]

    def current_device(self) -> Device:
        return current_device(self._kinds.values())

    def describe(self, device: Any) -> Device:
        """The `Device` of a `torch.device` or a string that torch or `target` understands; a `Device` is returned."""
        if isinstance(device, Device):
            return device
        import torch

        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            if isinstance(device, str) and ":" in device:
                with suppress(OpslotError):
                    return self.target(device)
            raise OpslotError(f"device {device!r}: {error}") from error
        return describe(wanted, self._kinds.values())

    def target(self, text: str) -> Device:
        """The `Device` of another machine from "cuda:sm_90", "rocm:gfx942", "npu:Ascend910B3", "cpu", ...

        Raises `OpslotError` for a kind that no installed backend brings, or an architecture that is none of its kind.
        """
        return parse_target(text, self._kinds.values())

    def failures(self) -> str:
        """One sentence that names the backends which failed to load, or nothing."""
        failed = [f"{r.distribution} ({r.message})" for r in self.records if r.error is not None]
        return f". These backends failed to load: {'; '.join(failed)}" if failed else ""

    def missing(self) -> str:
        """`failures()`, and a sentence that names the backends which OPSLOT_BACKENDS denies."""
        denied = [f"{r.name} of {r.distribution} is {r.denied}" for r in self.records if r.denied]
        return self.failures() + (f". Not loaded: {'; '.join(denied)}" if denied else "")


def _unique(items: Iterable[Any], taken: dict[Any, Any], what: str) -> dict[Any, Any]:
    fresh: dict[Any, Any] = {}
    for item in items:
        key = item.key if isinstance(item, OpContract) else item.name
        if key in taken or key in fresh:
            raise DuplicateError(f"{what} {'/'.join(key) if isinstance(key, tuple) else key} is defined already")
        fresh[key] = item
    return fresh


def _variants(op: str, contracts: Iterable[Key]) -> str:
    mine = sorted(variant for known, variant in contracts if known == op)
    if mine:
        return f"; {op} has: {', '.join(mine)}"
    return nearest(op, (known for known, _ in contracts))


def _names(spec: KernelSpec) -> set[str]:
    return {spec.name, *spec.aliases}


def _unmet(offer: Offer, device: Device, dtypes: tuple[str, ...], installed: Installed | None) -> tuple[str, ...]:
    """Why the kernel cannot run; for another machine also that its backend is not there as it is here."""
    reasons = offer.spec.unmet(device, dtypes, installed)
    if installed is None or offer.distribution == PROCESS_LOCAL:
        return reasons
    # A lock file gives no version to a project's own sources.
    stated = offer.version and "" not in installed.versions(offer.distribution)
    absent = installed.lacks(f"{offer.distribution}=={offer.version}" if stated else offer.distribution)
    return (absent, *reasons) if absent else reasons


def _automatic(spec: KernelSpec) -> bool:
    """`auto` chooses for training: not what is meant to be chosen by name, nor what has no backward."""
    return spec.priority > Priority.BY_NAME and spec.backward


def _origin(spec: KernelSpec) -> str:
    """What stays the same when a notebook cell that defines the kernel runs again.

    Functions are known by their name, so that an edited cell replaces; what has no name of its own, by its code.
    """
    name = source_name(spec.target)
    return name if "<lambda>" not in name and hasattr(spec.target, "__qualname__") else f"{name}#{code_of(spec.target)}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
