"""What every command prints: tables and JSON."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from opslot import Registry, registry


def quiet_registry() -> Registry:
    """The registry. What backends print while they are imported goes to stderr: stdout is for what was asked."""
    with stdout_as_stderr():
        return registry()


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # for what writes past Python
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def command_of(options: argparse.Namespace, *words: str, flags: Iterable[str]) -> str:
    """The command as it was given: `words`, then those of `flags` that have a value, defaults too."""
    command = ["opslot", *words]
    for flag in flags:
        given = getattr(options, flag)
        for value in given if isinstance(given, list) else [given]:
            command += [f"--{flag}", str(value)] if value is not None else []
    return shlex.join(command)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
