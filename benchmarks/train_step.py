"""One training step of a Qwen3-MoE with real widths, stock and with kernels bound, interleaved in one process.

Each candidate is the same model from the same seed: stock transformers with its `grouped_mm` experts, the generated
model all-eager, and the generated model with what each `--ops` binds: auto, or op=kernel,op=kernel. Reported:
milliseconds of a whole step (forward, backward, AdamW), peak memory, and the loss curve. The floor is the time of the
step's matrix products at the rate that a large bf16 product reaches in the same process.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
import transformers
from opslot_models import build_foundation_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PACKAGES = ("triton", "opslot", "opslot-backend-torch", "opslot-backend-liger", "opslot-backend-triton-moe")


def model_config(layers: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        output_router_logits=True,
        max_position_embeddings=8192,
    )


def product_tflops(config: Qwen3MoeConfig, tokens: int, sequence: int) -> float:
    """Operations of the matrix products of one forward and backward, in units of 1e12 (6 per weight and token)."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok
    weights = c.num_hidden_layers * (attention + experts + c.hidden_size * c.num_experts) + c.vocab_size * c.hidden_size
    scores = c.num_hidden_layers * 6 * sequence * c.num_attention_heads * c.head_dim  # causal: half of 12
    return tokens * (6 * weights + scores) / 1e12


def dense_rate(device: str) -> float:
    """TFLOP/s of an 8192^3 bf16 product of random normal matrices, median of ten."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [_timed(lambda: a @ b, device) for _ in range(13)][3:]
    return 2 * 8192**3 / statistics.median(times) / 1e12


def _timed(run: Callable[[], Any], device: str) -> float:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def measure(name: str, build: Callable[[], Any], tokens: torch.Tensor, steps: int) -> dict[str, Any]:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.manual_seed(0)
    with torch.device(tokens.device):
        model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, times = [], []

    def step() -> None:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for index in range(steps):
        if index == 3:
            torch.cuda.reset_peak_memory_stats()
        times.append(_timed(step, str(tokens.device)))
    times = times[3:]  # the first steps allocate, and choose algorithms
    return {
        "name": name,
        "step_ms": statistics.median(times) * 1e3,
        "step_ms_spread": [min(times) * 1e3, max(times) * 1e3],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": [loss.item() for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--ops", nargs="+", default=["auto"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    config = model_config(options.layers)
    config.dtype = torch.bfloat16
    tokens = torch.randint(0, config.vocab_size, (options.sequences, options.sequence_length), device="cuda")
    bindings: dict[str, list[str]] = {}

    def bound(ops: str) -> Any:
        chosen: Any = dict(pair.split("=") for pair in ops.split(",")) if "=" in ops else ops
        model: Any = build_foundation_model(config, chosen, dtype=torch.bfloat16)
        bindings[ops] = str(model.opslot_binding).splitlines()
        return model

    candidates = {
        "stock transformers, grouped_mm": lambda: Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16),
        "generated, all eager": lambda: build_foundation_model(config, "eager", dtype=torch.bfloat16),
        **{f"generated, ops={ops}": partial(bound, ops) for ops in options.ops},
    }
    rate = dense_rate("cuda")
    floor = product_tflops(config, tokens.numel(), options.sequence_length) / rate * 1e3
    # Twice round, so that a slow spell of the machine shows as spread and not as a difference.
    rounds = [measure(name, build, tokens, options.steps) for _ in range(2) for name, build in candidates.items()]
    for result in rounds:
        print(
            f"{result['name']:36} {result['step_ms']:8.1f} ms {result['peak_gib']:7.1f} GiB  "
            f"loss {result['loss'][-1]:.4f}"
        )
    print(f"floor: {floor:.1f} ms ({rate:.0f} TFLOP/s dense)")
    for lines in bindings.values():
        print("\n".join(lines))
    if options.json:
        installed = {distribution.name for distribution in distributions()}
        data = {
            "command": f"python benchmarks/train_step.py {' '.join(sys.argv[1:])}",
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **{name: version(name) for name in PACKAGES if name in installed},
            },
            "shape": {"layers": options.layers, "batch": options.sequences, "sequence": options.sequence_length},
            "dense_tflops": rate,
            "floor_ms": floor,
            "bindings": bindings,
            "results": rounds,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
