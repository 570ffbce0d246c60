"""A worker of `opslot verify`: reads checks to do as JSON from stdin, and says on stdout when each begins and ends.

A kernel that hangs, crashes or exhausts memory takes this process with it, and not the one that asked.
"""

import json
import os
import sys
import time
from typing import Any

from .._discovery import registry
from ._suite import check


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it no product is deterministic
    jobs: list[dict[str, Any]] = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is no answer

    def answer(**event: Any) -> None:
        print(json.dumps(event), file=answers, flush=True)

    # Before the first check, whose time is limited.
    import torch  # noqa: F401

    registry()
    for number, job in enumerate(jobs):
        answer(begin=number)
        start, problem = time.perf_counter(), ""
        try:
            check(
                job["op"],
                job["variant"],
                job["kernel"],
                device=job["device"],
                dtype=job["dtype"],
                seed=job["seed"],
                checks=(job["check"],),
            )
        except AssertionError as error:
            problem = "\n".join((str(error), *getattr(error, "__notes__", ())[1:]))
        answer(end=number, problem=problem, seconds=time.perf_counter() - start)


main()
