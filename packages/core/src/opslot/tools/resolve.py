"""`opslot resolve`: what a configuration means on a machine, before there is a model."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from opslot import AUTO, EAGER, Choice, Device, Installed, OpsConfig, OpslotError, Registry, UnknownKernel
from opslot._catalog import KERNELS, distribution_of
from opslot._config import Rule
from opslot.tools.output import print_json, quiet_registry

# How the reason begins where a kernel that is named for a whole op lacks one of its variants.
_LACKING = "a model that has this variant is refused"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", help="a YAML, TOML or JSON file, 'auto' (the default) or 'eager'")
    command.add_argument("--target", metavar="KIND:ARCH", help="another machine's device, such as cuda:sm_90 or cpu")
    command.add_argument("--packages", metavar="FILE", help="its uv.lock, or a .txt of name==version")
    command.add_argument("--freeze", action="store_true", help="write the explicit configuration that chooses the same")


def run(options: argparse.Namespace) -> int:
    known = quiet_registry()
    device = known.target(options.target) if options.target is not None else known.current_device()
    config = OpsConfig.parse(options.config)
    if options.config in (None, AUTO, EAGER):
        config = replace(config, origin="the command line")
    config = OpsConfig.effective(config)
    installed = Installed.read(options.packages) if options.packages is not None else None
    rows = list(_rows(known, config, device, installed))
    failed = [row for row in rows if row["error"]]
    attention = config.setting("attn_implementation")[0]
    if options.freeze:
        for row in failed:
            print(f"opslot: {row['field']}: {row['error']}", file=sys.stderr)
        if config.setting("strict")[0]:
            print("opslot: strict is left out, since every op is named, also what a model lacks", file=sys.stderr)
        if not failed:
            _print_frozen(rows, attention, as_json=options.json)
    elif options.json:
        print_json({"device": str(device), "attn_implementation": attention, "ops": rows})
    else:
        _print(rows, attention, device)
    return int(bool(failed))


def _rows(known: Registry, config: OpsConfig, device: Device, installed: Installed | None) -> Iterator[dict[str, Any]]:
    """A row for every contract, then the choices for some modules, each before those that win over it."""
    rules = _in_force(config.rules(known))
    value, origin = config.setting("default")
    for contract in known.contracts():
        everywhere = [rule for rule in rules if rule.key == contract.key and rule.glob is None]
        default = Rule(contract.key, value or AUTO, "default", origin if value else "opslot")
        rule = everywhere[-1] if everywhere else default
        yield _row(str(contract), rule, *_choice(known, rule, device, installed))
    for rule in rules:
        if rule.key is None:
            op = rule.field.removesuffix("_implementation")
            brings = "" if rule.kernel == EAGER else f"; {distribution_of(op, rule.kernel)} would bring {rule.kernel}"
            yield _row(op, rule, Choice(None, f"no contract for this op is installed{brings}"), None)
        elif rule.glob is not None:
            yield _row("/".join(rule.key), rule, *_choice(known, rule, device, installed))


def _in_force(rules: Iterable[Rule]) -> list[Rule]:
    """The rules without those that a later one for all modules makes void."""
    kept: list[Rule] = []
    for rule in rules:
        if rule.glob is None and rule.key is not None:
            kept = [other for other in kept if other.key != rule.key]
        kept.append(rule)
    return kept


def _choice(
    known: Registry, rule: Rule, device: Device, installed: Installed | None
) -> tuple[Choice | None, str | None]:
    assert rule.key is not None
    try:
        choice = known.choose(*rule.key, rule.kernel, device, (), installed)
    except OpslotError as error:
        # A name for a whole op says nothing wrong about a variant that the model may not have.
        lacks = isinstance(error, UnknownKernel) and "." not in rule.field and "/" not in rule.field
        if lacks and known.variants_with(rule.key[0], rule.kernel):
            return Choice(None, f"{_LACKING}: {error}"), None
        return None, str(error)
    absent = KERNELS.get(rule.key[0], {})
    names = {offer.spec.name for offer in known.offers(*rule.key)}
    offers = (offer for contract in known.contracts() for offer in known.offers(*contract.key))
    there = {offer.distribution for offer in offers}
    # What is denied here says nothing of another machine.
    here = known.records if installed is None else ()
    denied = {record.distribution: record.denied for record in here if record.denied}
    others: dict[str, list[str]] = {}
    for name, where in absent.items():
        if name not in names and (installed.lacks(where) if installed is not None else where not in there):
            others.setdefault(denied.get(where, "not installed"), []).append(f"{name} of {where}")
    wanted = choice.offer is None and rule.kernel == AUTO
    hint = "".join(f"; {why}: {', '.join(them)}" for why, them in others.items()) if wanted else ""
    return Choice(choice.offer, choice.reason + hint), None


def _row(op: str, rule: Rule, choice: Choice | None, error: str | None) -> dict[str, Any]:
    offer = choice.offer if choice else None
    lacking = choice is not None and choice.reason.startswith(_LACKING)
    return {
        "op": op,
        "field": rule.field,
        "origin": rule.origin,
        "modules": rule.glob,
        "asked": rule.kernel,
        "kernel": offer.spec.name if offer else EAGER if choice and rule.key and not lacking else None,
        "selector": offer.selector if offer else EAGER if choice and rule.key else rule.kernel,
        "distribution": offer.distribution if offer else "",
        "version": offer.version if offer else "",
        "reason": choice.reason if choice else "",
        "error": error,
    }


def _print(rows: list[dict[str, Any]], attention: str | None, device: Device) -> None:
    print(f"device: {device}")
    for row in rows:
        where = f" in modules {row['modules']!r}" if row["modules"] is not None else ""
        print(f"{row['op']}{where}: {row['field']} is {row['asked']} in {row['origin']}")
        source = f" of {row['distribution']} {row['version']}".rstrip() if row["distribution"] else ""
        meant = f"{row['kernel'] or 'no effect'}{source}  [{row['reason']}]"
        print(f"    error: {row['error']}" if row["error"] else f"    {meant}")
    if attention is not None:
        print(f"attention: {attention}, passed on to transformers, which judges it when the model is built")


def _print_frozen(rows: list[dict[str, Any]], attention: str | None, *, as_json: bool) -> None:
    tree: dict[str, Any] = {"default": EAGER}
    if attention is not None:
        tree["attn_implementation"] = attention
    modules: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["modules"] is None:
            tree[row["op"]] = row["selector"]
        else:
            _say_last(modules, row["modules"], row["op"], row["selector"])
    if modules:
        tree["modules"] = modules
    if as_json:
        print_json(tree)
    else:
        import yaml

        print(yaml.safe_dump(tree, sort_keys=False), end="")


def _say_last(modules: dict[str, dict[str, str]], glob: str, op: str, selector: str) -> None:
    """Add a choice after all others of its op, since the last glob that matches wins."""
    names = list(modules)
    later = names[names.index(glob) + 1 :] if glob in modules else []
    if any(op in modules[name] for name in later):
        mine = modules.pop(glob)
        if any(other in modules[name] for other in mine if other != op for name in later):
            raise OpslotError(f"modules {glob!r} is said twice, between others: one file cannot say that explicitly")
        modules[glob] = mine
    modules.setdefault(glob, {})[op] = selector
