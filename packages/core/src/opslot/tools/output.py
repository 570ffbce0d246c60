"""What every command prints: tables and JSON."""

import json
from collections.abc import Iterable, Sequence
from typing import Any


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
