"""Attempts: run other people's code, a backend's import or a kernel, and keep what it raises as a value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 300


@dataclass(frozen=True)
class Failure:
    """What was raised: in one line, as it is but without what its frames held, and the traceback as text."""

    text: str
    error: BaseException | None = field(default=None, compare=False)
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        import traceback

        # Also of errors that cannot be printed. A check that failed says so itself, without its kind.
        line = traceback.format_exception_only(error)[0].splitlines()[0].removeprefix("AssertionError: ")
        text = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
        where = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode("utf-8")
        traceback.clear_frames(error.__traceback__)  # they may hold gigabytes of tensors
        return cls(text, error, where)


def attempt(run: Callable[[], T]) -> T | Failure:
    """What `run` returns, or its failure."""
    try:
        return run()
    except KeyboardInterrupt:
        raise
    # The one broad except of this code base. Other people's code may raise anything, SystemExit and the panics of
    # extension modules included, and must not take down what stands beside it. Whoever calls this shows the failure.
    except BaseException as error:  # noqa: BLE001
        return Failure.of(error)
