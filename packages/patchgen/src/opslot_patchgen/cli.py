"""The command `opslot-patchgen`."""

import argparse
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from opslot_patchgen._check import stale
from opslot_patchgen._errors import PatchgenError
from opslot_patchgen._fetch import fetch
from opslot_patchgen._plan import Plan, plan
from opslot_patchgen._report import as_json, as_markdown, as_text
from opslot_patchgen._sets import drift, moved, set_names, unfinished
from opslot_patchgen._source import read_version, set_name
from opslot_patchgen._specs import SpecPackage, load_specs

_SPECS = "opslot_models.patches"
_EXIT_CODES = """\
exit codes:
  0   done; check: the committed files are fresh; drift: nothing but comments, docstrings, annotations and layout
  1   check: a committed file is stale, missing, cannot be undone, or belongs to no spec
  2   check, drift: upstream's maths, decorators, parameters or imports changed, or a guard is refused there
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
        package = load_specs(options.specs)
        with tempfile.TemporaryDirectory() as scratch:
            root = _folder(options.source, Path(scratch))
            if options.command == "drift":
                return _drift(package, options, root)
            planned = plan(package, root)
            return _check(planned, package, root) if options.command == "check" else _generate(planned)
    except PatchgenError as error:
        return _refuse([error])


def _folder(source: str | None, scratch: Path) -> Path | None:
    """The folder that holds the package: as given, or with the wheel of a version in it; None for the installed one."""
    if source is None:
        return None
    return path if (path := Path(source)).is_dir() else fetch(source, scratch)


def _generate(planned: Plan) -> int:
    if planned.refusals:
        return _refuse(planned.refusals)
    planned.write()
    for path in planned.sources:
        print(f"wrote {path} and its patch")
    return 0


def _check(planned: Plan, package: SpecPackage, root: Path | None) -> int:
    version, names = read_version(root), set_names(package)
    if names and set_name(version) not in names:
        print(
            f"there is no set for transformers {version}, only {', '.join(names)}: see what differs with "
            f"`opslot-patchgen drift --to {version}`, or write one with `opslot-patchgen generate --source {version}`"
        )
        return max(1, _refuse(planned.refusals)) if planned.refusals else 1
    changes = moved(package, root)
    findings = [*stale(planned, changes.files), *unfinished(package)]
    if changes.drift.families:
        findings.append(f"the committed set is of another source\n{as_text(changes.drift)}")
    for finding in findings:
        print(finding)
    codes = [changes.drift.exit_code, 1 if findings else 0]
    if planned.refusals:
        codes.append(_refuse(planned.refusals))
    if not any(codes):
        count = len(planned.sources)
        print(f"{count} generated module{' is' if count == 1 else 's are'} fresh")
    return max(codes)


def _drift(package: SpecPackage, options: Namespace, root: Path | None) -> int:
    changes = drift(package, options.set, root)
    report = as_json if options.json else as_markdown if options.markdown else as_text
    sys.stdout.write(report(changes))
    return changes.exit_code


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
        ("generate", "write every generated module, its patch and the lock, or nothing"),
        ("check", "compare the committed files with what generate would write, and undo them"),
        ("drift", "say what another transformers changed since a committed set was generated"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("specs", metavar="SPECS", nargs="?", default=_SPECS, help=f"package of specs ({_SPECS})")
        where = "a version, whose wheel is fetched, or a folder that holds a transformers package"
        if name != "drift":
            command.add_argument("--source", metavar="VERSION_OR_PATH", help=f"{where} (the installed one)")
            continue
        command.add_argument("--to", dest="source", metavar="VERSION_OR_PATH", required=True, help=where)
        command.add_argument("--from", dest="set", metavar="vX_Y", help="the committed set (by default the newest)")
        form = command.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="JSON with stable keys")
        form.add_argument("--markdown", action="store_true", help="a table for a pull request")
    return parser
