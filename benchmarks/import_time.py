"""What importing a generated module adds to what importing upstream's takes.

    python benchmarks/import_time.py --json import_time.json

In each of some fresh interpreters upstream's module is imported and then the generated one. What the second takes is
all that it needs and upstream's has not loaded, its own classes included, so it is more than what a process pays that
imports only the generated one. Times are those of the processor: an import takes seconds, and the machine has others.
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

PROGRAM = """
import json, time
marks = [time.process_time()]
import {upstream}
marks.append(time.process_time())
import {generated}
marks.append(time.process_time())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""


def measure(family: str, repeats: int) -> dict[str, object]:
    from opslot_models._families import generated_module, upstream_module

    code = PROGRAM.format(upstream=upstream_module(family), generated=generated_module(family).__name__)
    runs = []
    for _ in range(repeats + 1):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    upstream, added = zip(*runs[1:], strict=True)  # the first one warms the file cache
    percent = 100 * statistics.median(added) / statistics.median(upstream)
    return {"percent_more": percent, "upstream_seconds": upstream, "added_seconds": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama", "gemma3", "qwen3_moe"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results = {family: measure(family, options.repeats) for family in options.families}
    packages = ("torch", "transformers", "opslot", "opslot-models")
    data = {
        "command": "python benchmarks/import_time.py --json FILE",
        "date": date.today().isoformat(),
        "device": platform.machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "results": results,
    }
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for family, result in results.items():
        print(f"{family:12} {result['percent_more']:+.1f} %")


if __name__ == "__main__":
    main()
