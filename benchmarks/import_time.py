"""How long importing a generated module takes, beside upstream's module.

    python benchmarks/import_time.py --json import_time.json

Each import is in a fresh interpreter, the two in turn; the first of each warms the file cache and does not count.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

PROGRAM = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(family: str, repeats: int) -> dict[str, object]:
    from opslot_models._families import generated_module, upstream_module

    modules = {"upstream": upstream_module(family), "generated": generated_module(family).__name__}
    runs: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(repeats + 1):
        for name, module in modules.items():
            runs[name].append(seconds(module))
    medians = {name: statistics.median(times[1:]) for name, times in runs.items()}
    more = 100 * (medians["generated"] / medians["upstream"] - 1)
    return {"percent_more": more, "median_seconds": medians, "seconds": {name: t[1:] for name, t in runs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama", "gemma3", "qwen3_moe"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results = {family: measure(family, options.repeats) for family in options.families}
    data = {
        "command": "python benchmarks/import_time.py --json FILE",
        "date": date.today().isoformat(),
        "device": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            **{n: version(n) for n in ("torch", "transformers", "opslot")},
        },
        "results": results,
    }
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for family, result in results.items():
        print(f"{family:12} {result['percent_more']:+.1f} %")


if __name__ == "__main__":
    main()
