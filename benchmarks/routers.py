"""What a fused router could gain: upstream's routers forward and backward, beside the products of their gates.

    python benchmarks/routers.py --json routers.json

needs a GPU; `--device cpu --tokens 64` tries the script. A router is the gate's product and what chooses experts from
it. The rest, softmax or sigmoid, groups, top-k and weights, is what a kernel could fuse: `rest_ms` is the time of the
kernels of all but the products, and cannot shrink below `floor_ms`, reading the logits and writing their gradient once.
"""

import argparse
import json
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from moe_experts import device_milliseconds, wall_milliseconds
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

COPY_RATE = 4.25e12  # bytes a second of an H200, read and written


def routers() -> dict[str, tuple[Any, int, int]]:
    """The router, its hidden size and its number of experts."""
    qwen = Qwen3MoeConfig(hidden_size=2048, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
    gpt = GptOssConfig(hidden_size=2880, num_local_experts=32, num_experts_per_tok=4)
    deepseek = DeepseekV3Config(hidden_size=7168, n_routed_experts=256, num_experts_per_tok=8)
    return {
        "qwen3_moe": (Qwen3MoeTopKRouter(qwen), 2048, 128),
        "gpt_oss": (GptOssTopKRouter(gpt), 2880, 32),
        "deepseek_v3": (DeepseekV3TopkRouter(deepseek), 7168, 256),
    }


def measure(name: str, router: Any, hidden: int, experts: int, tokens: int, device: str) -> dict[str, Any]:
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    router = router.to(device, dtype)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    leaves = [x, router.weight]

    def whole() -> Any:
        outputs = [out for out in router(x) if out.requires_grad]
        weights = min(outputs, key=lambda out: out.shape[-1])  # those of the chosen, not all logits
        return torch.autograd.grad(weights.float().sum(), leaves)

    kind = torch.float32 if name == "deepseek_v3" else dtype  # in which upstream makes the product

    def gate() -> Any:
        logits = torch.nn.functional.linear(x.to(kind), router.weight.to(kind))
        return torch.autograd.grad(logits.sum(), leaves)

    row = {"hidden": hidden, "experts": experts, "wall_ms": wall_milliseconds(whole, device)}
    both, product = device_milliseconds(whole, device), device_milliseconds(gate, device)
    if both is not None and product is not None:
        floor = 2 * tokens * experts * kind.itemsize / COPY_RATE * 1e3
        row |= {"device_ms": both, "gate_ms": product, "rest_ms": both - product, "floor_ms": floor}
    print(name, row, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("it needs a GPU; --device cpu tries the script, see its docstring")
    data = {
        "command": f"python benchmarks/routers.py {' '.join(sys.argv[1:])}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "tokens": options.tokens,
        "results": {name: measure(name, *router, options.tokens, options.device) for name, router in routers().items()},
    }
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
