"""The result of a bind: what runs where and why, and the way back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ._config import OpsConfig
from ._contract import OpContract
from ._device import Device
from ._errors import BindError
from ._kernel import EAGER
from ._modules import canonical_modules
from ._obstacle import obstacle, parameter_dtypes
from ._registry import PROCESS_LOCAL, Offer
from ._slot import OpSlot
from ._target import code_of, source_name

if TYPE_CHECKING:
    import torch

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One slot of one module: what runs there and why. `module` is the empty string for the model itself."""

    module: str
    slot: str
    op: str
    variant: str
    kernel: str
    distribution: str
    version: str
    identity: str
    reason: str

    @classmethod
    def of(cls, module: str, slot: str, contract: OpContract, offer: Offer | None, reason: str) -> "Row":
        if offer is None:
            return cls(module, slot, *contract.key, EAGER, "", "", EAGER, reason)
        return cls(
            module, slot, *contract.key, offer.spec.name, offer.distribution, offer.version, _identity(offer), reason
        )


@dataclass(frozen=True)
class Write:
    """One change to an instance: `slot` in place of `original`; None stands for the class's own slot."""

    module: "torch.nn.Module"
    attribute: str
    slot: OpSlot | None
    original: OpSlot | None
    contract: OpContract

    def do(self, slot: OpSlot | None) -> None:
        if slot is None:
            vars(self.module).pop(self.attribute, None)
        else:
            vars(self.module)[self.attribute] = slot


class Binding:
    """What `opslot.bind` did to one model. Printing it shows what runs where and why."""

    def __init__(
        self,
        model: "torch.nn.Module",
        device: Device,
        rows: tuple[Row, ...],
        writes: tuple[Write, ...],
        unused: tuple[str, ...],
        failures: str = "",
    ) -> None:
        self.device = device
        self.rows = rows
        self.unused = unused
        self.failures = failures
        self._model = model
        self._writes = writes

    def apply(self) -> None:
        _refuse_in_backward("bound")
        for write in self._writes:
            write.do(write.slot)

    def unbind(self) -> None:
        """Take the kernels out again: the model's own code runs. Slots bound again since are left alone."""
        _refuse_in_backward("unbound")
        for write in self._writes:
            if vars(write.module).get(write.attribute) is write.slot:
                write.do(write.original)

    def verify(self) -> tuple[str, ...]:
        """The slots that are no longer as bound, each with its reason; empty when all are in place.

        Besides replaced modules and slots it finds what was changed around them since: a forward or an activation that
        was replaced, a loss function that was set, parameters of a dtype that the kernel does not take.
        """
        present = {(name, id(module)) for name, module in canonical_modules(self._model)}
        problems = []
        for row, write in zip(self.rows, self._writes, strict=True):
            where = f"{row.module or 'the model'} ({row.op}/{row.variant} -> {row.kernel})"
            if (row.module, id(write.module)) not in present:
                problems.append(f"{where}: the module was replaced or removed after bind")
            elif vars(write.module).get(write.attribute) is not write.slot:
                problems.append(f"{where}: the slot was bound again or unbound")
            elif write.slot is not None and write.slot.offer is not None:
                now = write.slot.offer.spec.unmet(self.device, parameter_dtypes(write.module))
                problem = obstacle(write.module, write.attribute, write.contract) or "; ".join(now)
                problems += [f"{where}: {problem}"] if problem else []
        return tuple(problems)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the choice: which kernel of which distribution and version each slot has. Not the host."""
        return _digest(sorted([row.module, row.slot, row.op, row.variant, row.identity] for row in self.rows))

    def environment(self) -> dict[str, str]:
        """What else the numbers depend on: device, Python, torch and the distributions that gave kernels."""
        import platform
        from importlib.metadata import version

        used = {row.distribution: row.version for row in self.rows if row.distribution not in ("", PROCESS_LOCAL)}
        return {
            "device": str(self.device),
            "python": platform.python_version(),
            "torch": version("torch"),
            "opslot": version("opslot"),
            **dict(sorted(used.items())),
        }

    def to_dict(self) -> dict[str, Any]:
        environment = self.environment()
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "environment_fingerprint": _digest(sorted(environment.items())),
            "environment": environment,
            "unused": list(self.unused),
            "failures": self.failures,
            "slots": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        import json

        return json.dumps(self.to_dict(), indent=2) + "\n"

    def config(self) -> OpsConfig:
        """The explicit configuration that chooses again what this binding has, whatever is installed beside it."""
        chosen: dict[tuple[str, str], dict[str, list[str]]] = {}
        for row, write in zip(self.rows, self._writes, strict=True):
            selector = write.slot.offer.selector if write.slot is not None and write.slot.offer is not None else EAGER
            chosen.setdefault((row.op, row.variant), {}).setdefault(selector, []).append(row.module)
        choices: dict[str, str] = {}
        modules: dict[str, dict[str, str]] = {}
        for (op, variant), kernels in chosen.items():
            common = max(kernels, key=lambda selector: len(kernels[selector]))
            choices[f"{op}/{variant}"] = common
            for selector, names in kernels.items():
                for name in names if selector != common else ():
                    modules.setdefault(name, {})[f"{op}/{variant}"] = selector
        return OpsConfig(choices, modules, default=EAGER, strict=True, origin="Binding.config()")

    def assert_same_on_all_ranks(self) -> None:
        """Raise `BindError` on every rank of the default process group unless all ranks made the same choice."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return
        choices: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(choices, self.fingerprint)
        if len(set(choices)) > 1:
            ranks = {f: [r for r, g in enumerate(choices) if g == f] for f in dict.fromkeys(choices)}
            detail = "; ".join(f"ranks {r}: {f}" for f, r in ranks.items())
            raise BindError(
                f"the ranks chose different kernels: {detail}. Compare Binding.to_json() of one rank of each; their "
                "configuration, installed backends or devices differ"
            )

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            kernel = " ".join(p for p in (row.kernel, row.distribution, row.version) if p)
            groups.setdefault((f"{row.op}/{row.variant}", kernel, row.reason), []).append(row.module)
        lines = [f"opslot: {len(self.rows)} slots on {self.device}, choice {self.fingerprint}"]
        changed = self.verify()
        if changed:
            lines[0] += f"; {len(changed)} of them are no longer as bound, see verify()"
        width = max((len(op) for op, _, _ in groups), default=0)
        for (op, kernel, reason), modules in groups.items():
            lines.append(f"  {op:{width}}  {len(modules):4} x  {kernel}  [{reason}]")
            lines.append(f"  {'':{width}}          {', '.join(_collapse(modules))}")
        lines += [f"  unused: {choice}, this model has no such slot" for choice in self.unused]
        lines += [f"  {self.failures}"] if self.failures else []
        return "\n".join(lines)


def _refuse_in_backward(what: str) -> None:
    import torch

    # Checkpointing runs forwards again inside backward; with another kernel they would no longer be the same forwards.
    if torch._C._current_graph_task_id() != -1:
        raise BindError(
            f"kernels cannot be {what} during backward, where activations may be recomputed: do it between steps"
        )


def _collapse(names: Sequence[str]) -> list[str]:
    """Repeated layers as one name: model.layers.0.norm, model.layers.1.norm -> model.layers.*.norm."""
    patterns = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    return [pattern or "(the model)" for pattern in dict.fromkeys(patterns)]


def _identity(offer: Offer) -> str:
    """What a kernel is, in a fingerprint: its distribution and version, or the code of a process-local function."""
    if offer.distribution != PROCESS_LOCAL:
        return f"{offer.selector}=={offer.version}"
    return f"{offer.selector}=={source_name(offer.spec.target)}#{_digest(code_of(offer.spec.target))}"


def _digest(data: Any) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
