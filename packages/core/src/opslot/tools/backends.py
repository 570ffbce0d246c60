"""The commands `opslot backends`, which lists the installed backends, and `opslot backends check` for their authors."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from opslot import BackendRecord
from opslot._report import counted
from opslot.tools.output import print_json, print_table, quiet_registry

if TYPE_CHECKING:
    from argparse import _SubParsersAction

CHECK = "whether a backend keeps the rules of its interface; needs no accelerator"
CHECK_EXIT_CODES = "exit codes: 0 nothing wrong was found; 1 there are problems; 2 no such backend, or wrong usage"


def add_check(command: argparse.ArgumentParser) -> None:
    subcommands: _SubParsersAction[argparse.ArgumentParser] = command.add_subparsers(metavar="check DIST")
    check = subcommands.add_parser("check", help=CHECK, description=CHECK, epilog=CHECK_EXIT_CODES)
    check.add_argument("distribution", metavar="DIST", help="the distribution, or the name of its entry point")
    # Suppressed, since a default here would undo a --json that stands before `check`.
    check.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    check.set_defaults(run=_check)


def run(options: argparse.Namespace) -> int:
    records = quiet_registry().records
    failed = any(record.error for record in records)
    if options.json:
        print_json([_as_dict(record) for record in records])
        return int(failed)
    print_table(
        ("backend", "distribution", "version", "offers"),
        [(record.name, record.distribution, record.version, _offers(record)) for record in records],
    )
    for record in records:
        if record.imported:
            print(f"\n{record.distribution}: {drags(record)}")
        if record.remark:
            print(f"\n{record.remark}")
        if record.error:
            print(f"\n{record.distribution} failed to load:\n{record.traceback}", file=sys.stderr)
    return int(failed)


def drags(record: BackendRecord) -> str:
    """What the entry point brought into the process. torch first, since it is what costs most."""
    first, *others = sorted(record.imported, key=lambda name: (name != "torch", name))
    also = f" and {len(others)} more" if len(others) > 4 else "".join(f", {name}" for name in others)
    return f"its import brought {first}{also} in and took {record.milliseconds:.0f} ms"


def _check(options: argparse.Namespace) -> int:
    from opslot.tools.check_backend import check, find

    records, error = find(options.distribution)
    if error:
        print(f"opslot: {error}", file=sys.stderr)
        return 2
    findings = check(records)
    problems = sum(finding.verdict == "problem" for finding in findings)
    first = records[0]
    if options.json:
        print_json(
            {
                "distribution": first.distribution,
                "version": first.version,
                "problems": problems,
                "findings": [vars(finding) for finding in findings],
            }
        )
    else:
        print(f"{first.distribution} {first.version}")
        width = max(len(finding.verdict) for finding in findings)
        for finding in findings:
            print(f"  {finding.verdict:{width}}  {finding.subject}: {finding.detail}".replace("\n", "\n" + " " * 8))
        print(counted(problems, "problem"))
    return int(problems > 0)


def _as_dict(record: BackendRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "kernels": [str(spec) for spec in record.backend.kernels] if record.backend else [],
        "contracts": [str(contract) for contract in record.backend.contracts] if record.backend else [],
        "error": record.message or None,
        "traceback": record.traceback or None,
        "denied": record.denied or None,
        "imported": list(record.imported),
        "milliseconds": record.milliseconds,
        "remark": record.remark or None,
    }


def _offers(record: BackendRecord) -> str:
    if record.denied:
        return record.denied
    if record.backend is None:
        return f"failed to load: {record.message}"
    return f"{counted(len(record.backend.kernels), 'kernel')}, {counted(len(record.backend.contracts), 'contract')}"
