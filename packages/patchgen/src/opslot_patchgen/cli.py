"""The command `opslot-patchgen`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from opslot_patchgen._check import stale
from opslot_patchgen._errors import PatchgenError
from opslot_patchgen._plan import Plan, plan
from opslot_patchgen._specs import load_specs

_SPECS = "opslot_models.patches"
_EXIT_CODES = """\
exit codes:
  0   done; for check: the committed files are fresh
  1   check: a committed file is stale, missing, cannot be undone, or belongs to no spec
  2   reserved: the maths of a target changed upstream
  3   a target is gone from upstream; nothing was written
  4   a spec or the source is refused; nothing was written
  64  wrong usage
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse's own code, 2, is taken.
        self.print_usage(sys.stderr)
        self.exit(64, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        planned = plan(load_specs(options.specs), options.source)
    except PatchgenError as error:
        return _refuse([error])
    if options.command == "check":
        return _check(planned)
    return _generate(planned)


def _generate(planned: Plan) -> int:
    if planned.refusals:
        return _refuse(planned.refusals)
    planned.write()
    for path in planned.sources:
        print(f"wrote {path} and its patch")
    return 0


def _check(planned: Plan) -> int:
    findings = stale(planned)
    for finding in findings:
        print(finding)
    if planned.refusals:
        return _refuse(planned.refusals)
    if findings:
        return 1
    count = len(planned.sources)
    print(f"{count} generated module{' is' if count == 1 else 's are'} fresh")
    return 0


def _refuse(refusals: Sequence[PatchgenError]) -> int:
    for refusal in refusals:
        print(f"{type(refusal).__name__}: {refusal}", file=sys.stderr)
    return max(refusal.exit_code for refusal in refusals)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="opslot-patchgen",
        description="Splice opslot guards into transformers modeling source.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("generate", "write every generated module and its patch, or nothing"),
        ("check", "compare the committed files with what generate would write, and undo them"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("specs", metavar="SPECS", nargs="?", default=_SPECS, help=f"package of specs ({_SPECS})")
        command.add_argument("--source", metavar="PATH", type=Path, help="folder with another transformers package")
    return parser
