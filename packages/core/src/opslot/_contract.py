"""Contracts: what an operation is, so that kernels for it can be exchanged and checked."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._errors import SpecError
from ._requires import check_strings
from ._target import Target, check_target, load_target

# What stands beside the ops in a configuration.
_RESERVED = {"default", "probe", "strict", "modules", "model", "ops_implementation", "attn_implementation"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Key = tuple[str, str]


@dataclass(frozen=True)
class Tolerance:
    """Largest error of a kernel against its reference in float64: `atol + rtol * max(abs(reference))`, per tensor.

    Not per element: terms of a sum may cancel to nearly nothing while the rounding errors of the terms remain.
    """

    rtol: float
    atol: float


@dataclass(frozen=True)
class Sample:
    """One set of arguments for a contract. Tensors that require gradients are differentiated in checks."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to measure a contract's kernels with, and how large it can get.

    `problem(device, dtype, seed, **shape)` makes the `Sample` of a shape. `shapes` are shapes of real models by name.
    `flops(**shape)` counts the floating-point operations of the forward's matrix products, None where it has none; the
    backward's are taken as twice that. `large` is a shape with a tensor of more than 2**31 elements that still fits one
    GPU of 140 GB with its reference beside it, None where there is no such shape.
    """

    problem: Target
    shapes: Mapping[str, Mapping[str, int]]
    flops: Target | None = None
    large: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for target in (self.problem, *((self.flops,) if self.flops is not None else ())):
            check_target(target, "Workload")
        if not isinstance(self.shapes, Mapping) or not self.shapes:
            raise SpecError(f"Workload: shapes must map names to sizes, got {self.shapes!r}")
        for shape in (*self.shapes.values(), self.large or {}):
            if not isinstance(shape, Mapping) or not all(
                isinstance(name, str) and type(size) is int for name, size in shape.items()
            ):
                raise SpecError(f"Workload: a shape maps names of sizes to integers, got {shape!r}")


@dataclass(frozen=True, kw_only=True)
class OpContract:
    """The definition of one `(op, variant)`. Two kernels are interchangeable only under the same contract.

    `reference` is a readable PyTorch function over plain tensors. Its signature is the contract's signature, its
    docstring gives maths, shapes and dtypes. `samples(device, dtype, seed)` yields `Sample`s: ordinary, odd and
    degenerate; `refused(device, dtype, seed)` those that the reference answers with a `ValueError`, and that no kernel
    may take either. `tolerances` are per dtype name ("float32"). `fields` are further names of the config field besides
    the op and `<op>_implementation`; `prefix` may stand before every value of it ("fused_"). `aliases` are other
    "op/variant" names of this contract. `activation` is the function that the maths applies: a slot that names its
    module's activation is refused when that one computes something else. `runs_when` says what a model must be asked
    for before it computes this op at all ("it gets labels"), for those who wonder why a kernel did not run. `stored`
    are the results, by number, that a model may only keep for later (the state of a cache), so that no gradient need
    come back through them. `rows` names the arguments that hold independent rows (tokens, or whole sequences where the
    rows of one depend on each other), each with the dimension along which they lie; the outputs' is that of the first.
    `packed` names those in which `cu_seqlens` packs sequences, with the dimension of the tokens; the first output's is
    that of the first. `workload` is what benchmarks run.
    """

    op: str
    variant: str
    summary: str
    reference: Target
    samples: Target
    tolerances: Mapping[str, Tolerance]
    fields: tuple[str, ...] = ()
    prefix: str = ""
    aliases: tuple[str, ...] = ()
    activation: Target | None = None
    runs_when: str = ""
    stored: tuple[int, ...] = ()
    refused: Target | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    packed: Mapping[str, int] = field(default_factory=dict)
    workload: Workload | None = None

    def __post_init__(self) -> None:
        check_strings(f"contract {self}: fields", self.fields)
        check_strings(f"contract {self}: aliases", self.aliases)
        for name in (self.op, self.variant):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise SpecError(f"contract {self}: {name!r} must be lower_case letters, digits and underscores")
        for alias in self.aliases:
            if not all(map(_NAME.fullmatch, alias.split("/"))) or alias.count("/") != 1:
                raise SpecError(f"contract {self}: alias {alias!r} must have the form 'op/variant'")
        if self.op in _RESERVED:
            raise SpecError(f"contract {self}: {self.op!r} has another meaning in configurations")
        for text in (self.summary, self.prefix, self.runs_when):
            if not isinstance(text, str):
                raise SpecError(f"contract {self}: summary, prefix and runs_when must be strings, got {text!r}")
        if not isinstance(self.stored, tuple) or not all(type(number) is int for number in self.stored):
            raise SpecError(f"contract {self}: stored must be a tuple of numbers of results, got {self.stored!r}")
        if not isinstance(self.tolerances, Mapping) or not all(
            isinstance(dtype, str) and isinstance(limit, Tolerance) for dtype, limit in self.tolerances.items()
        ):
            raise SpecError(
                f"contract {self}: tolerances must map names of dtypes to Tolerance, got {self.tolerances!r}"
            )
        for what, dims in (("rows", self.rows), ("packed", self.packed)):
            if not isinstance(dims, Mapping) or not all(
                isinstance(name, str) and type(dim) is int for name, dim in dims.items()
            ):
                raise SpecError(f"contract {self}: {what} must map names of arguments to dimensions, got {dims!r}")
        if self.workload is not None and not isinstance(self.workload, Workload):
            raise SpecError(f"contract {self}: workload must be a Workload, got {self.workload!r}")
        optional = (target for target in (self.activation, self.refused) if target is not None)
        for target in (self.reference, self.samples, *optional):
            check_target(target, f"contract {self}")

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}"

    @property
    def key(self) -> Key:
        return self.op, self.variant

    def load_reference(self) -> Any:
        return load_target(self.reference, f"the reference of {self}")

    def signature(self) -> inspect.Signature:
        return inspect.signature(self.load_reference())

    def doc(self) -> str:
        return inspect.getdoc(self.load_reference()) or self.summary

    def config_fields(self) -> tuple[str, ...]:
        """Every name under which a configuration may choose this op."""
        ops = dict.fromkeys([self.op, *(alias.split("/")[0] for alias in self.aliases)])
        return tuple(dict.fromkeys([*ops, *(f"{op}_implementation" for op in ops), *self.fields]))
