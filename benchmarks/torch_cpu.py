"""The kernels of opslot-backend-torch against transformers' own code, forward and backward, on the CPU.

    uv run python benchmarks/torch_cpu.py --tokens 4096 --hidden 256 --out torch_cpu.json

The shapes are those of a small Qwen3-MoE. Both sides run in turn, so that whatever else the machine does hits both, and
`ratio` is the median of kernel time / eager time over the turns. `saved` is what autograd keeps for backward, arguments
not counted.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opslot import registry
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.qwen3_moe import modeling_qwen3_moe as upstream


@dataclass(frozen=True)
class Case:
    """One op at one size: `eager()` and `kernel()` compute the same from `inputs`, which they differentiate."""

    op: str
    variant: str
    name: str
    size: str
    inputs: list[Tensor]
    eager: Callable[[], Any]
    kernel: Callable[[], Any]


def kernel(op: str, variant: str, name: str = "torch") -> Callable[..., Any]:
    found = registry().resolve(op, variant, name, registry().describe("cpu"))
    assert found is not None
    return found


def cases(args: argparse.Namespace) -> Iterator[Case]:
    tokens, hidden, layers, vocabulary = args.tokens, args.hidden, args.layers, args.vocabulary
    heads, head_dim, length = args.heads, args.hidden // args.heads, min(args.tokens, 512)
    batch = tokens // length

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    rms_norm = kernel("rms_norm", "standard")
    rotary_pos_emb = kernel("rotary_pos_emb", "full")
    swiglu = kernel("glu", "swiglu")
    moe_experts = kernel("moe_experts", "standard")
    chunk_loss = kernel("cross_entropy_loss", "causal", "chunk_loss")
    load_balancing_loss = kernel("load_balancing_loss", "standard")

    for rows, width in ((tokens, hidden), (tokens * heads, head_dim)):
        norm, x = upstream.Qwen3MoeRMSNorm(width), leaf(rows, width)
        yield Case(
            "rms_norm", "standard", "torch", f"{rows}x{width}", [x, norm.weight],
            lambda norm=norm, x=x: norm(x),
            lambda norm=norm, x=x: rms_norm(x, norm.weight, norm.variance_epsilon),
        )  # fmt: skip

    q = leaf(batch, length, heads, head_dim)
    k = leaf(batch, length, max(1, heads // 2), head_dim)
    cos, sin = torch.randn(1, length, head_dim), torch.randn(1, length, head_dim)
    yield Case(
        "rotary_pos_emb", "full", "torch", f"{batch}x{heads}x{length}x{head_dim}", [q, k],
        lambda: upstream.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        lambda: rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
    )  # fmt: skip

    gate, up = leaf(tokens, 3 * hidden), leaf(tokens, 3 * hidden)
    yield Case(
        "glu", "swiglu", "torch", f"{tokens}x{3 * hidden}", [gate, up],
        lambda: torch.nn.functional.silu(gate) * up,
        lambda: swiglu(gate, up),
    )  # fmt: skip

    for experts, top_k in ((args.experts, args.top_k), (8 * args.experts, 4 * args.top_k)):
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=hidden // 2, num_experts=experts, num_experts_per_tok=top_k
        )
        # What a model of this configuration runs unless told otherwise.
        config._experts_implementation = "grouped_mm"
        module = upstream.Qwen3MoeExperts(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        x = leaf(tokens, hidden)
        weights, index = torch.randn(tokens, experts).softmax(-1).topk(top_k)
        weights.requires_grad_()
        yield Case(
            "moe_experts", "standard", "torch", f"{tokens}x{hidden}, {experts} experts top {top_k}",
            [x, weights, module.gate_up_proj, module.down_proj],
            lambda module=module, x=x, index=index, weights=weights: module(x, index, weights),
            lambda module=module, x=x, index=index, weights=weights: moe_experts(
                x, index, weights, module.gate_up_proj, module.down_proj
            ),
        )  # fmt: skip

    for words in (vocabulary, 32 * vocabulary):
        states, labels = leaf(batch, length, hidden), torch.randint(words, (batch, length))
        head = torch.nn.Linear(hidden, words, bias=False).weight
        yield Case(
            "cross_entropy_loss", "causal", "chunk_loss", f"{tokens}x{hidden}, vocabulary {words}", [states, head],
            lambda states=states, head=head, labels=labels: ForCausalLMLoss(
                torch.nn.functional.linear(states, head), labels, head.shape[0]
            ),
            lambda states=states, head=head, labels=labels: chunk_loss(states, head, labels),
        )  # fmt: skip

    logits = [leaf(tokens, args.experts) for _ in range(layers)]
    mask = torch.ones(batch, length, dtype=torch.int64)
    for attention_mask in (None, mask):
        yield Case(
            "load_balancing_loss", "standard", "torch",
            f"{layers} layers of {tokens}x{args.experts}{'' if attention_mask is None else ', masked'}", logits,
            lambda mask=attention_mask: upstream.load_balancing_loss_func(
                tuple(logits), args.experts, args.top_k, mask
            ),
            lambda mask=attention_mask: load_balancing_loss(
                tuple(logits), args.experts, args.top_k, mask
            ),
        )  # fmt: skip


def measure(case: Case, repeats: int) -> dict[str, Any]:
    def outputs(function: Callable[[], Any]) -> tuple[Tensor, ...]:
        result = function()
        return result if isinstance(result, tuple) else (result,)

    incoming = [torch.randn_like(output) for output in outputs(case.eager)]

    def seconds(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        torch.autograd.grad(outputs(function), case.inputs, incoming)
        return time.perf_counter() - start

    turns = [(seconds(case.eager), seconds(case.kernel)) for _ in range(repeats + 2)][2:]
    eager, kernel = zip(*turns, strict=True)
    return {
        "op": case.op,
        "variant": case.variant,
        "kernel": case.name,
        "size": case.size,
        "eager_ms": 1e3 * statistics.median(eager),
        "kernel_ms": 1e3 * statistics.median(kernel),
        "ratio": statistics.median(mine / theirs for theirs, mine in turns),
        "eager_saved_mib": saved_mib(case.eager, case.inputs),
        "kernel_saved_mib": saved_mib(case.kernel, case.inputs),
    }


def saved_mib(function: Callable[[], Any], inputs: list[Tensor]) -> float:
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = function()
    return sum(kept.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="measure the ops whose name contains this")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    rows = []
    print(f"{'op':20} {'size':34} {'eager ms':>9} {'kernel ms':>9} {'ratio':>6} {'eager MiB':>10} {'kernel MiB':>10}")
    for case in cases(args):
        if args.only in case.op:
            row = measure(case, args.repeats)
            rows.append(row)
            print(
                f"{row['op']:20} {row['size']:34} {row['eager_ms']:9.2f} {row['kernel_ms']:9.2f} {row['ratio']:6.2f} "
                f"{row['eager_saved_mib']:10.2f} {row['kernel_saved_mib']:10.2f}",
                flush=True,
            )
    if args.out:
        setting = {**{k: v for k, v in vars(args).items() if k != "out"}, "torch": torch.__version__}
        setting["machine"] = platform.machine()
        args.out.write_text(json.dumps({"setting": setting, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
