"""Attempts: run a kernel, which is other people's code, and keep what it raises as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 300


@dataclass(frozen=True)
class Failure:
    """What was raised, as text. The error itself would keep the tensors of every frame that it passed through."""

    text: str

    def __str__(self) -> str:
        return self.text


def attempt(run: Callable[[], T]) -> T | Failure:
    """What `run` returns, or its failure."""
    try:
        return run()
    # The other broad except: a kernel may raise anything, those of Triton's compiler derive from Exception alone, and
    # the other kernels shall go on. Whoever calls this shows the failure.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [""]
        text = lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}..."
        # A check that failed says so itself; of anything else the kind is half of the message.
        return Failure(text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}")
