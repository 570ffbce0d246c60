"""Each rank holds a part of the experts and trains on its own tokens.

Run: torchrun --nproc-per-node 2 examples/expert_parallel.py --steps 5 --ops moe_experts=torch
It needs accelerate, with which transformers loads shards: pip install 'opslot-models[train]'.
On the CPU, or with a GPU for each process where there are some; --ops is what OPSLOT_OPS takes, or auto, or eager.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable

import torch
import torch.distributed as dist
from opslot_models import build_foundation_model
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import Qwen3MoeConfig
from transformers.distributed import DistributedConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)


def clip(parameters: Iterable[torch.nn.Parameter], largest: float) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for gradients on several meshes, as those of the experts and of all else are."""
    meshes: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in meshes.values()]
    norm = get_total_norm([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])
    for group in meshes.values():
        clip_grads_with_norm_(group, largest, norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ops", default="moe_experts=torch")
    parser.add_argument("--output", help="where to save the trained model, for one process or many")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as its docstring says")
    ops = dict(choice.split("=") for choice in args.ops.split(",")) if "=" in args.ops else args.ops

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # transformers shards a checkpoint while it loads it, so a new model is saved first, by one rank.
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        if rank == 0:
            torch.manual_seed(0)
            build_foundation_model(CONFIG, "eager").save_pretrained(folder)
        dist.barrier()
        plan = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
        model = build_foundation_model(shared[0], ops, distributed_config=plan)
        dist.barrier()
    model.opslot_binding.assert_same_on_all_ranks()
    if rank == 0:
        print(model.opslot_binding)

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 32), generator=torch.Generator().manual_seed(rank)).to(device)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)
    if args.output:
        model.save_pretrained(args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
