"""What `opslot.bind` costs: milliseconds for a 48-layer Qwen3-MoE with 128 experts that lies on the meta device.

Building the model and finding the backends are not counted. Cold is the first bind of a process, which imports the
kernels; warm are the binds after it. Each configuration is measured in processes of its own, one after the other. As
in timeit, Python's collector is off: with torch and transformers loaded one full collection takes longer than a bind,
and after a model was built it may fall anywhere.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

TARGET_MS = 150
CONFIGURATIONS = {
    "auto": "auto",
    "every op by name": {
        **dict.fromkeys(("rms_norm", "rotary_pos_emb", "glu", "moe_experts", "load_balancing_loss"), "torch"),
        "cross_entropy_loss": "chunk_loss",
    },
}


def measure(ops: object, repeats: int) -> dict[str, float | int | list[float]]:
    """One process: a cold bind, then warm ones, each unbound and printed."""
    import opslot
    import torch
    from opslot_models import build_foundation_model
    from transformers import Qwen3MoeConfig

    opslot.registry()  # finds the backends
    # The shape of Qwen3-30B-A3B.
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        model = build_foundation_model(config, "eager", device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.opslot_binding.unbind()

    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {"bind": [], "unbind": [], "print": []}
    for _ in range(repeats + 1):
        binding = _timed(times["bind"], lambda: opslot.bind(model, ops, device="cpu"))
        _timed(times["print"], lambda binding=binding: str(binding))
        _timed(times["unbind"], lambda binding=binding: binding.unbind())
    gc.enable()
    return {
        "slots": len(binding.rows),
        "bound": sum(row.kernel != "eager" for row in binding.rows),
        "cold_ms": times["bind"][0],
        "warm_ms": times["bind"][1:],
        "unbind_ms": times["unbind"],
        "print_ms": times["print"],
    }


def _timed(times: list[float], call: Callable[[], object]) -> object:
    start = time.perf_counter()
    result = call()
    times.append((time.perf_counter() - start) * 1e3)
    return result


def _summary(runs: list[dict[str, object]]) -> dict[str, object]:
    figures: dict[str, object] = {"slots": runs[0]["slots"], "bound": runs[0]["bound"]}
    for name in ("cold_ms", "warm_ms", "unbind_ms", "print_ms"):
        values = [v for run in runs for v in (run[name] if isinstance(run[name], list) else [run[name]])]
        figures[name] = {"minimum": min(values), "median": statistics.median(values), "repeats": len(values)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--processes", type=int, default=3, help="per configuration; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=9, help="warm binds per process; default: %(default)s")
    parser.add_argument("--one", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(CONFIGURATIONS[options.one], options.repeats)))
        return

    figures = {}
    for name in CONFIGURATIONS:
        command = [sys.executable, __file__, "--one", name, "--repeats", str(options.repeats)]
        runs = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
            for _ in range(options.processes)
        ]
        figures[name] = _summary(runs)
        print(f"{name}: {figures[name]['bound']} of {figures[name]['slots']} slots bound")
        for what in ("cold_ms", "warm_ms", "unbind_ms", "print_ms"):
            summary = figures[name][what]
            print(f"  {what:10} minimum {summary['minimum']:7.1f}  median {summary['median']:7.1f}")
    if options.json:
        versions = {name: version(name) for name in ("opslot", "opslot-backend-torch", "torch", "transformers")}
        machine = {"python": platform.python_version(), "processor": platform.processor(), "system": platform.system()}
        data = {
            "command": f"python benchmarks/bind.py {' '.join(sys.argv[1:])}",
            "date": date.today().isoformat(),
            "machine": machine,
            "versions": versions,
            "target_ms": TARGET_MS,
            "figures": figures,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
