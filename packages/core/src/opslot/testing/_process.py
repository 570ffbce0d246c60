"""The state of the process that a call may not change behind its caller's back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._case import Case


@contextmanager
def assert_process_unchanged(case: Case) -> Iterator[None]:
    before = _state()
    yield
    after = _state()
    changed = [name for name, value in before.items() if value != after[name]]
    if changed:
        case.fail(f"changed the process's {', '.join(changed)}")


def _state() -> dict[str, Any]:
    import torch

    state: dict[str, Any] = {
        "random state": bytes(torch.get_rng_state().tolist()),
        "Python random state": hash(random.getstate()),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "number of threads": torch.get_num_threads(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "cuDNN flags": tuple(
            getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")
        ),
        "working directory": os.getcwd(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    }
    if torch.cuda.is_available():
        state["CUDA device"] = torch.cuda.current_device()
        state["CUDA stream"] = torch.cuda.current_stream()
        state["CUDA random state"] = bytes(torch.cuda.get_rng_state().tolist())
        state["half precision accumulation"] = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return state
