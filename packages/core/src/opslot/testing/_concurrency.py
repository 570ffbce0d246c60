"""Threads, streams and devices beside each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from threading import Barrier, BrokenBarrierError

from ._case import Case, Run, assert_random_gradients
from ._subject import FEW, Subject


def threads(subject: Subject, seed: int) -> None:
    """Two threads at once, in the same shapes with other values, get what one gets."""
    parts = [list(subject.cases(number)) for number in (seed, seed + 1)]
    together = Barrier(2)  # calls of a few microseconds would miss each other

    def work(mine: list[Case]) -> list[tuple[Case, Run]]:
        found = []
        try:
            for case in mine:
                with suppress(BrokenBarrierError):
                    together.wait()
                with case.noted():
                    found.append((case, case.run()))
        finally:
            together.abort()  # so that an error here does not leave the other waiting
        return found

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, part) for part in parts]
        for future in futures:
            for case, run in future.result():
                with case.noted():
                    case.assert_outputs(run, " in a second thread")
                    assert_random_gradients(case, run, "of a call in a second thread")


def streams(subject: Subject, seed: int) -> None:
    """On a second stream, and on the second of two devices while the first is the current one."""
    import torch

    if subject.device.type != "cuda":
        return
    for case in islice(subject.cases(seed), FEW):
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
            assert_random_gradients(case, run, "on a second stream")
    if torch.cuda.device_count() > 1 and (subject.device.index or 0) == 0:
        other = Subject(**{**vars(subject), "device": torch.device("cuda", 1)})
        for case in islice(other.cases(seed), FEW):
            with case.noted():
                run = case.run()
                case.assert_outputs(run, " on a second device")
                assert_random_gradients(case, run, "on a second device")
