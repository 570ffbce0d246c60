"""The README's table of ops and backends, from what is installed. --check: exit 1 if the README shows another."""

import argparse
import sys
from pathlib import Path

from opslot import EAGER, registry

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- ops_table: scripts/ops_table.py writes this -->", "<!-- end of ops_table -->"


def table() -> str:
    known = registry()
    backends = sorted({o.distribution for contract in known.contracts() for o in known.offers(*contract.key)})
    lines = [
        f"| op / variant | what it computes | config field | {' | '.join(backends)} |",
        f"|---|---|---|{'---|' * len(backends)}",
    ]
    for contract in known.contracts():
        cells = []
        for backend in backends:
            names = [o.spec.name for o in known.offers(*contract.key) if o.distribution == backend]
            cells.append(", ".join(f"`{name}`" for name in names) or EAGER)
        field = next((f for f in contract.fields), f"{contract.op}_implementation")
        lines.append(f"| `{contract}` | {contract.summary} | `{field}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    fresh = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if fresh == text:
        return 0
    if options.check:
        print("the README's table is stale: run python scripts/ops_table.py", file=sys.stderr)
        return 1
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
