"""The checks of the conformance kit: each raises `AssertionError` at the first thing that is wrong."""

from collections.abc import Callable, Mapping

from ._claims import batch_invariant, cuda_graphs, deterministic, packed, refusals
from ._concurrency import streams, threads
from ._results import accuracy, arguments, frozen, gradients, large, layouts, memory, no_grad, state, twice, values
from ._subject import Subject
from ._transforms import autocast, checkpointed, compiled, custom_ops, double_backward, functional

Check = Callable[[Subject, int], None]


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        values,
        arguments,
        gradients,
        frozen,
        no_grad,
        layouts,
        memory,
        state,
        twice,
        double_backward,
        functional,
        autocast,
        checkpointed,
        accuracy,
        deterministic,
        batch_invariant,
        packed,
        refusals,
        threads,
        custom_ops,
        compiled,
        cuda_graphs,
        streams,
        large,
    )
}
