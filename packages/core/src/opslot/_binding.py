"""The result of a bind: what runs where and why, and the way back."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ._config import OpsConfig
from ._contract import OpContract
from ._device import Device
from ._errors import BindError
from ._kernel import EAGER
from ._modules import canonical_modules
from ._obstacle import obstacle, parameter_dtypes
from ._provenance import Provenance, digest, libraries
from ._registry import Offer
from ._report import counted, to_text
from ._slot import OpSlot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ._proof import Proof

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One slot of one module: what runs there and why. `module` is the empty string for the model itself.

    `source` and `nested` say which code the kernel is, as in `KernelSpec.nested` and docs/using.md.
    """

    module: str
    slot: str
    op: str
    variant: str
    kernel: str
    distribution: str
    version: str
    source: str
    nested: str
    reason: str

    @classmethod
    def of(
        cls, module: str, slot: str, contract: OpContract, offer: Offer | None, reason: str, provenance: Provenance
    ) -> "Row":
        kernel = (EAGER, "", "") if offer is None else (offer.spec.name, offer.distribution, offer.version)
        return cls(module, slot, *contract.key, *kernel, provenance.source, provenance.nested, reason)

    @property
    def choice(self) -> tuple[str, ...]:
        """What the fingerprint is of: which kernel of which code the slot has, not why."""
        return self.op, self.variant, self.kernel, self.distribution, self.version, self.source, self.nested

    @property
    def where(self) -> str:
        return f"{self.module or 'the model'} ({self.op}/{self.variant} -> {self.kernel})"


_CHANGED = "the class of the module was changed after bind and has no such slot"


@dataclass(frozen=True)
class Write:
    """One change to an instance: `slot` in place of `original`; None stands for the class's own slot."""

    module: "torch.nn.Module"
    names: tuple[str, ...]
    attribute: str
    slot: OpSlot | None
    original: OpSlot | None
    contract: OpContract

    def do(self, slot: OpSlot | None) -> None:
        if slot is None:
            vars(self.module).pop(self.attribute, None)
        else:
            vars(self.module)[self.attribute] = slot

    def in_place(self) -> bool:
        return vars(self.module).get(self.attribute) is self.slot

    def problem(self, present: "Mapping[str, Sequence[torch.nn.Module]]", bound: set[int], device: Device) -> str:
        """What happened to the slot since, or an empty string. `bound`: the modules of the binding, by identity."""
        gone = [name for name in self.names if all(module is not self.module for module in present.get(name, ()))]
        if gone:
            also = f" where it is called {gone[0]!r}" if len(self.names) > 1 else ""
            return f"the module was replaced or removed after bind{also}"
        new = (module for name in self.names for module in present[name] if id(module) not in bound)
        if any(isinstance(getattr(type(module), self.attribute, None), OpSlot) for module in new):
            return "another module was put beside it after bind, as PEFT's modules_to_save do, and may run in its place"
        now = getattr(self.module, self.attribute, None)
        if now is None:
            return _CHANGED
        if not self.in_place() or now.offer != (self.slot.offer if self.slot else None):
            return "the slot was bound again or unbound"
        if self.slot is None or self.slot.offer is None:
            return ""
        unmet = self.slot.offer.spec.unmet(device, parameter_dtypes(self.module))
        return obstacle(self.module, self.attribute, self.contract) or "; ".join(unmet)


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
        attention: str = "",
    ) -> None:
        self.device = device
        self.attention = attention
        self.rows = rows
        self.unused = unused
        self.failures = failures
        self._model = model
        self._writes = writes
        self._proving = False

    def apply(self) -> None:
        """Put the kernels in again. Raises `BindError` where a module's class has no such slot any more (`unadopt`)."""
        _refuse_in_backward("bound")
        for row, write in zip(self.rows, self._writes, strict=True):
            if not isinstance(getattr(write.module, write.attribute, None), OpSlot):
                raise BindError(f"{row.where}: {_CHANGED}: bind or adopt the model again")
        for write in self._writes:
            write.do(write.slot)

    def unbind(self) -> None:
        """Take the kernels out again: the model's own code runs. Slots bound again since are left alone."""
        _refuse_in_backward("unbound")
        for write in self._writes:
            if write.in_place():
                write.do(write.original)

    def verify(self) -> tuple[str, ...]:
        """The slots that are no longer as bound, each with its reason; empty when all are in place.

        Besides replaced modules and slots it finds what was changed around them since: a forward or an activation that
        was replaced, a loss function that was set, parameters of a dtype that the kernel does not take.
        """
        pairs = zip(self.rows, self.problems(), strict=True)
        return tuple(f"{row.where}: {problem}" for row, problem in pairs if problem)

    def problems(self) -> list[str]:
        """What happened to each slot since bind, in the order of `rows`; an empty string where nothing did."""
        present: dict[str, list[torch.nn.Module]] = {}
        for name, module in canonical_modules(self._model):
            present.setdefault(name, []).append(module)
        bound = {id(write.module) for write in self._writes}
        return [
            "the slot was unbound"  # before it was pickled, see __getstate__
            if row.kernel != EAGER and (write.slot is None or write.slot.offer is None)
            else write.problem(present, bound, self.device)
            for row, write in zip(self.rows, self._writes, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the kernels that are in place. An unbound model needs none where it is loaded."""
        writes = tuple(write if write.in_place() else replace(write, slot=write.original) for write in self._writes)
        return {**vars(self), "_writes": writes}

    def proof(self) -> "Proof":
        """A context manager that proves, over the forward and backward run inside it, that each kernel ran.

            with binding.proof() as proof:
                model(**batch).loss.backward()
            proof.check()

        See `Proof` for what it can see.
        """
        from ._proof import Proof

        return Proof(self)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the choice: which kernel, of which distribution, version and code, each slot has. Not the host."""
        return digest(sorted([row.module, row.slot, *row.choice] for row in self.rows))

    @property
    def environment_fingerprint(self) -> str:
        return digest(sorted(self.environment().items()))

    def environment(self) -> dict[str, str]:
        """What else the numbers depend on: device, Python, torch, and the libraries behind the kernels in use.

        Those are the distributions that gave kernels, what these require, and triton where the device may run it.
        """
        import platform
        from importlib.metadata import version

        import torch

        used = {write.slot.offer for write in self._writes if write.slot is not None and write.slot.offer is not None}
        return {
            "device": str(self.device),
            "python": platform.python_version(),
            "opslot": version("opslot"),
            **({"attention": self.attention} if self.attention else {}),
            **libraries(used, self.device),
            "torch": torch.__version__,  # with "+cu130", which its metadata does not have
        }

    def to_dict(self) -> dict[str, Any]:
        """The binding as plain data, described by the file binding.schema.json of this package."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "environment_fingerprint": self.environment_fingerprint,
            "environment": self.environment(),
            "attention": self.attention,
            "unused": list(self.unused),
            "failures": self.failures,
            "changed": list(self.verify()),
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
                    if "*" in name:
                        raise BindError(
                            f"module {name!r} has a name that no glob can say: rename it, or choose one kernel"
                        )
                    modules.setdefault(name, {})[f"{op}/{variant}"] = selector
        return OpsConfig(
            choices=choices,
            modules=modules,
            default=EAGER,
            attn_implementation=self.attention or None,
            strict=True,
            origin="Binding.config()",
        )

    def assert_same_on_all_ranks(self, timeout: float = 60.0) -> None:
        """Raise `BindError` on every rank of the default process group unless all ranks made the same choice.

        Every rank calls it equally often. A rank that does not arrive within `timeout` seconds, because its bind raised
        or its process died, is named, and the ranks that arrived raise: nobody waits for ever. Needs no device and
        does nothing without a process group.
        """
        from ._ranks import assert_same

        assert_same(self, timeout)

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        slots = counted(len(self.rows), "slot")
        return f"<Binding of {type(self._model).__name__}: {slots} on {self.device}, choice {self.fingerprint}>"


def _refuse_in_backward(what: str) -> None:
    import torch

    # Checkpointing runs forwards again inside backward; with another kernel they would no longer be the same forwards.
    if torch._C._current_graph_task_id() != -1:
        raise BindError(
            f"kernels cannot be {what} during backward, where activations may be recomputed: do it between steps"
        )
