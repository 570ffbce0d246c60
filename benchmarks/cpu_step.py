"""One training step of opslot-train's demo model on the CPU: kernels that `auto` binds beside the all-eager model.

    OMP_WAIT_POLICY=passive uv run python benchmarks/cpu_step.py --json cpu_step.json

Both models take turns step by step, and in each turn another one goes first, so that whatever else the machine does
hits both. `ratio` is the median over the turns of bound / eager; the floor is 1, a bound model that is as fast.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from opslot_models import build_foundation_model
from opslot_models.train._job import demo_config


def trainer(ops: str, sequence: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build_foundation_model(demo_config(sequence), ops, dtype=torch.float32).train()
    return model, torch.optim.AdamW(model.parameters())


def seconds(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    bound, eager = (trainer(ops, options.sequence_length) for ops in (options.ops, "eager"))
    times: list[tuple[float, float]] = []
    for turn in range(options.turns + 3):
        tokens = torch.randint(0, 256, (options.batch_size, options.sequence_length))
        if turn % 2:
            times.append((seconds(*bound, tokens), seconds(*eager, tokens)))
        else:
            second = seconds(*eager, tokens)
            times.append((seconds(*bound, tokens), second))
    times = times[3:]  # the first steps allocate
    ratios = [mine / theirs for mine, theirs in times]
    figures = {
        "bound_ms": 1e3 * statistics.median(mine for mine, _ in times),
        "eager_ms": 1e3 * statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }
    print(figures)
    if options.json:
        data = {
            "command": f"python benchmarks/cpu_step.py {' '.join(sys.argv[1:])}",
            "date": date.today().isoformat(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "threads": torch.get_num_threads(),
            "shape": {"batch": options.batch_size, "sequence": options.sequence_length, "turns": options.turns},
            "binding": str(bound[0].opslot_binding).splitlines(),
            "figures": figures,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
