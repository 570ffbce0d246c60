"""LEAF module. Edits of whole lines, spliced into the original text: lines that no edit names stay as they are."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Edit:
    """Put `lines` in place of the lines `start` to `stop` (from zero, half open); an insertion has them equal."""

    start: int
    stop: int
    lines: tuple[str, ...]


def insertion(at: int, *lines: str) -> Edit:
    return Edit(at, at, lines)


def in_order(edits: Iterable[Edit]) -> list[Edit]:
    """By place. The sort is stable: insertions at one place keep the order in which they were given."""
    return sorted(edits, key=lambda edit: (edit.start, edit.stop))


def first_overlap(edits: list[Edit]) -> Edit | None:
    """The first of the ordered `edits` that begins inside the one before it."""
    return next((after for before, after in pairwise(edits) if before.stop > after.start), None)


def splice(text: str, edits: list[Edit]) -> str:
    """Apply ordered edits that do not overlap."""
    lines = text.split("\n")
    result: list[str] = []
    done = 0
    for edit in edits:
        result += lines[done : edit.start]
        result += edit.lines
        done = edit.stop
    return "\n".join(result + lines[done:])
