"""Memory that holds NaN until somebody writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that a kernel takes without initialising it holds NaN (or the largest integer).

    So a kernel that reads what it never wrote gives NaN instead of the zeros that fresh memory mostly holds. This is
    torch's `fill_uninitialized_memory`, which works in deterministic mode only: operations may take their deterministic
    paths inside, and those without one warn. Memory that a vendor's library allocates past torch stays as it is.
    """
    import torch

    # mypy does not see that torch makes this module a property holder.
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
