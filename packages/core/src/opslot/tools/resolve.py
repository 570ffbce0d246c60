"""`opslot resolve`: what a configuration means on a machine, before there is a model."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from opslot import AUTO, EAGER, Choice, Device, Installed, OpsConfig, OpslotError, Registry, registry
from opslot._catalog import KERNELS, distribution_of
from opslot._config import Rule


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", help="a YAML, TOML or JSON file, 'auto' (the default) or 'eager'")
    command.add_argument("--target", metavar="KIND:ARCH", help="another machine's device, such as cuda:sm_90 or cpu")
    command.add_argument("--packages", metavar="FILE", help="its uv.lock, or a .txt of name==version")
    command.add_argument("--freeze", action="store_true", help="write the explicit configuration that chooses the same")


def run(options: argparse.Namespace) -> int:
    known = registry()
    device = known.target(options.target) if options.target else known.current_device()
    config = OpsConfig.effective(options.config)
    installed = Installed.read(options.packages) if options.packages else None
    rows = list(_rows(known, config, device, installed))
    failed = [row for row in rows if row["error"]]
    if options.freeze:
        for row in failed:
            print(f"opslot: {row['field']}: {row['error']}", file=sys.stderr)
        if not failed:
            _print_frozen(rows, config, as_json=options.json)
    elif options.json:
        print(
            json.dumps(
                {"device": str(device), "attn_implementation": config.attn_implementation, "ops": rows}, indent=2
            )
        )
    else:
        _print(rows, config, device)
    return int(bool(failed))


def _rows(known: Registry, config: OpsConfig, device: Device, installed: Installed | None) -> Iterator[dict[str, Any]]:
    """One row for every contract, and one for every choice of an op that has no contract here."""
    rules = config.rules(known)
    for contract in known.contracts():
        mine = [rule for rule in rules if rule.key == contract.key]
        everywhere = [rule for rule in mine if rule.glob is None]
        default = Rule(contract.key, config.default or AUTO, "default", config.origin)
        for rule in [everywhere[-1] if everywhere else default, *(rule for rule in mine if rule.glob is not None)]:
            yield _row(str(contract), rule, *_choice(known, rule, device, installed))
    for rule in rules:
        if rule.key is None:
            op = rule.field.removesuffix("_implementation")
            brings = "" if rule.kernel == EAGER else f"; {distribution_of(op, rule.kernel)} would bring {rule.kernel}"
            yield _row(op, rule, Choice(None, f"no contract for this op is installed{brings}"), None)


def _choice(
    known: Registry, rule: Rule, device: Device, installed: Installed | None
) -> tuple[Choice | None, str | None]:
    assert rule.key is not None
    try:
        choice = known.choose(*rule.key, rule.kernel, device, (), installed)
    except OpslotError as error:
        return None, str(error)
    absent = KERNELS.get(rule.key[0], {})
    names = {offer.spec.name for offer in known.offers(*rule.key)}
    others = ", ".join(f"{name} of {where}" for name, where in absent.items() if name not in names)
    hint = f"; not installed: {others}" if choice.offer is None and rule.kernel == AUTO and others else ""
    return Choice(choice.offer, choice.reason + hint), None


def _row(op: str, rule: Rule, choice: Choice | None, error: str | None) -> dict[str, Any]:
    offer = choice.offer if choice else None
    return {
        "op": op,
        "field": rule.field,
        "origin": rule.origin,
        "modules": rule.glob,
        "asked": rule.kernel,
        "kernel": offer.spec.name if offer else EAGER if choice else None,
        "selector": offer.selector if offer else EAGER if choice else None,
        "distribution": offer.distribution if offer else "",
        "version": offer.version if offer else "",
        "reason": choice.reason if choice else "",
        "error": error,
    }


def _print(rows: list[dict[str, Any]], config: OpsConfig, device: Device) -> None:
    print(f"device: {device}")
    for row in rows:
        where = f" in modules {row['modules']!r}" if row["modules"] is not None else ""
        print(f"{row['op']}{where}: {row['field']} is {row['asked']} in {row['origin']}")
        source = f" of {row['distribution']} {row['version']}".rstrip() if row["distribution"] else ""
        print(f"    error: {row['error']}" if row["error"] else f"    {row['kernel']}{source}  [{row['reason']}]")
    if config.attn_implementation is not None:
        print(f"attention: {config.attn_implementation}, passed on to transformers")


def _print_frozen(rows: list[dict[str, Any]], config: OpsConfig, *, as_json: bool) -> None:
    tree: dict[str, Any] = {"default": EAGER}
    if config.attn_implementation is not None:
        tree["attn_implementation"] = config.attn_implementation
    for row in rows:
        if row["modules"] is None:
            tree[row["op"]] = row["selector"]
        else:
            tree.setdefault("modules", {}).setdefault(row["modules"], {})[row["op"]] = row["selector"]
    if as_json:
        print(json.dumps(tree, indent=2))
    else:
        import yaml

        print(yaml.safe_dump(tree, sort_keys=False), end="")
