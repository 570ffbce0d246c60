"""A worker of `opslot verify`: reads checks to do as JSON from stdin, and says on stdout when each begins and ends.

A kernel that hangs, crashes or exhausts memory takes this process with it, and not the one that asked.
"""

import json
import os
import sys
import time
from typing import Any

from .._discovery import registry
from .._kernel import EAGER
from .._provenance import Provenance
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

    sources = _Sources()
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
            # An assertion of the kernel's own may say nothing, and is no check that passed.
            problem = "\n".join((str(error) or repr(error), *getattr(error, "__notes__", ())))
        seconds = time.perf_counter() - start
        answer(
            end=number, problem=problem, seconds=seconds, source=sources.of(job["op"], job["variant"], job["kernel"])
        )


class _Sources:
    """Which code each kernel is, as bindings name it."""

    def __init__(self) -> None:
        self._registry = registry()
        self._known: dict[tuple[str, str, str], str] = {}

    def of(self, op: str, variant: str, kernel: str) -> str:
        key = op, variant, kernel
        if kernel != EAGER and key not in self._known:
            offer = self._registry.offer(*key)
            self._known[key] = Provenance.of(offer, self._registry.load(offer)).source
        return self._known.get(key, "")


main()
