"""What discovery costs: milliseconds of the first `registry()` among 300 distributions, microseconds of a later one.

Each repeat is a fresh interpreter after `import opslot`, with a folder of 300 distributions on its path besides what is
installed; 10 of them offer a backend with 6 kernels, a third has other entry points. The files were read once before,
as they were where a machine starts many processes. `--profile` prints where one repeat spends its time.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import distributions, version
from pathlib import Path

DISTRIBUTIONS, BACKENDS, REPEATS = 300, 10, 9
TARGETS = {"first_ms": 60, "later_us": 20}

BACKEND = """
from opslot import Backend, KernelSpec, Priority, Requires
OPS = {{
    "rms_norm": "standard", "glu": "swiglu", "moe_experts": "standard", "rotary_pos_emb": "full",
    "cross_entropy_loss": "causal", "load_balancing_loss": "standard",
}}
NEEDS = Requires(devices=("cuda",), archs=("sm_80..",), packages=("{name}-vendor>=1,<2",))
BACKEND = Backend(api=1, kernels=tuple(
    KernelSpec(op=op, variant=variant, name="{name}", target="{name}.kernels:kernel", requires=NEEDS,
               priority=Priority.TUNED)
    for op, variant in OPS.items()
))
"""

MEASURE = """
import json, opslot, timeit
from time import perf_counter, process_time
{before}start, cpu = perf_counter(), process_time()
known = opslot.registry()
first, cpu = 1e3 * (perf_counter() - start), 1e3 * (process_time() - cpu)
later = min(timeit.repeat(opslot.registry, number=10_000, repeat=5)) / 10_000 * 1e6
assert sum(len(r.backend.kernels) for r in known.records if r.name.startswith("bench")) == {kernels}, known.records
print(json.dumps({{"first_ms": first, "first_cpu_ms": cpu, "later_us": later,
                  "opslot_ms": sum(r.milliseconds for r in known.records if r.name == "opslot"),
                  "backends_ms": sum(r.milliseconds for r in known.records if r.name != "opslot")}}))
"""

PROFILE = """
import cProfile, opslot, pstats
profile = cProfile.Profile()
profile.runcall(opslot.registry)
pstats.Stats(profile).sort_stats("cumulative").print_stats(25)
"""


def generate(folder: Path) -> None:
    for number in range(DISTRIBUTIONS):
        name = f"bench{number}"
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "A description.\n" * 200
        )
        (info / "RECORD").write_text(f"{name}.py,,\n")
        if number < BACKENDS:
            (folder / f"{name}.py").write_text(BACKEND.format(name=name))
            (info / "entry_points.txt").write_text(f"[opslot.backends]\n{name} = {name}:BACKEND\n")
        elif number % 3 == 0:
            (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


def run(folder: Path, code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPSLOT_", "PYTHON"))}
    # What is installed is compiled, whatever this shell forbids Python to write.
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--profile", action="store_true", help="print a profile of one first call, and measure nothing")
    parser.add_argument("--torch", action="store_true", help="also measure after `import torch`, as in a training job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder)
        measure = MEASURE.format(kernels=6 * BACKENDS, before="")
        run(folder, measure)  # compiles the modules
        if options.profile:
            print(run(folder, PROFILE))
            return
        runs = [json.loads(run(folder, measure)) for _ in range(REPEATS)]
        if options.torch:
            after = MEASURE.format(kernels=6 * BACKENDS, before="import torch\n")
            for measured in runs:
                measured["first_after_torch_ms"] = json.loads(run(folder, after))["first_ms"]
    for figure in runs[0]:
        print(f"{figure:20} {'  '.join(f'{measured[figure]:8.3f}' for measured in runs)}")
    if options.json:
        data = {
            "command": "python benchmarks/discovery.py" + " --torch" * options.torch + " --json FILE",
            "date": date.today().isoformat(),
            "machine": {
                "python": platform.python_version(),
                "opslot": version("opslot"),
                "processors": os.cpu_count(),
                "load": os.getloadavg()[0],
            },
            "distributions": {
                "generated": DISTRIBUTIONS,
                "with backends": BACKENDS,
                "installed": len([*distributions()]),
            },
            "targets": TARGETS,
            "note": "Every repeat, in order.",
            "runs": runs,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
