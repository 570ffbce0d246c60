"""The checks of the conformance kit: each raises `AssertionError` at the first thing that is wrong."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from .._errors import KernelUnavailable
from .._target import load_target
from ._accuracy import comparisons
from ._case import Case, Run, bytes_of, error_of, exactly, is_tensor
from ._layouts import relaid
from ._memory import poisoned_memory
from ._process import assert_process_unchanged
from ._subject import Subject

if TYPE_CHECKING:
    import torch

Check = Callable[[Subject, int], None]

# What a kernel may raise for what it does not support and did not claim. Anything else is a fault.
REFUSALS = (KernelUnavailable, NotImplementedError, RuntimeError, TypeError, ValueError)
# Samples of each contract that every check beyond the plain ones runs: the first are the ordinary ones.
_FEW = 3


def arguments(subject: Subject, seed: int) -> None:
    """Arguments and incoming gradients come out bit for bit as they went in, and the process as it was."""
    for case in subject.cases(seed):
        with case.noted():
            with assert_process_unchanged(case):
                run = case.run()
                case.assert_unchanged("forward")
                if not case.has_gradients:
                    continue
                _, incoming = next(case.incoming(case.eager.outputs))
                before = [None if gradient is None else bytes_of(gradient) for gradient in incoming]
                run.gradients(incoming)
            case.assert_unchanged("backward")
            for gradient, old in zip(incoming, before, strict=True):
                if gradient is not None and old is not None and not bool((bytes_of(gradient) == old).all()):
                    case.fail("the incoming gradient was changed")


def values(subject: Subject, seed: int) -> None:
    """Outputs are as many, of the kinds, shapes, dtypes and values that the contract says, and memory of their own."""
    for case in subject.cases(seed):
        with case.noted():
            case.assert_outputs(case.run())


def gradients(subject: Subject, seed: int) -> None:
    """Every gradient is there and right, for incoming gradients in every layout and for each output alone."""
    for case in subject.cases(seed):
        with case.noted():
            if case.has_gradients:
                run = case.run()
                for layout, incoming in case.incoming(case.eager.outputs):
                    when = f"incoming gradient {layout}"
                    case.assert_gradients(run, incoming, when)


def frozen(subject: Subject, seed: int) -> None:
    """Gradients exist exactly where they are asked for, and do not depend on what else is frozen."""
    for case in subject.cases(seed):
        with case.noted():
            if not case.has_gradients:
                continue
            _, incoming = next(case.incoming(case.eager.outputs))
            for name in case.leaves:
                only = case.run(leaves=[name])
                case.assert_gradients(only, incoming, "everything else frozen")
                others = [other for other in case.leaves if other != name]
                if len(others) > 1:
                    case.assert_gradients(case.run(leaves=others), incoming, f"{name} frozen")


def no_grad(subject: Subject, seed: int) -> None:
    """Under no_grad and inference_mode: the same values, and nothing recorded."""
    import torch

    for case in subject.cases(seed):
        with case.noted():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    run = case.run(leaves=())
                    case.assert_outputs(run, f" under {mode.__name__}", eager=case.run(case.reference, leaves=()))
            case.assert_unchanged("a call without gradients")


def layouts(subject: Subject, seed: int) -> None:
    """Values and gradients, with all arguments and with each alone strided, padded, offset, transposed, expanded."""
    for sample in islice(subject.samples(seed), _FEW):
        for other in relaid(sample):
            case = subject.case(other, seed)
            with case.noted():
                try:
                    run = case.run()
                except KernelUnavailable:
                    continue
                case.assert_outputs(run)
                _assert_random_gradients(case, run)


def memory(subject: Subject, seed: int) -> None:
    """Twice forward and backward where memory that nobody wrote holds NaN."""
    with poisoned_memory():
        for case in subject.cases(seed):
            with case.noted():
                for _ in range(2):
                    run = case.run()
                    case.assert_outputs(run)
                    _assert_random_gradients(case, run)


def state(subject: Subject, seed: int) -> None:
    """Nothing is kept between calls that another call spoils, nor mistaken for what has changed since.

    Forwards of all samples first, then their backwards in the same order; then new values in the same memory; then an
    argument changed between forward and backward, which must be noticed or make no difference.
    """
    import torch

    cases = list(subject.cases(seed))
    runs = [case.run() for case in cases]
    for case, run in zip(cases, runs, strict=True):
        with case.noted():
            case.assert_outputs(run, " after calls with other arguments")
            _assert_random_gradients(case, run)

    for case, other in zip(cases, subject.cases(seed + 1), strict=True):
        with case.noted():
            held = {id(tensor): tensor.detach().clone() for tensor in case.given.values()}
            new = other.given
            if any(new[name].shape != tensor.shape for name, tensor in case.given.items()):
                continue
            case.call(subject.kernel, held, ())
            with torch.no_grad():
                for name, tensor in case.given.items():
                    held[id(tensor)].copy_(new[name])
            for name, tensor in case.given.items():
                held[id(tensor)].requires_grad_(name in case.leaves and case.differentiable)
            run = case.call(subject.kernel, held, case.leaves if case.differentiable else ())
            when = " for new values in the same memory"
            other.assert_outputs(run, when, eager=other.eager)
            _assert_random_gradients(other, run)

    for case in cases[:_FEW]:
        with case.noted():
            _assert_notices_changes(case)


def _assert_notices_changes(case: Case) -> None:
    import torch

    if not case.has_gradients:
        return
    _, incoming = next(case.incoming(case.eager.outputs))
    for name, tensor in case.given.items():
        if not tensor.is_floating_point() or not tensor.numel() or 0 in tensor.stride():
            continue
        fresh = {id(t): t.detach().clone().requires_grad_(n in case.leaves) for n, t in case.given.items()}
        run = case.call(case.kernel, fresh, case.leaves)
        with torch.no_grad():
            fresh[id(tensor)].mul_(3)  # as an optimizer step, or an activation in place, would
        try:
            run.gradients(incoming)
        except REFUSALS:
            continue
        case.assert_gradients(run, incoming, f"{name} changed in place after forward, which went unnoticed")


def twice(subject: Subject, seed: int) -> None:
    """A second backward through the same graph gives the same gradients as the first."""
    for case in subject.cases(seed):
        with case.noted():
            if case.has_gradients:
                run = case.run()
                _, incoming = next(case.incoming(case.eager.outputs))
                run.gradients(incoming)
                case.assert_gradients(run, incoming, "second backward")


def double_backward(subject: Subject, seed: int) -> None:
    """A second derivative is right or refused; a kernel's share of one is never left out in silence."""
    import torch

    for case in islice(subject.cases(seed), _FEW):
        with case.noted():
            if not case.has_gradients:
                continue
            _, incoming = next(case.incoming(case.eager.outputs))
            run = case.run()
            try:
                first = run.gradients(incoming, create_graph=True)
            except REFUSALS:
                continue
            exact = case.exact.gradients([None if g is None else exactly(g) for g in incoming], create_graph=True)
            for name, value in exact.items():
                mine = first[name]
                if value is None or not value.requires_grad or mine is None:
                    continue
                if not mine.requires_grad:
                    case.fail(f"the gradient of {name} has no second derivative, and the kernel does not say so")
                second = torch.autograd.grad(
                    value.square().sum(), list(case.exact.leaves.values()), retain_graph=True, allow_unused=True
                )
                try:
                    got = torch.autograd.grad(
                        mine.square().sum(), list(run.leaves.values()), retain_graph=True, allow_unused=True
                    )
                except REFUSALS:
                    continue
                eager = case.run(case.reference)
                theirs = eager.gradients(incoming, create_graph=True)[name]
                assert theirs is not None
                likewise = torch.autograd.grad(theirs.square().sum(), list(eager.leaves.values()), allow_unused=True)
                for leaf, a, b, c in zip(run.leaves, got, likewise, second, strict=True):
                    if c is None or b is None:
                        continue
                    what = f"the second derivative of {name} by {leaf}"
                    if a is None:
                        if bool(c.any()):
                            case.fail(f"{what} is missing")
                        continue
                    # Two more passes of rounding than the tolerance was derived for: eager's own error is the measure.
                    case.compare(what, a, c, allowed=4 * float(error_of(b, c)[0].max()) if c.numel() else 0.0)


def functional(subject: Subject, seed: int) -> None:
    """torch.func's vjp, jvp and vmap give what plain calls give, or refuse."""
    import torch

    for case in islice(subject.cases(seed), _FEW):
        with case.noted():
            if not case.has_gradients:
                continue
            names = list(case.leaves)
            given = [case.given[name].detach().clone() for name in names]
            _, incoming = next(case.incoming(case.eager.outputs))
            differentiable = [i for i, o in enumerate(case.eager.outputs) if is_tensor(o) and o.requires_grad]
            sent = tuple(incoming[i] for i in differentiable)

            def call(*leaves: torch.Tensor, case: Case = case, names: list[str] = names) -> tuple[Any, ...]:
                mine = dict(zip(names, leaves, strict=True))
                tensors = {id(t): mine[n] if n in mine else t.detach() for n, t in case.given.items()}
                outputs = case.call(case.kernel, tensors, ()).outputs
                return tuple(o for o in outputs if is_tensor(o) and o.is_floating_point())

            outputs = [o for o in case.exact.outputs if is_tensor(o) and o.is_floating_point()]
            if len(outputs) != len(differentiable):
                continue
            expected = case.expected(incoming)
            try:
                found = torch.func.vjp(call, *given)[1](sent)
            except REFUSALS:
                pass
            else:
                for name, got in zip(names, found, strict=True):
                    if (value := expected[name]) is not None:
                        case.compare(f"torch.func.vjp by {name}", got, value)
            try:
                batched = torch.func.vmap(call)(*(torch.stack((t, t)) for t in given))
            except REFUSALS:
                pass
            else:
                for number, (got, value) in enumerate(zip(batched, outputs, strict=True)):
                    for each in got:
                        case.compare(f"output {number} under torch.func.vmap", each, value)
            tangents = tuple(torch.ones_like(t) for t in given)
            try:
                pushed = torch.func.jvp(call, tuple(given), tangents)[1]
            except REFUSALS:
                continue
            # <incoming, J 1> is the sum of all gradients of the leaves.
            pairs = [(p.double(), g.double()) for p, g in zip(pushed, sent, strict=True) if g is not None]
            mine = sum(float((p * g).sum()) for p, g in pairs)
            true = sum(float(value.sum()) for value in expected.values() if value is not None)
            scale = sum(float(value.abs().sum()) for value in expected.values() if value is not None)
            if not abs(mine - true) <= 4 * (case.tolerance.rtol * scale + case.tolerance.atol):
                case.fail(f"torch.func.jvp gives {mine:.6g} where the gradients add up to {true:.6g}")


def autocast(subject: Subject, seed: int) -> None:
    """Under autocast to bfloat16, with all parameters in float32: eager's dtypes, and errors like eager's."""
    import torch

    if subject.dtype is not torch.float32:
        return
    kind = subject.device.type
    half = subject.contract.tolerances.get("bfloat16")
    for case in islice(subject.cases(seed), _FEW):
        with case.noted():
            with torch.autocast(kind, torch.bfloat16):
                try:
                    run = case.run()
                except KernelUnavailable:  # the spec limits the dtypes
                    continue
                eager = case.run(case.reference)
            for number, (got, like, exact) in enumerate(
                zip(run.outputs, eager.outputs, case.exact.outputs, strict=True)
            ):
                if is_tensor(like) and got.dtype != like.dtype:
                    case.fail(f"output {number} under autocast has dtype {got.dtype}, that of eager {like.dtype}")
                if is_tensor(like) and like.is_floating_point():
                    _compare_beside(case, f"output {number} under autocast", got, like, exact, half)
            if not case.has_gradients:
                continue
            _, incoming = next(case.incoming(eager.outputs))
            mine, theirs = run.gradients(incoming), eager.gradients(incoming)
            for name, exact in case.expected(incoming).items():
                a, b = mine[name], theirs[name]
                if exact is None or b is None:
                    continue
                if a is None or a.dtype != b.dtype:
                    case.fail(f"the gradient of {name} under autocast is {'missing' if a is None else a.dtype}")
                _compare_beside(case, f"the gradient of {name} under autocast", a, b, exact, half)


def _compare_beside(
    case: Case, what: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, half: Any
) -> None:
    """Within twice eager's largest error, or within bfloat16's tolerance where eager did compute in bfloat16."""
    error, largest = error_of(eager, exact)
    theirs = float(error.nan_to_num(nan=0.0).max()) if error.numel() else 0.0
    in_half = theirs > case.tolerance.atol + case.tolerance.rtol * largest
    allowed = half.atol + half.rtol * largest if in_half and half is not None else 0.0
    case.compare(what, got, exact, allowed=max(2 * theirs, allowed))


def deterministic(subject: Subject, seed: int) -> None:
    """Where claimed: the same bits each time, in deterministic mode too."""
    if not subject.spec.deterministic:
        return
    # cuBLAS raises in that mode unless this was set before its first use.
    in_mode = subject.device.type != "cuda" or "CUBLAS_WORKSPACE_CONFIG" in os.environ
    for case in islice(subject.cases(seed), 2 * _FEW):
        with case.noted():
            for mode in (nullcontext, _deterministic_mode) if in_mode else (nullcontext,):
                with mode():
                    first, *others = (_bits(case) for _ in range(3))
                if not all(_same(pair) for other in others for pair in zip(first, other, strict=True)):
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
                    if not _same((a, b.narrow(where, 0, few))):
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


def _same(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    import torch

    a, b = (tensor.contiguous() for tensor in pair)
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=1.0), b.nan_to_num(nan=1.0))


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
                        if not (near or _same(pair)):
                            case.fail(f"tokens {start} to {end} reach other sequences of the same pack")
    if dims and not seen:
        raise AssertionError(f"{subject.contract}: no sample of several packed sequences")


def compiled(subject: Subject, seed: int) -> None:
    """Where claimed: one graph, no break, the same values and gradients. Where not: right or refused."""
    import torch

    if subject.device.type == "cpu" and subject.dtype_name != (subject.spec.dtypes or ("float32",))[0]:
        return  # the graph is the same, and tracing it takes seconds
    # The compiler that a machine without one still has; on a GPU the one that people use.
    backend = "aot_eager" if subject.device.type == "cpu" else "inductor"
    for case in islice(subject.cases(seed), _FEW):
        with case.noted():
            torch._dynamo.reset()
            function = torch.compile(subject.kernel, fullgraph=subject.spec.compile, backend=backend, dynamic=False)
            try:
                run = case.run(function, leaves=case.leaves if case.differentiable else ())
                case.assert_outputs(run, " compiled")
                _assert_random_gradients(case, run, "compiled")
                with torch.no_grad():
                    eager = case.run(case.reference, leaves=())
                    case.assert_outputs(case.run(function, leaves=()), " compiled without gradients", eager=eager)
            except REFUSALS as error:
                if subject.spec.compile:
                    raise AssertionError(f"{case.where}: claims compile, and torch.compile says: {error}") from error
    torch._dynamo.reset()


def cuda_graphs(subject: Subject, seed: int) -> None:
    """Where claimed: captured once, replayed with other inputs, right each time. Where not: right or refused."""
    import torch

    if subject.device.type != "cuda" or not subject.spec.cuda_graphs:
        return
    for case, other in zip(islice(subject.cases(seed), _FEW), subject.cases(seed + 1), strict=False):
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


def custom_ops(subject: Subject, seed: int) -> None:
    """torch.library.opcheck holds for every custom operator that the kernel calls."""
    import torch
    from torch.testing._internal.optests.generate_tests import OpCheckError
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[Any, tuple[Any, Any]] = {}

    class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace not in ("aten", "prim", "prims", "quantized", "_c10d_functional", "profiler"):
                calls.setdefault(func, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    for case in islice(subject.cases(seed), 1):
        with case.noted():
            with Record():  # type: ignore[no-untyped-call]
                run = case.run()
                if case.has_gradients:
                    _, incoming = next(case.incoming(case.eager.outputs))
                    run.gradients(incoming)
            for function, (args, kwargs) in calls.items():
                plain = tuple(a.detach() if is_tensor(a) else a for a in args)
                try:
                    torch.library.opcheck(function, plain, kwargs)
                except OpCheckError as error:
                    case.fail(f"torch.library.opcheck of {function}: {error}")


def threads(subject: Subject, seed: int) -> None:
    """Two threads at once, each with samples of its own, get what one gets."""
    cases = list(subject.cases(seed))

    def work(mine: list[Case]) -> list[tuple[Case, Run]]:
        found = []
        for case in mine:
            with case.noted():
                found.append((case, case.run()))
        return found

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, part) for part in (cases, cases[::-1])]
        for future in futures:
            for case, run in future.result():
                with case.noted():
                    case.assert_outputs(run, " in a second thread")
                    _assert_random_gradients(case, run, "of a call in a second thread")


def streams(subject: Subject, seed: int) -> None:
    """On a second stream, and on the second of two devices while the first is the current one."""
    import torch

    if subject.device.type != "cuda":
        return
    for case in islice(subject.cases(seed), _FEW):
        with case.noted():
            side = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(subject.device))
            with torch.cuda.stream(side):
                # What a kernel puts on another stream is done before this one has begun to copy the arguments.
                torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
                moved = {id(t): t.detach().clone() for t in case.given.values()}
                for name, tensor in case.given.items():
                    moved[id(tensor)].requires_grad_(name in case.leaves and case.differentiable)
                run = case.call(subject.kernel, moved, case.leaves if case.differentiable else ())
            side.synchronize()
            case.assert_outputs(run, " on a second stream")
            _assert_random_gradients(case, run, "on a second stream")
    if torch.cuda.device_count() > 1 and (subject.device.index or 0) == 0:
        other = Subject(**{**vars(subject), "device": torch.device("cuda", 1)})
        for case in islice(other.cases(seed), _FEW):
            with case.noted():
                run = case.run()
                case.assert_outputs(run, " on a second device")
                _assert_random_gradients(case, run, "on a second device")


def large(subject: Subject, seed: int) -> None:
    """A tensor of more than 2**31 elements, where the contract's workload has a shape for one: as eager computes it.

    Both are rounded, so they may differ by twice the tolerance.
    """
    workload = subject.contract.workload
    if workload is None or workload.large is None:
        return
    make = load_target(workload.problem, f"the workload of {subject.contract}")
    case = subject.case(make(subject.device, subject.dtype, seed, **workload.large), seed)
    with case.noted():
        run = case.run()
        _assert_close(case, "output", run.outputs, case.eager.outputs)
        if case.has_gradients:
            # Not the kit's own incoming gradients, which are drawn on the CPU.
            sent = [o.detach().cos() if is_tensor(o) and o.requires_grad else None for o in case.eager.outputs]
            names, mine = zip(*run.gradients(sent, retain_graph=False).items(), strict=True)
            del run
            _assert_close(case, f"gradient of {names}", mine, tuple(case.eager.gradients(sent).values()))


def _assert_close(case: Case, what: str, mine: Sequence[Any], eager: Sequence[Any]) -> None:
    for place, (got, like) in enumerate(zip(mine, eager, strict=True)):
        if not is_tensor(like) or not is_tensor(got) or got.shape != like.shape or got.dtype != like.dtype:
            if got is not like:
                case.fail(f"{what}, number {place}: {got!r}, eager gives {like!r}"[:500])
            continue
        limit = 2 * (case.tolerance.atol + case.tolerance.rtol * float(like.detach().abs().max()))
        parts, others = (tensor.detach().reshape(-1).split(2**28) for tensor in (got, like))
        for part, other in zip(parts, others, strict=True):
            worst = float((part.float() - other.float()).abs().max())
            if not worst <= limit:
                case.fail(f"{what}, number {place}: differs from eager by {worst:.3g}, allowed {limit:.3g}")


def refusals(subject: Subject, seed: int) -> None:
    """What the spec does not claim is refused with `KernelUnavailable`: other dtypes, gradients without a backward."""
    import torch

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


def _assert_refused(case: Case, what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except KernelUnavailable:
        return
    case.fail(f"took {what}")


def accuracy(subject: Subject, seed: int) -> None:
    """Beside eager code in the same dtype, over eight seeds: RMS error at most 1.05 times, largest at most twice."""
    for comparison in comparisons(subject, seed):
        problem = comparison.problem()
        if problem:
            where = f"{subject.contract}, kernel {subject.name}, sample {comparison.sample!r}"
            raise AssertionError(f"{where} ({subject.dtype_name} on {subject.device}, seed {seed}): {problem}")


def _assert_random_gradients(case: Case, run: Run, when: str = "") -> None:
    if case.has_gradients:
        _, incoming = next(case.incoming(case.eager.outputs))
        case.assert_gradients(run, incoming, when or "incoming gradient random")


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
