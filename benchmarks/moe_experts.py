"""Routed experts forward and backward, beside transformers' grouped_mm and the rate of a dense product, in one process.

    python benchmarks/moe_experts.py --json moe_experts.json

needs a GPU. To try the script on a CPU: `--kernel torch --device cpu --dtype float32 --largest 32`.

The candidates take turns, round after round, and the dense bf16 product of two random normal 8192 x 8192 matrices is
measured in each of them; the L2 cache is overwritten before every run. Times are medians of all rounds. The share is
18 T k H I operations, three times those of forward, at the dense rate, divided by the time. Extra memory is the peak of
one forward and backward without inputs, weights and their gradients.

Also the loss that balances experts, of 48 layers: there the time of the host counts, so calls follow one another and
the clock stops when the last is done. `device_ms` is what its kernels take in sum, `graph_ms` what the same call takes
as a CUDA graph, and the floor of the host is an autograd function of the same inputs that computes nothing.
`--shapes` takes the shapes of the other variants too; without a name the loss alone is measured.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from opslot import registry
from transformers import DeepseekV4Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

SHAPES = ("qwen3-30b-a3b", "qwen3-30b-a3b, skewed", "qwen3-30b-a3b, long", "qwen3.5-35b-a3b", "eight experts",
          "sixty-four experts")  # fmt: skip
OTHERS = {"deepseek-v4": "clamped", "gpt-oss-20b": "gpt_oss", "gpt-oss-120b": "gpt_oss"}
PACKAGES = ("torch", "triton", "transformers", "opslot")
Run = Callable[[], Any]


def grouped_mm(variant: str, sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """transformers' experts over the weights of a sample, and the tensors that get gradients."""
    hidden_states, index, routing, *weights = sample.args
    hidden, inner = hidden_states.shape[1], weights[0].shape[2 if variant == "gpt_oss" else 1] // 2
    sizes = {"hidden_size": hidden, "num_experts_per_tok": index.shape[1], "experts_implementation": "grouped_mm"}
    count = weights[0].shape[0]
    names = ["gate_up_proj", "down_proj"]
    with torch.device("meta"):
        module: Any
        if variant == "gpt_oss":
            module = GptOssExperts(GptOssConfig(num_local_experts=count, intermediate_size=inner, **sizes))
            names = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
            assert (module.alpha, module.limit) == tuple(weights[4:])
        elif variant == "clamped":
            module = DeepseekV4Experts(
                DeepseekV4Config(n_routed_experts=count, moe_intermediate_size=inner, swiglu_limit=weights[2], **sizes)
            )
        else:
            module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=count, moe_intermediate_size=inner, **sizes))
    for name, weight in zip(names, weights, strict=False):
        assert getattr(module, name).shape == weight.shape
        setattr(module, name, torch.nn.Parameter(weight))
    leaves = [hidden_states, routing, *(getattr(module, name) for name in names)]
    return (lambda hidden, index, routing, *_: module(hidden, index, routing)), leaves


class Experts:
    """Forward, and forward with backward, of one candidate on one sample."""

    def __init__(
        self, function: Callable[..., Any], leaves: list[torch.Tensor], sample: Any, incoming: torch.Tensor
    ) -> None:
        self.function, self.leaves, self.sample, self.incoming = function, leaves, sample, incoming

    def forward(self) -> Any:
        with torch.no_grad():
            return self.function(*self.sample.args)

    def forward_backward(self) -> Any:
        for leaf in self.leaves:
            leaf.grad = None
        self.function(*self.sample.args).backward(self.incoming)

    def extra_gib(self, device: str) -> float | None:
        if device == "cpu":
            return None
        self.forward_backward()
        for leaf in self.leaves:
            leaf.grad = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.forward_backward()
        torch.cuda.synchronize()
        gradients = sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)
        return (torch.cuda.max_memory_allocated() - before - gradients) / 2**30


def milliseconds(run: Run, device: str) -> float:
    """On the device, the median of many runs with a cold cache."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=60, return_mode="median"))


def wall_milliseconds(run: Run, device: str, repeats: int = 20) -> float:
    """Of one call among many, host and device together."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    run()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats * 1e3


def device_milliseconds(run: Run, device: str, repeats: int = 5) -> float | None:
    """What the kernels of one call take in sum."""
    if device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages()) / repeats / 1e3


def graph_milliseconds(run: Run, device: str) -> float | None:
    """Of one call, captured in a CUDA graph and replayed."""
    if device == "cpu":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return wall_milliseconds(graph.replay, device)


def dense_rate(device: str, size: int) -> float:
    """TFLOP/s of one bf16 product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b, device) / 1e9


def experts(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    variant = OTHERS.get(shape, "standard")
    contract = registry().contract("moe_experts", variant)
    workload = contract.workload
    assert workload is not None
    sizes = {n: min(size, options.largest) if options.largest else size for n, size in workload.shapes[shape].items()}
    sizes["top_k"] = min(sizes["top_k"], sizes["experts"])
    sample: Any = workload.problem(options.device, getattr(torch, options.dtype), 0, **sizes)  # type: ignore[operator]
    incoming = torch.randn_like(sample.args[0])
    kernel = registry().load(registry().offer("moe_experts", variant, options.kernel))
    leaves = [a for a in sample.args if isinstance(a, torch.Tensor) and a.requires_grad]
    runs = {
        options.kernel: Experts(kernel, leaves, sample, incoming),
        "grouped_mm": Experts(*grouped_mm(variant, sample), sample, incoming),
    }
    flops = 18 * sizes["tokens"] * sizes["top_k"] * sizes["hidden"] * sizes["inner"] / 1e9
    rates: list[float] = []
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "forward_backward": []} for name in runs}
    # Each rounds to bfloat16 some five times one after the other, by 2**-9 of a number at most.
    apart = runs["grouped_mm"].forward() - (expected := runs[options.kernel].forward())
    assert apart.norm() < 2e-2 * expected.norm(), "they compute something else"
    for run in runs.values():
        run.forward_backward()
    for _ in range(options.rounds):
        rates.append(dense_rate(options.device, options.largest or 8192))
        for name, run in runs.items():
            times[name]["forward"].append(milliseconds(run.forward, options.device))
            times[name]["forward_backward"].append(milliseconds(run.forward_backward, options.device))
    rate = statistics.median(rates)
    found = {}
    for name, run in runs.items():
        both = statistics.median(times[name]["forward_backward"])
        found[name] = {
            "forward_ms": statistics.median(times[name]["forward"]),
            "forward_backward_ms": both,
            "forward_backward_spread": [min(times[name]["forward_backward"]), max(times[name]["forward_backward"])],
            "share_of_dense": flops / both / rate,
            "extra_gib": run.extra_gib(options.device),
        }
    speedup = found["grouped_mm"]["forward_backward_ms"] / found[options.kernel]["forward_backward_ms"]
    row = {
        "shape": shape,
        "variant": variant,
        **sizes,
        "dense_tflops": rate,
        "floor_ms": flops / rate,
        "candidates": found,
    }
    print(
        f"{shape:24} {found[options.kernel]['forward_backward_ms']:8.2f} ms, "
        f"{found[options.kernel]['share_of_dense']:.1%} of dense, {speedup:.2f}x grouped_mm",
        flush=True,
    )
    return {**row, "speedup": speedup}


def balance(options: argparse.Namespace) -> dict[str, Any]:
    """The loss of 48 layers, forward and backward: the kernel's and upstream's."""
    contract = registry().contract("load_balancing_loss", "standard")
    workload = contract.workload
    assert workload is not None
    sizes = dict(workload.shapes["qwen3-30b-a3b"])
    if options.largest:
        sizes = {**sizes, "layers": 2, "tokens": options.largest}
    sample: Any = workload.problem(options.device, getattr(torch, options.dtype), 0, **sizes)  # type: ignore[operator]
    kernel = registry().load(registry().offer("load_balancing_loss", "standard", options.kernel))
    candidates = {
        options.kernel: kernel,
        "transformers": load_balancing_loss_func,
        "floor of the host": lambda layers, *_: Nothing.apply(*layers),
    }
    found = {}
    for name, function in candidates.items():

        def run(function: Any = function) -> Any:
            return torch.autograd.grad(function(*sample.args), sample.args[0])

        times = [wall_milliseconds(run, options.device) for _ in range(options.rounds)]
        found[name] = {"forward_backward_ms": statistics.median(times), "spread": [min(times), max(times)]}
        if function is not candidates["floor of the host"]:
            found[name]["device_ms"] = device_milliseconds(run, options.device)
        if function is kernel:
            found[name]["graph_ms"] = graph_milliseconds(run, options.device)
        print(f"{name}: {found[name]}", flush=True)
    return {**sizes, "candidates": found}


class Nothing(torch.autograd.Function):
    """Of the layers of a loss what any autograd function does: one output, and a gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, *layers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*layers)
        return layers[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layers = ctx.saved_tensors
        return tuple(layers[0].new_empty(len(layers), *layers[0].shape).unbind())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=0, help="no size above this")
    parser.add_argument("--shapes", nargs="*", choices=(*SHAPES, *OTHERS), default=SHAPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("it needs a GPU; --device cpu tries the script, see its docstring")
    packages = *PACKAGES, registry().offer("moe_experts", "standard", options.kernel).distribution
    data = {
        "command": f"python benchmarks/moe_experts.py {' '.join(sys.argv[1:])}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else platform.machine(),
        "dtype": options.dtype,
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "experts": [experts(shape, options) for shape in options.shapes],
        "load_balancing_loss": balance(options),
    }
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
