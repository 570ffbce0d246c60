"""adopt before and after FSDP2 and tensor parallelism, in two gloo processes that go through every scenario."""

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from opslot import BindError
from opslot_models import adopt, unadopt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from packages.models.tests.ranks import run_ranks

WORLD = 2
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MOE = Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True)
TIED = Qwen3Config(**SMALL, tie_word_embeddings=True)
KERNELS = {"rms_norm": "torch", "rotary_pos_emb": "torch", "glu": "torch"}
LOSS = {"cross_entropy_loss": "chunk_loss"}
EXPERTS = {"moe_experts": "torch", "load_balancing_loss": "torch"}
FUSED_LOSS = {**LOSS, "default": "eager"}


def stock(config=MOE):
    torch.manual_seed(0)
    return (Qwen3ForCausalLM if config is TIED else Qwen3MoeForCausalLM)(copy.deepcopy(config))


def shard(model, *alone, **options):
    """As most scripts do it: each layer, then the model; before them the modules that get a group of their own."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*alone, *model.model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def train(model):
    """Two steps of which each rank sees another batch: the losses and the last whole gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        tokens = torch.randint(1, 96, (2, 9), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }


def proven(model, binding):
    with binding.proof() as proof:
        result = train(model)
    proof.check()
    return result


def refused(do):
    try:
        do()
    except BindError as error:
        return str(error)
    return ""


def reason_of_loss(binding):
    (row,) = [row for row in binding.rows if row.op == "cross_entropy_loss"]
    return row.kernel, row.reason


def fsdp2():
    yield "stock", train(shard(stock()))
    yield "stock tied", train(shard(stock(TIED)))

    model = stock()
    binding = adopt(model, {**KERNELS, **LOSS, **EXPERTS}, device="cpu").binding
    yield "adopt then shard", proven(shard(model), binding)

    model = shard(stock())
    adoption = adopt(model, {**KERNELS, **LOSS, **EXPERTS}, device="cpu")
    yield "shard then adopt", proven(model, adoption.binding)
    yield "left", adoption.left
    yield "swapped again", adopt(model, "auto", device="cpu").swapped
    yield "records", str(type(model)) in dict(_CAN_RECORD_REGISTRY)

    model = shard(stock())
    before = [type(module) for module in model.modules()], [dict(vars(module)) for module in model.modules()]
    adopt(model, {**KERNELS, **LOSS, **EXPERTS}, device="cpu")
    between = [type(module) for module in model.modules()]
    unadopt(model)
    after = [type(module) for module in model.modules()], [dict(vars(module)) for module in model.modules()]
    yield "the way back", (before == after, between != after[0])
    yield "unadopted", train(model)

    model = stock()
    adopt(model, "auto", device="cpu")
    unadopt(shard(model))
    yield "adopt, shard, unadopt", train(model)

    model = stock(TIED)
    adopt(model, {**KERNELS, **LOSS}, device="cpu")
    yield "tied, adopt then shard", train(shard(model))
    model = shard(stock(TIED))
    adopt(model, {**KERNELS, **LOSS}, device="cpu")
    yield "tied, shard then adopt", train(model)

    model = stock()
    binding = adopt(model, {**EXPERTS, "default": "eager"}, device="cpu").binding
    experts = [layer.mlp.experts for layer in model.model.layers]
    yield "experts alone, adopt then shard", proven(shard(model, *experts), binding)
    model = stock()
    shard(model, *[layer.mlp.experts for layer in model.model.layers])
    binding = adopt(model, {**EXPERTS, "default": "eager"}, device="cpu").binding
    yield "experts alone, shard then adopt", proven(model, binding)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "stock in bfloat16", train(shard(stock(), mp_policy=half))
    model = stock()
    adopt(model, {**KERNELS, **LOSS, **EXPERTS}, device="cpu")
    yield "bfloat16, adopt then shard", train(shard(model, mp_policy=half))


def head_alone():
    model = stock()
    adopt(model, FUSED_LOSS, device="cpu")
    shard(model, model.lm_head)
    yield "at the call", refused(lambda: train(model))
    model = stock()
    shard(model, model.lm_head)
    yield "at bind", refused(lambda: adopt(model, FUSED_LOSS, device="cpu"))
    binding = adopt(model, {"default": "eager", "cross_entropy_loss": "auto"}, device="cpu").binding
    yield "auto", reason_of_loss(binding)
    yield "trains", train(model)
    yield "with the norm", refused(lambda: train(norm_and_head()))


def norm_and_head():
    """Some scripts put the last norm and the head into one group, which the norm's forward gathers."""
    model = stock()
    adopt(model, FUSED_LOSS, device="cpu")
    fully_shard([model.model.norm, model.lm_head], mesh=init_device_mesh("cpu", (WORLD,)))
    return shard(model)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"lm_head": ColwiseParallel(output_layouts=None)}
    model = stock()
    adopt(model, FUSED_LOSS, device="cpu")
    parallelize_module(model, mesh, plan)
    yield "at the call", refused(lambda: train(model))
    model = parallelize_module(stock(), mesh, plan)
    yield "at bind", refused(lambda: adopt(model, FUSED_LOSS, device="cpu"))
    binding = adopt(model, {"default": "eager", "cross_entropy_loss": "auto"}, device="cpu").binding
    yield "auto", reason_of_loss(binding)
    # The weight and nothing around it, as in code that puts its own collectives there.
    bare = stock()
    bare.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach())
    yield "weight at bind", refused(lambda: adopt(bare, FUSED_LOSS, device="cpu"))
    bare = stock()
    adopt(bare, FUSED_LOSS, device="cpu")
    bare.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach())
    yield "weight at the call", refused(lambda: train(bare))


def both():
    """Tensor parallelism inside FSDP2: the gathered weight is still a shard of the head."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    model = stock()
    weight = parallelize_module(stock(), mesh["tp"], {"lm_head": ColwiseParallel()}).lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(weight.detach())
    fully_shard(model, mesh=mesh["dp"])
    adopt(model, FUSED_LOSS, device="cpu")
    yield "at the call", refused(lambda: train(model))


def transformers_plan(folder):
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        stock().save_pretrained(folder)
    dist.barrier()
    model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    before = [type(module) for module in model.modules()]
    yield "adopt", refused(lambda: adopt(model, "auto", device="cpu"))
    yield "unchanged", before == [type(module) for module in model.modules()]


def work(rank, port, folder, results):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    scenarios = {"fsdp2": fsdp2(), "head": head_alone(), "tp": tensor_parallel(), "both": both()}
    scenarios["plan"] = transformers_plan(f"{folder}/checkpoint")
    said = {name: dict(scenario) for name, scenario in scenarios.items()}
    torch.save(said, f"{folder}/{rank}")
    results.put(rank)
    dist.barrier()  # the rank with the store leaves last


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What rank 0 says; of what rank 1 says, only the losses are others."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, WORLD, folder)
    return torch.load(folder / "0", weights_only=False)


def close(actual, expected, rtol=1e-4, atol=1e-6):
    assert len(actual) > 10
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    ["adopt then shard", "shard then adopt", "experts alone, adopt then shard", "experts alone, shard then adopt"],
)
def test_fsdp2_trains_as_stock_does(said, order):
    close(said["fsdp2"][order], said["fsdp2"]["stock"])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tied, adopt then shard", "tied, shard then adopt"])
def test_fsdp2_with_a_tied_head(said, order):
    close(said["fsdp2"][order], said["fsdp2"]["stock tied"])


@pytest.mark.slow
def test_fsdp2_in_mixed_precision(said):
    actual, expected = (said["fsdp2"][name]["losses"] for name in ("bfloat16, adopt then shard", "stock in bfloat16"))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


@pytest.mark.slow
def test_a_sharded_model_is_adopted_once_and_unadopted_exactly(said):
    said = said["fsdp2"]
    assert said["left"] == ()
    assert said["swapped again"] == ()
    assert said["records"]
    assert said["the way back"] == (True, True)
    for order in ("unadopted", "adopt, shard, unadopt"):
        assert all(torch.equal(said[order][name], value) for name, value in said["stock"].items())


ALONE = r"is sharded on its own and whole only in its own forward \(leave it to fully_shard\(model\)\)"


@pytest.mark.slow
def test_a_head_in_its_own_group_gets_no_fused_loss(said):
    head = said["head"]
    assert "cross_entropy_loss_op: " in head["at the call"]
    for message in (head["at the call"], head["at bind"], head["with the norm"]):
        assert ALONE.replace("\\", "") in message
        assert "Choose cross_entropy_loss: eager" in message
    assert head["auto"] == ("eager", f"auto: its head {ALONE}".replace("\\", ""))
    close(head["trains"], said["fsdp2"]["stock"])


@pytest.mark.slow
def test_a_tensor_parallel_head_gets_no_fused_loss(said):
    for message in said["tp"].values():
        assert "has hooks" in str(message) or "has a weight of type DTensor" in str(message)
    assert said["tp"]["auto"][0] == "eager"
    assert "of type DTensor" in said["tp"]["weight at bind"]
    assert "of type DTensor" in said["tp"]["weight at the call"]
    assert "of type DTensor" in said["both"]["at the call"]


@pytest.mark.slow
def test_a_model_under_transformers_tensor_parallelism_is_refused_whole(said):
    assert "has a forward of its own" in said["plan"]["adopt"]
    assert "tensor parallelism" in said["plan"]["adopt"]
    assert said["plan"]["unchanged"]
