"""What a kernel returns: values and gradients, whatever the layout, the neighbours and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from .._errors import KernelUnavailable
from .._target import load_target
from ._accuracy import RMS, comparisons
from ._case import Case, assert_random_gradients, bytes_of, is_tensor
from ._layouts import relaid
from ._memory import poisoned_memory
from ._process import assert_process_unchanged
from ._subject import FEW, REFUSALS, Subject


def values(subject: Subject, seed: int) -> None:
    """Outputs are as many, of the kinds, shapes, dtypes and values that the contract says, and memory of their own."""
    for case in subject.cases(seed):
        with case.noted():
            case.assert_outputs(case.run())


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
            for name, tensor in run.passed.items():
                if tensor.grad is not None or tensor._backward_hooks:
                    case.fail(f"left a gradient or a hook on the argument {name}")
            for gradient, old in zip(incoming, before, strict=True):
                if gradient is not None and old is not None and not bool((bytes_of(gradient) == old).all()):
                    case.fail("the incoming gradient was changed")


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
                case.assert_outputs(only, " with all else frozen", eager=case.run(case.reference, leaves=[name]))
                case.assert_gradients(only, incoming, "everything else frozen")
                others = [other for other in case.leaves if other != name]
                if len(others) > 1:
                    rest = case.run(leaves=others)
                    case.assert_outputs(rest, f" with {name} frozen", eager=case.run(case.reference, leaves=others))
                    case.assert_gradients(rest, incoming, f"{name} frozen")


def no_grad(subject: Subject, seed: int) -> None:
    """Under no_grad and inference_mode: the same values, and nothing recorded."""
    import torch

    for case in subject.cases(seed):
        with case.noted():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    eager = case.run(case.reference, leaves=())
                    case.assert_outputs(case.run(leaves=()), f" under {mode.__name__}", eager=eager)
                    if mode is torch.no_grad:  # as in evaluation, where parameters still require gradients
                        run = case.run(leaves=case.leaves if case.differentiable else ())
                        case.assert_outputs(run, " under no_grad of parameters", eager=eager)
            with torch.enable_grad():
                plain = case.run(leaves=())
                case.assert_outputs(plain, " of what requires no gradient", eager=case.run(case.reference, leaves=()))
            case.assert_unchanged("a call without gradients")


def layouts(subject: Subject, seed: int) -> None:
    """Values and gradients, with all arguments and with each alone strided, padded, offset, transposed, expanded."""
    for sample in islice(subject.samples(seed), FEW):
        for other in relaid(sample):
            case = subject.case(other, seed)
            with case.noted():
                try:
                    run = case.run()
                except KernelUnavailable:
                    continue
                case.assert_outputs(run)
                assert_random_gradients(case, run)


def memory(subject: Subject, seed: int) -> None:
    """Twice forward and backward where memory that nobody wrote holds NaN."""
    with poisoned_memory():
        for case in subject.cases(seed):
            with case.noted():
                for _ in range(2):
                    run = case.run()
                    case.assert_outputs(run)
                    assert_random_gradients(case, run)


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
            assert_random_gradients(case, run)

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
            assert_random_gradients(other, run)

    for case in cases[:FEW]:
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


def accuracy(subject: Subject, seed: int) -> None:
    """Beside eager code in the same dtype, over eight seeds: RMS error at most 1.05 times, largest at most twice.

    A spec's `rms_error` stands in place of the 1.05, and raises both in proportion.
    """
    rms = dict(subject.spec.rms_error).get(subject.dtype_name, RMS)
    for comparison in comparisons(subject, seed):
        problem = comparison.problem(rms)
        if problem:
            where = f"{subject.contract}, kernel {subject.name}, sample {comparison.sample!r}"
            raise AssertionError(f"{where} ({subject.dtype_name} on {subject.device}, seed {seed}): {problem}")


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
