"""Write docs/models.md: which family has which op, where its guard stands, and which backends have a kernel for it.

Read from the specs, the generated files and what is installed. --check: exit 1 if the page shows something else.
"""

import argparse
import re
import sys
from pathlib import Path

from opslot import registry
from opslot_patchgen import CallGuard, Guard, ModelSpec, RegionGuard, load_specs, set_names

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
GENERATED = ROOT / "packages/models/src/opslot_models/generated"
MARKER = re.compile(r"  # opslot: (\S+)$")

HEAD = """\
# Models

Which op of which family can run a kernel, where its guard stands, and which backends have one.
`scripts/coverage_page.py` writes this page from the specs, the generated files and the backends of this repository.

An empty cell: the family does not compute the op, or computes it in a way that no contract has, which its list names
with the reason. Without a guard, transformers' own code runs: attention is chosen by `attn_implementation`, routers
have no op, and the losses of heads other than those for language modelling stay in transformers' generic heads.
"eager alone": no backend of this repository has a kernel yet. How to add a family: [Add a model](adding-a-model.md).
"""


def release(name: str) -> str:
    return name[1:].replace("_", ".")


def page() -> str:
    package = load_specs("opslot_models.patches")
    sets, specs = set_names(package), package.specs
    released = ", ".join(map(release, sets))
    lines = [HEAD, f"Generated for transformers {released}.", "", *overview(specs)]
    for spec in specs:
        lines += ["", f"## {spec.family}", "", *family(spec, sets)]
    return "\n".join(lines) + "\n"


def overview(specs: tuple[ModelSpec, ...]) -> list[str]:
    """One row an op and variant, one column a family."""
    slots = sorted({guard.slot.marker for spec in specs for guard in spec.guards})
    lines = [f"| op / variant | {' | '.join(spec.family for spec in specs)} |", f"|---|{'---|' * len(specs)}"]
    for slot in slots:
        has = (slot in {guard.slot.marker for guard in spec.guards} for spec in specs)
        lines.append(f"| `{slot}` | {' | '.join('yes' if each else '' for each in has)} |")
    return lines


def family(spec: ModelSpec, sets: list[str]) -> list[str]:
    lines = [
        f"| op / variant | guard | line in {' | line in '.join(map(release, sets))} | kernels |",
        f"|---|---|{'---|' * len(sets)}---|",
    ]
    notes = [f"- `{target}` has no guard for what it {reason}" for target, reason in spec.unguarded]
    notes += [f"- `{name}` only chooses indices: no gradient comes back into it" for name in spec.untrained]
    whens = {(guard.slot.marker, guard.when) for guard in spec.guards if isinstance(guard, CallGuard | RegionGuard)}
    notes += [f"- a kernel of `{slot}` runs where `{when}`" for slot, when in sorted(whens, key=str) if when]
    places = [guard_lines(spec, name) for name in sets]
    for guard in sorted(spec.guards, key=lambda guard: (guard.slot.marker, guard.site)):
        links = [link(spec, name, guard, lines_of.get(guard.site)) for name, lines_of in zip(sets, places, strict=True)]
        cells = [f"`{guard.slot.marker}`", f"`{site(guard)}`", *links, kernels(guard)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *(["", *notes] if notes else [])]


def guard_lines(spec: ModelSpec, name: str) -> dict[str, int]:
    """The line of each guard's marker in a generated file. Those of one op in one class are specified in its order."""
    text = (GENERATED / name / f"modeling_{spec.family}.py").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[int]] = {}
    owner, pending = "", []
    for number, line in enumerate(text.splitlines(), start=1):
        if opened := re.match(r"class (\w+)", line):
            owner = opened[1]
            found.update({(owner, slot): [above] for slot, above in pending})
            pending = []
        if marked := MARKER.search(line):
            if line.startswith("@"):  # a decorator stands above the class that it guards
                pending.append((marked[1], number))
            else:
                found.setdefault((owner, marked[1]), []).append(number)
    guards = spec.at(release(name)).guards
    return {guard.site: found[guard.target.partition(".")[0], guard.slot.marker].pop(0) for guard in guards}


def site(guard: Guard) -> str:
    return guard.site if "." in guard.target else f"{guard.target}.forward, from outside its decorators"


def link(spec: ModelSpec, name: str, guard: Guard, line: int | None) -> str:
    if line is None:
        assert guard.since is not None
        return f"none: {guard.since[1]}"
    path = (GENERATED / name / f"modeling_{spec.family}.py").relative_to(ROOT)
    return f"[{line}](../{path.as_posix()}#L{line})"


def kernels(guard: Guard) -> str:
    offers = registry().offers(guard.slot.op, guard.slot.variant)
    return ", ".join(f"`{offer.spec.name}` ({offer.distribution})" for offer in offers) or "eager alone"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    fresh = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    if options.check:
        print("docs/models.md is stale: run python scripts/coverage_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
