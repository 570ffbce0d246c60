"""`opslot diff`: what differs between two bindings that were written with `Binding.to_json`."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from opslot import OpslotError, Row
from opslot._binding import SCHEMA
from opslot._report import collapse, kernel_text
from opslot.tools.output import print_json


class _Unreadable(OpslotError):
    """A file that is not a binding."""


def run(options: argparse.Namespace) -> int:
    """0: same choice and same environment. 1: something differs. 2: a file cannot be compared."""
    try:
        before, after = _read(options.a), _read(options.b)
    except _Unreadable as error:
        print(f"opslot: {error}", file=sys.stderr)
        return 2
    found = compare(before, after)
    if options.json:
        print_json(found)
    else:
        print(_text(found, options.a, options.b))
    return 0 if found["same"] else 1


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The differences as data. Why a slot has its kernel is shown beside a difference and is not one itself."""
    old, new = _slots(before), _slots(after)
    groups: dict[tuple[Row | None, Row | None], list[str]] = {}
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if a is None or b is None or a.choice != b.choice:
            groups.setdefault((_without_module(a), _without_module(b)), []).append(key[0])
    slots = [
        {"modules": collapse(modules), "slots": len(modules), "a": _side(a), "b": _side(b)}
        for (a, b), modules in groups.items()
    ]
    environments = before["environment"], after["environment"]
    names = dict.fromkeys(name for environment in environments for name in environment)
    environment = [
        {"name": name, "a": environments[0].get(name), "b": environments[1].get(name)}
        for name in names
        if environments[0].get(name) != environments[1].get(name)
    ]
    return {"same": not slots and not environment, "slots": slots, "environment": environment}


def _read(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _Unreadable(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise _Unreadable(f"{path}: not a binding; write one with Binding.to_json()")
    if data["schema"] != SCHEMA:
        raise _Unreadable(f"{path}: a binding of schema {data['schema']!r}; this opslot reads schema {SCHEMA}")
    rows, environment = data.get("slots"), data.get("environment")
    names = {field.name for field in fields(Row)}
    if not isinstance(rows, list) or not isinstance(environment, dict) or not all(_strings(row, names) for row in rows):
        raise _Unreadable(f"{path}: not a whole binding; its slots or its environment are not as to_json() writes them")
    return data


def _strings(row: Any, names: Iterable[str]) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)


def _slots(binding: dict[str, Any]) -> dict[tuple[str, str], Row]:
    rows = [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in binding["slots"]]
    return {(row.module, row.slot): row for row in rows}


def _without_module(row: Row | None) -> Row | None:
    return None if row is None else replace(row, module="", slot="")


def _side(row: Row | None) -> dict[str, str] | None:
    wanted = ("op", "variant", "kernel", "distribution", "version", "source", "nested", "reason")
    return None if row is None else {name: getattr(row, name) for name in wanted}


def _text(found: dict[str, Any], a: str, b: str) -> str:
    if found["same"]:
        return "same choice, same environment"
    lines = [f"a: {a}", f"b: {b}"]
    for change in found["slots"]:
        lines.append(f"{', '.join(change['modules'])}, {change['slots']} x")
        rows = {side: Row("", "", **change[side]) for side in "ab" if change[side]}
        alike = len({(row.op, row.variant, kernel_text(row)) for row in rows.values()}) == 1 < len(rows)
        for side in "ab":
            text = "no such slot"
            if row := rows.get(side):
                source = f" of source {row.source}" if alike else ""
                text = f"{row.op}/{row.variant}: {kernel_text(row)}{source}  [{row.reason}]"
            lines.append(f"  {side}: {text}")
    for change in found["environment"]:
        lines.append(f"environment, {change['name']}")
        lines += [f"  {side}: {change[side] or 'not there'}" for side in "ab"]
    return "\n".join(lines)
