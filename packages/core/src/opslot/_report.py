"""Reports: what a binding did, as text for people."""

import re
from collections.abc import Iterable, Sequence
from textwrap import TextWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._binding import Binding, Row


_NUMBER = re.compile("0|[1-9][0-9]*")


def to_text(binding: "Binding") -> str:
    """The report of a binding: a tree of op, kernel with its reason, and the modules that have it."""
    title = f"opslot: {counted(len(binding.rows), 'slot')} on {binding.device}, choice {binding.fingerprint}"
    changed = binding.verify()
    if changed:
        title += f"; {len(changed)} of them no longer as bound, see verify()"
    lines = [title]
    indent = " " * 6
    modules_in = TextWrapper(120, indent, indent, break_long_words=False, break_on_hyphens=False)
    groups = grouped(binding.rows)
    for op in dict.fromkeys(op for op, _, _ in groups):
        lines.append(f"  {op}")
        for (other, kernel, reason), modules in groups.items():
            if other == op:
                lines.append(f"    {kernel}, {len(modules)} x  [{reason}]")
                lines += modules_in.wrap(", ".join(collapse(modules)))
    lines += [f"  attention: {binding.attention}, run by transformers"] if binding.attention else []
    lines += [f"  unused: {choice}, this model has no such slot" for choice in binding.unused]
    lines += [f"  {binding.failures}"] if binding.failures else []
    return "\n".join(lines)


def grouped(rows: "Iterable[Row]") -> dict[tuple[str, str, str], list[str]]:
    """The modules that share one op, kernel and reason; ops and kernels in the order of the model."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((f"{row.op}/{row.variant}", kernel_text(row), row.reason), []).append(row.module)
    return groups


def kernel_text(row: "Row") -> str:
    """Name, nested backend, distribution and version of a kernel: "liger (cutedsl) opslot-backend-liger 0.1.0"."""
    nested = f"({row.nested})" if row.nested else ""
    return " ".join(part for part in (row.kernel, nested, row.distribution, row.version) if part)


def counted(number: int, what: str) -> str:
    """ "1 slot", "2 slots"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def collapse(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers as one: layers.0.norm, layers.1.norm, layers.4.norm -> layers.{0-1,4}.norm.

    Exactly these names are meant, no others: a range with a gap says which layers are not in it.
    """
    shapes: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        parts = name.split(".")
        shape = tuple(None if _NUMBER.fullmatch(part) else part for part in parts)
        shapes.setdefault(shape, []).append(tuple(int(part) for part in parts if _NUMBER.fullmatch(part)))
    result = []
    for shape, numbers in shapes.items():
        for ranges in _ranges(numbers):
            fill = iter(ranges)
            result.append(".".join(next(fill) if part is None else part for part in shape) or "(the model)")
    return result


def _ranges(numbers: Sequence[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """The numbers of some names as products of ranges: those with the same rest are merged at each level."""
    if not numbers[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, tails in rests.items():
        alike.setdefault(tuple(sorted(tails)), []).append(first)
    return [(_range(firsts), *tail) for tails, firsts in alike.items() for tail in _ranges(tails)]


def _range(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"{{{text}}}" if len(spans) > 1 or spans[0][0] != spans[0][1] else text
