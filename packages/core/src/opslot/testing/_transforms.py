"""What torch makes of a kernel: second derivatives, torch.func, autocast, the compiler, custom operators."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from .._errors import KernelUnavailable
from ._case import Case, assert_random_gradients, error_of, exactly, is_tensor
from ._subject import FEW, REFUSALS, Subject

if TYPE_CHECKING:
    import torch


def double_backward(subject: Subject, seed: int) -> None:
    """A second derivative is right or refused; a kernel's share of one is never left out in silence."""
    import torch

    for case in islice(subject.cases(seed), FEW):
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

    for case in islice(subject.cases(seed), FEW):
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
    for case in islice(subject.cases(seed), FEW):
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


def checkpointed(subject: Subject, seed: int) -> None:
    """Under activation checkpointing the gradients are the same, also where it keeps some or all results of torch."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
        noop_context_fn,
    )

    def keeping(kept: Callable[[Any], bool]) -> Callable[[], Any]:
        def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE

        return lambda: create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    products = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
    ways = {
        "that keeps nothing": noop_context_fn,
        "that keeps matrix products": keeping(lambda operator: operator.overloadpacket.__name__ in products),
        "that keeps everything": keeping(lambda operator: True),
    }
    for case in islice(subject.cases(seed), FEW):
        with case.noted():
            if not case.has_gradients:
                continue
            for words, context in ways.items():

                def through(function: Callable[..., Any], context: Any = context) -> Callable[..., Any]:
                    return lambda *args, **kwargs: checkpoint(
                        function, *args, use_reentrant=False, context_fn=context, **kwargs
                    )

                try:
                    eager = case.run(through(case.reference))
                    _, incoming = next(case.incoming(eager.outputs))
                    eager.gradients(incoming, retain_graph=False)
                except RuntimeError:  # torch refuses to keep what is written to afterwards
                    continue
                try:
                    run = case.run(through(case.kernel))
                    assert_random_gradients(case, run, f"in a checkpoint {words}", retain_graph=False)
                except RuntimeError as error:
                    if words != "that keeps everything":
                        raise AssertionError(f"{case.where}: fails in a checkpoint {words}: {error}") from error
                else:
                    case.assert_outputs(run, f" in a checkpoint {words}")


def compiled(subject: Subject, seed: int) -> None:
    """Where claimed: one graph, no break, the same values and gradients. Where not: right or refused."""
    import torch

    if subject.device.type == "cpu" and subject.dtype_name != (subject.spec.dtypes or ("float32",))[0]:
        return  # the graph is the same, and tracing it takes seconds
    # The compiler that a machine without one still has; on a GPU the one that people use.
    backend = "aot_eager" if subject.device.type == "cpu" else "inductor"
    for number, case in enumerate(islice(subject.cases(seed), FEW)):
        with case.noted():
            torch._dynamo.reset()
            # The second with sizes that the graph does not know.
            dynamic = number == 1
            function = torch.compile(subject.kernel, fullgraph=subject.spec.compile, backend=backend, dynamic=dynamic)
            try:
                run = case.run(function, leaves=case.leaves if case.differentiable else ())
                case.assert_outputs(run, " compiled")
                # A compiled graph gives its buffers away in backward, unless it is told to keep them.
                assert_random_gradients(case, run, "compiled", retain_graph=False)
                with torch.no_grad():
                    eager = case.run(case.reference, leaves=())
                    case.assert_outputs(case.run(function, leaves=()), " compiled without gradients", eager=eager)
            except REFUSALS as error:
                if subject.spec.compile:
                    raise AssertionError(f"{case.where}: claims compile, and torch.compile says: {error}") from error
    torch._dynamo.reset()


def custom_ops(subject: Subject, seed: int) -> None:
    """torch.library.opcheck holds for every custom operator that the kernel calls."""
    import torch
    from torch.testing._internal.optests.generate_tests import OpCheckError
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

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
                # Also those in lists: an operator's own gradient is not what is asked about.
                plain = tree_map(lambda a: a.detach() if is_tensor(a) else a, args)
                try:
                    torch.library.opcheck(function, plain, kwargs)
                except OpCheckError as error:
                    case.fail(f"torch.library.opcheck of {function}: {error}")
