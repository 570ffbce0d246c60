"""What a spec claims holds, and what it does not claim is refused."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from .._errors import KernelUnavailable
from ._case import Case, exactly, is_tensor, same
from ._subject import FEW, REFUSALS, Subject

if TYPE_CHECKING:
    import torch


def deterministic(subject: Subject, seed: int) -> None:
    """Where claimed: the same bits each time, in deterministic mode too."""
    if not subject.spec.deterministic:
        return
    # cuBLAS raises in that mode unless this was set before its first use.
    in_mode = subject.device.type != "cuda" or "CUBLAS_WORKSPACE_CONFIG" in os.environ
    for case in islice(subject.cases(seed), 2 * FEW):
        with case.noted():
            for mode in (nullcontext, _deterministic_mode) if in_mode else (nullcontext,):
                with mode():
                    first, *others = (_bits(case) for _ in range(3))
                if not all(same(pair) for other in others for pair in zip(first, other, strict=True)):
                    case.fail("claims to be deterministic, and three calls did not give the same bits")


def batch_invariant(subject: Subject, seed: int) -> None:
    """Where claimed: a row's outputs and gradients are the same bits whatever rows stand beside it."""
    if not subject.spec.batch_invariant:
        return
    rows = subject.contract.rows
    if not rows:
        raise AssertionError(
            f"{subject.contract}, kernel {subject.name}: claims batch_invariant, but the contract has no rows"
        )
    lead, dim = next(iter(rows.items()))
    for case in subject.cases(seed):
        with case.noted():
            if case.given[lead].dim() < 2 or "cu_seqlens" in case.given:  # one row, or sequences that are rows of one
                continue
            count = case.given[lead].shape[dim]
            # An argument of one row serves all rows of the others.
            there = {n: d for n, d in rows.items() if n in case.given and case.given[n].shape[d] == count}
            whole = _row_bits(case, {}, there)
            for few in {few for few in (1, count // 2) if 0 < few < count}:
                cut = {name: case.given[name].detach().narrow(where, 0, few) for name, where in there.items()}
                for (a, _), (b, where) in zip(_row_bits(case, cut, there), whole, strict=True):
                    if not same((a, b.narrow(where, 0, few))):
                        case.fail(f"claims batch_invariant, but {few} of {count} rows alone give other bits")


def _row_bits(
    case: Case, other: Mapping[str, torch.Tensor], dims: Mapping[str, int], outputs: int | None = None
) -> list[tuple[torch.Tensor, int]]:
    """The first `outputs` (all) and the gradients of the arguments in `dims`, each with its dimension of rows.

    `other` are tensors in the place of some arguments.
    """
    tensors = {}
    for name, tensor in case.given.items():
        plain = other.get(name, tensor.detach()).detach()
        tensors[id(tensor)] = plain.requires_grad_(name in case.leaves and case.differentiable)
    run = case.call(case.kernel, tensors, case.leaves if case.differentiable else ())
    dim = next(iter(dims.values()))
    found = [(output.detach(), dim) for output in run.outputs[:outputs] if is_tensor(output)]
    if case.has_gradients:
        sent = [o.detach().cos() if is_tensor(o) and o.requires_grad else None for o in run.outputs]
        given = run.gradients(sent)
        found += [(gradient, dims[name]) for name, gradient in given.items() if gradient is not None and name in dims]
    return found


def _bits(case: Case) -> list[torch.Tensor]:
    run = case.run()
    found = [output.detach() for output in run.outputs if is_tensor(output)]
    if case.has_gradients:
        _, incoming = next(case.incoming(case.eager.outputs))
        found += [gradient for gradient in run.gradients(incoming).values() if gradient is not None]
    return found


def packed(subject: Subject, seed: int) -> None:
    """Where the contract packs sequences: changing one leaves the outputs and gradients of the others as they are."""
    dims = subject.contract.packed
    seen = 0
    for case in subject.cases(seed) if dims else ():
        with case.noted():
            boundaries = case.given.get("cu_seqlens")
            if boundaries is None or len(boundaries) < 3:
                continue
            seen += 1
            ends = boundaries.tolist()
            before = _row_bits(case, {}, dims, outputs=1)
            for start, end in pairwise(ends):
                changed = {name: case.given[name].detach().clone() for name in dims}
                for name, dim in dims.items():
                    changed[name].narrow(dim, start, end - start).mul_(0.5)
                after = _row_bits(case, changed, dims, outputs=1)
                for (a, dim), (b, _) in zip(before, after, strict=True):
                    for first, length in ((0, start), (end, ends[-1] - end)):
                        pair = a.narrow(dim, first, length), b.narrow(dim, first, length)
                        # Without a claim of determinism two calls differ by themselves, as much as the tolerance
                        # allows.
                        near = not subject.spec.deterministic and case.within(pair[0], exactly(pair[1]), 2.0)
                        if not (near or same(pair)):
                            case.fail(f"tokens {start} to {end} reach other sequences of the same pack")
    if dims and not seen:
        raise AssertionError(f"{subject.contract}: no sample of several packed sequences")


def cuda_graphs(subject: Subject, seed: int) -> None:
    """Where claimed: captured once, replayed with other inputs, and right each time."""
    import torch

    if subject.device.type != "cuda" or not subject.spec.cuda_graphs:
        return
    for case, other in zip(islice(subject.cases(seed), FEW), subject.cases(seed + 1), strict=False):
        with case.noted():
            held = {id(t): t.detach().clone() for t in case.given.values()}
            for name, tensor in case.given.items():
                held[id(tensor)].requires_grad_(name in case.leaves and case.differentiable)
            leaves = case.leaves if case.differentiable else ()
            _, sent = next(case.incoming(case.eager.outputs))
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    case.call(subject.kernel, held, leaves).gradients(sent, retain_graph=False) if leaves else None
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run = case.call(subject.kernel, held, leaves)
                found = run.gradients(sent, retain_graph=False) if leaves else {}
            for source in (other, case):
                with torch.no_grad():
                    for name, tensor in case.given.items():
                        held[id(tensor)].copy_(source.given[name])
                graph.replay()
                torch.cuda.synchronize()
                source.assert_outputs(run, " replayed from a CUDA graph")
                for name, value in source.expected(sent).items():
                    if leaves and value is not None:
                        got = found[name]
                        assert got is not None
                        source.compare(f"the gradient of {name} replayed from a CUDA graph", got, value)


def refusals(subject: Subject, seed: int) -> None:
    """What the contract refuses is refused; and, with `KernelUnavailable`, what the spec does not claim."""
    import torch

    for sample in subject.refused(seed):
        case = subject.case(sample, seed)
        with case.noted():
            try:
                case.without_gradients(case.reference)
            except ValueError:
                _assert_refused(case, "what its contract refuses", case.without_gradients, REFUSALS)
            else:
                case.fail("the reference took a sample that its contract calls refused")
    spec = subject.spec
    if spec.dtypes:
        for name in ("float32", "float16", "bfloat16", "float64"):
            if name not in spec.dtypes:
                for sample in islice(subject.samples(seed, getattr(torch, name)), 1):
                    case = subject.case(sample, seed)
                    with case.noted():
                        _assert_refused(case, f"{name}, which its spec does not name", case.without_gradients)
    # What makes a registered kernel refuse stands around its function: one that is given as a function has none of it.
    if not spec.deterministic and inspect.unwrap(subject.kernel) is not subject.kernel:
        for case in islice(subject.cases(seed), 1):
            with case.noted(), _deterministic_mode():
                _assert_refused(case, "deterministic mode, which its spec does not claim", case.without_gradients)
    if not spec.backward:
        for case in islice(subject.cases(seed), 1):
            with case.noted():
                _assert_refused(case, "gradients, which its spec does not claim", partial(case.run, leaves=case.leaves))


@contextmanager
def _deterministic_mode() -> Iterator[None]:
    import torch

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _assert_refused(
    case: Case, what: str, call: Callable[[], Any], errors: tuple[type[Exception], ...] = (KernelUnavailable,)
) -> None:
    try:
        call()
    except errors:
        return
    case.fail(f"took {what}")
