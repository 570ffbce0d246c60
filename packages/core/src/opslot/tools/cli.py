"""The command `opslot`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from opslot import AUTO, Device, OpContract, OpslotError, Registry
from opslot._target import plain_signature
from opslot.tools import backends, bench, diff, doctor, resolve, verify
from opslot.tools.output import print_json, print_table, quiet_registry

EXIT_CODES = (
    "exit codes: 0 done, or no difference (diff); 1 an error, a backend that failed to load (backends), a choice that "
    "cannot be (resolve), a difference (diff), a kernel that failed (bench), or a problem that was found (doctor, "
    "verify); 2 wrong usage, a file that cannot be compared (diff), or what cannot be judged at all, such as a name "
    "that nothing has (bench, verify)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except OpslotError as error:
        print(f"opslot: {error}", file=sys.stderr)
        return 2 if options.run in (verify.run, bench.run) else 1  # whose 1 is a verdict on kernels
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="opslot", description="Show ops, kernels and backends.", epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=version("opslot"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("list", _list, "every op, its kernels, and why one cannot run here"),
        ("backends", backends.run, "the installed backends, and what failed to load"),
        ("explain", _explain, "one op: its maths, its config fields, its kernels"),
        ("resolve", resolve.run, "what a configuration means on a machine, or the explicit form of it"),
        ("verify", verify.run, "whether kernels are what their contracts say, in values, gradients and manners"),
        ("diff", diff.run, "what differs between two bindings written by Binding.to_json()"),
        ("bench", bench.run, "the kernels of an op side by side: time, memory and error at real shapes"),
        ("doctor", doctor.run, "what is wrong with this environment, and what to do about it"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        if name == "explain":
            command.add_argument("op", metavar="OP[/VARIANT]", help="an op, one variant of it, or its config field")
        elif name == "backends":
            backends.add_check(command)
        elif name == "verify":
            verify.add_arguments(command)
        elif name == "resolve":
            resolve.add_arguments(command)
        elif name == "bench":
            bench.add_arguments(command)
        elif name == "diff":
            command.add_argument("a", metavar="A.json")
            command.add_argument("b", metavar="B.json")
    return parser


def _list(options: argparse.Namespace) -> int:
    known = quiet_registry()
    device = known.current_device()
    ops = [_op(known, contract, device) for contract in known.contracts()]
    _warn(known)
    if options.json:
        print_json({"device": str(device), "ops": ops})
        return 0
    print(f"device: {device}")
    rows = [
        (f"{op['op']}/{op['variant']}", kernel["name"], kernel["distribution"], _verdict(kernel))
        for op in ops
        for kernel in op["kernels"]
    ]
    print_table(("op", "kernel", "from", "usable here"), rows)
    return 0


def _warn(known: Registry) -> None:
    if known.failures():
        print(f"opslot{known.failures()}: see `opslot backends`".replace("opslot. ", "opslot: "), file=sys.stderr)


def _explain(options: argparse.Namespace) -> int:
    known = quiet_registry()
    device = known.current_device()
    op, _, variant = options.op.partition("/")
    if variant:
        contracts = [known.contract(op, variant)]
    else:
        contracts = [contract for contract in known.contracts() if op in _names(contract)]
        if not contracts:
            known.contract(op)  # raises, and lists what there is
    data = [
        {**_op(known, contract, device), "signature": plain_signature(contract.signature()), "doc": contract.doc()}
        for contract in contracts
    ]
    _warn(known)
    if options.json:
        print_json(data)
        return 0
    for contract, item in zip(contracts, data, strict=True):
        print(f"{contract}{plain_signature(contract.signature())}")
        print("\n" + "\n".join(f"  {line}".rstrip() for line in contract.doc().splitlines()))
        print(f"\n  config fields: {', '.join(item['fields'])}")
        print(f"  auto on {device}: {item['auto']['kernel']} ({item['auto']['reason']})\n")
        print_table(
            ("kernel", "from", "priority", "claims", "dtypes", "usable here", "summary"),
            [
                (k["name"], k["distribution"], k["priority"], _claims(k), _dtypes(k), _verdict(k), k["summary"])
                for k in item["kernels"]
            ],
        )
        print()
    return 0


def _names(contract: OpContract) -> set[str]:
    return {contract.op, *(alias.partition("/")[0] for alias in contract.aliases), *contract.config_fields()}


def _op(known: Registry, contract: OpContract, device: Device) -> dict[str, Any]:
    choice = known.choose(*contract.key, AUTO, device)
    eager = {
        "name": "eager",
        "distribution": "the model",
        "version": "",
        "priority": "",
        "unmet": [],
        "claims": {},
        "rms_error": {},
        "measured": "",
        "dtypes": [],
    }
    kernels = [{**eager, "aliases": [], "summary": "the model's own code"}]
    for offer in known.offers(*contract.key):
        spec = offer.spec
        claims = ("backward", "compile", "cuda_graphs", "deterministic", "batch_invariant")
        kernels.append(
            {
                "name": spec.name,
                "aliases": list(spec.aliases),
                "distribution": offer.distribution,
                "version": offer.version,
                "priority": spec.priority.name,
                "unmet": list(spec.unmet(device)),
                "dtypes": list(spec.dtypes),
                "claims": {claim: getattr(spec, claim) for claim in claims},
                "rms_error": dict(spec.rms_error),
                "measured": spec.measured,
                "summary": spec.summary,
            }
        )
    return {
        "op": contract.op,
        "variant": contract.variant,
        "summary": contract.summary,
        "fields": list(contract.config_fields()),
        "auto": {"kernel": choice.offer.spec.name if choice.offer else "eager", "reason": choice.reason},
        "kernels": kernels,
    }


def _claims(kernel: dict[str, Any]) -> str:
    limits = [f"error({dtype})<={times:g}x" for dtype, times in kernel["rms_error"].items()]
    return " ".join([*(claim for claim, made in kernel["claims"].items() if made), *limits])


def _dtypes(kernel: dict[str, Any]) -> str:
    return " ".join(kernel["dtypes"]) or ("any" if kernel["claims"] else "")


def _verdict(kernel: dict[str, Any]) -> str:
    return "yes" if not kernel["unmet"] else "no: " + "; ".join(kernel["unmet"])
