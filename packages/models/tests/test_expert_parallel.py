"""Expert parallelism by transformers with opslot's kernels: two processes give the loss and the gradients of one.

Two layouts: "data", where every rank has a batch of its own and sends each token to the rank of its experts, and
"tensor", where the ranks share one batch, split the rest of the model too, and pass the index one past their last
expert for tokens of the others. What a rank runs takes its device, its process group and its kernel as parameters:
the tests on the CPU and on two GPUs are the same.
"""

import copy
import dataclasses
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import opslot
import pytest
import torch
import torch.distributed as dist
from opslot import OpslotError
from opslot_models import adopt, build_foundation_model, unadopt
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from packages.models.tests.ranks import run_ranks

ROOT = Path(__file__).parents[3]
USING, EXAMPLE = ROOT / "docs/using.md", ROOT / "examples/expert_parallel.py"
WORLD = 2
EXPERTS = 4
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
# Routers by softmax before and after the choice, and by sigmoid with a correction.
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=EXPERTS),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=EXPERTS),
    "deepseek_v3": DeepseekV3Config(
        **{**SMALL, **LATENT, **GROUPS, "num_key_value_heads": 4}, moe_intermediate_size=16
    ),
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=EXPERTS),
}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")  # whose experts are those of moe_experts/standard
ROUTINGS = ("routed", "one rank without tokens")


def layouts():
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return {
            "data": DistributedConfig(fsdp_size=WORLD, ep_size=WORLD),
            "tensor": DistributedConfig(tp_size=WORLD, ep_size=WORLD, ep_implementation="all_reduce"),
        }
    return {"tensor": DistributedConfig(tp_size=WORLD, enable_expert_parallel=True)}  # transformers 5.17


@dataclass(frozen=True)
class Machine:
    """Where the ranks run, what they speak through, which kernel the experts get, and what chooses the others."""

    device: str
    group: str
    kernel: str
    others: str


def one_process(family, routing="routed", device="cpu"):
    """The stock model, whole, with upstream's loop over experts: the same on every rank."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="eager")
    routers = [getattr(layer.mlp, "gate", None) or layer.mlp.router for layer in model.model.layers]
    with torch.no_grad():
        for router in routers:
            router.weight.normal_()
        if routing != "routed":
            # A feature that stays positive, by which all tokens go to the experts of rank 0.
            model.model.embed_tokens.weight[:, 0] = 1.0
            for router in routers:
                router.weight[: EXPERTS // WORLD, 0] = 1.0
                router.weight[EXPERTS // WORLD :, 0] = -1.0
    return model.to(device).train()


def whole_batch(device="cpu"):
    return torch.randint(1, 96, (WORLD, 9), generator=torch.Generator().manual_seed(1)).to(device)


def batch_of_rank(layout, device="cpu"):
    rows = whole_batch(device)
    return rows[dist.get_rank() :][:1] if layout == "data" else rows


def mean_loss(loss, layout):
    loss = loss.detach().clone()
    if layout == "data":
        dist.all_reduce(loss)
        loss /= WORLD
    return loss.cpu()


def is_of_experts(name):
    return ".experts." in name


def results_of(model, layout, device):
    """Loss, logits and gradients: of experts those of this rank, of everything else the whole ones."""
    tokens = batch_of_rank(layout, device)
    out = model(tokens, labels=tokens)
    out.loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.to_local() if is_of_experts(name) else grad.full_tensor()
        grads[name] = None if grad is None else grad.cpu()
    logits = out.logits.full_tensor() if isinstance(out.logits, DTensor) else out.logits
    return {"loss": mean_loss(out.loss, layout), "logits": logits.detach().cpu(), **grads}


def expected_of(model, layout, device):
    """The same of one process that has the whole batch: what this rank should find."""
    tokens = whole_batch(device)
    out = model(tokens, labels=tokens)
    out.loss.backward()
    rank, share = dist.get_rank(), EXPERTS // WORLD
    grads = {
        name: p.grad[rank * share :][:share].cpu() if is_of_experts(name) else p.grad.cpu()
        for name, p in model.named_parameters()
    }
    logits = out.logits[rank:][:1] if layout == "data" else out.logits
    return {"loss": out.loss.detach().cpu(), "logits": logits.detach().cpu(), **grads}


def saved(folder, family, routing="routed"):
    path = f"{folder}/{family}/{routing.replace(' ', '_')}"
    if dist.get_rank() == 0 and not Path(path).exists():
        one_process(family, routing).save_pretrained(path)
    dist.barrier()
    return path


def ops(machine):
    return {"default": "eager", "moe_experts": {"standard": machine.kernel}}


def build(path, layout, chosen, machine, **kwargs):
    kwargs = {"distributed_config": copy.deepcopy(layouts()[layout]), "attn_implementation": "eager", **kwargs}
    return build_foundation_model(path, chosen, device=machine.device, **kwargs).train()


def bound(binding):
    return {row.kernel for row in binding.rows if row.op == "moe_experts"}, binding.verify()


def stock_as_one_process(folder, layout, machine):
    """What each rank gets from transformers alone, and what it should."""
    for family, routing in itertools.product(CONFIGS, ROUTINGS):
        model = one_process(family, routing, machine.device)
        yield (family, routing, "expected"), expected_of(model, layout, machine.device)
        plan = {"distributed_config": copy.deepcopy(layouts()[layout]), "attn_implementation": "eager"}
        path = saved(folder, family, routing)
        stock = AutoModelForCausalLM.from_pretrained(path, experts_implementation="grouped_mm", **plan).train()
        yield (family, routing, "found"), results_of(stock, layout, machine.device)


def kernel_as_one_process(folder, layout, machine):
    for family, routing in itertools.product(FAMILIES, ROUTINGS):
        model = one_process(family, routing, machine.device)
        yield (family, routing, "expected"), expected_of(model, layout, machine.device)
        model = build(saved(folder, family, routing), layout, ops(machine), machine)
        with model.opslot_binding.proof() as proof:
            found = results_of(model, layout, machine.device)
        yield (family, routing, "found"), found
        yield (family, routing, "misses"), [str(miss) for miss in proof.misses()]
        yield (family, routing, "bound"), bound(model.opslot_binding)


def clip():
    spec = importlib.util.spec_from_file_location("expert_parallel", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.clip


def train(model, layout, machine):
    limit = torch.nn.utils.clip_grad_norm_ if layout is None else clip()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    tokens = whole_batch(machine.device) if layout is None else batch_of_rank(layout, machine.device)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        norms.append(limit(model.parameters(), 0.5).cpu())
        optimizer.step()
        losses.append(mean_loss(loss, layout))
    return torch.stack(losses + norms)


def trained_and_saved(folder, layout, machine):
    """Three clipped steps under activation checkpointing, and the checkpoint in one process again."""
    model = build(saved(folder, "qwen3_moe"), layout, {**ops(machine), "default": machine.others}, machine)
    model.gradient_checkpointing_enable()
    model.opslot_binding.assert_same_on_all_ranks(timeout=30)
    yield "steps", train(model, layout, machine)
    model.save_pretrained(f"{folder}/trained_{layout}")
    one = one_process("qwen3_moe", device=machine.device)
    yield "expected steps", train(one, None, machine)
    dist.barrier()
    loaded = build_foundation_model(f"{folder}/trained_{layout}", "eager", device="cpu")
    yield "loaded", {name: parameter.detach() for name, parameter in loaded.named_parameters()}
    yield "expected", {name: parameter.detach().cpu() for name, parameter in one.named_parameters()}


def adopted(folder, layout, machine):
    """A stock model that has been sharded, and the way back."""
    path = saved(folder, "qwen3_moe", ROUTINGS[1])
    plan = {"distributed_config": copy.deepcopy(layouts()[layout]), "attn_implementation": "eager"}
    yield "expected", expected_of(one_process("qwen3_moe", ROUTINGS[1], machine.device), layout, machine.device)
    model = AutoModelForCausalLM.from_pretrained(path, **plan).train()
    before = [type(module) for module in model.modules()]
    try:
        binding = adopt(model, ops(machine), device=machine.device).binding
    except OpslotError as error:
        yield "refused", str(error)
        yield "unchanged", before == [type(module) for module in model.modules()]
        return
    with binding.proof() as proof:
        yield "adopted", results_of(model, layout, machine.device)
    yield "misses", [str(miss) for miss in proof.misses()]
    yield "bound", bound(binding)
    model.zero_grad()
    unadopt(model)
    yield "unchanged", before == [type(module) for module in model.modules()]
    yield "unadopted", results_of(model, layout, machine.device)


def refused(do):
    try:
        do()
    except OpslotError as error:
        return str(error)
    return ""


def refusals(folder, layout, machine):
    path = saved(folder, "qwen3_moe", ROUTINGS[1])
    differing = {"default": "eager", "moe_experts": machine.kernel if dist.get_rank() else "eager"}
    model = build(path, layout, differing, machine)
    yield "another choice", refused(lambda: model.opslot_binding.assert_same_on_all_ranks(timeout=30))
    new, plan = copy.deepcopy(CONFIGS["qwen3_moe"]), layouts()[layout]
    yield "new weights", refused(lambda: build_foundation_model(new, "eager", distributed_config=plan))
    loop = {"experts_implementation": "eager"}
    yield "loop", refused(lambda: build(path, layout, "eager", machine, **loop))
    yield "loop beside a kernel", refused(lambda: build(path, layout, ops(machine), machine, **loop))


def connected(folder, layout, machine):
    """Whether what the experts return leads back to their inputs, with no token for those of one rank."""
    path = saved(folder, "qwen3_moe", ROUTINGS[1])
    plan = {"distributed_config": copy.deepcopy(layouts()[layout])}
    models = {
        "loop": AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager", **plan),
        "kernel": build(path, layout, ops(machine), machine),
    }
    hidden = torch.ones(3, SMALL["hidden_size"], device=machine.device, requires_grad=True)
    index = torch.tensor([[0, 1]] * 3, device=machine.device)
    weights = torch.ones(3, 2, device=machine.device, requires_grad=True)
    for name, model in models.items():
        yield name, model.model.layers[0].mlp.experts(hidden, index, weights).requires_grad


def triton_as_one_process(folder, layout, machine):
    """The kernel of opslot-backend-triton-moe in Triton's interpreter, which its spec knows nothing of."""
    from opslot.testing import triton_interpreter
    from opslot_backends.triton_moe import BACKEND

    known, routing = opslot.registry(), ROUTINGS[layout == "tensor"]
    for family, variant in (("qwen3_moe", "standard"), ("gpt_oss", "gpt_oss")):
        experts = next(spec for spec in BACKEND.kernels if (spec.op, spec.variant) == ("moe_experts", variant))
        anywhere = dataclasses.replace(experts, name="interpreted", requires=opslot.Requires(), nested=None)
        if "interpreted" not in {offer.spec.name for offer in known.offers("moe_experts", variant)}:
            known.add(opslot.Backend(api=1, kernels=(anywhere,)), f"interpreted-{variant}", "0")
        yield (family, "expected"), expected_of(one_process(family, routing), layout, machine.device)
        chosen = {"default": "eager", "moe_experts": "interpreted"}
        model = build(saved(folder, family, routing), layout, chosen, machine)
        with triton_interpreter():
            yield (family, "found"), results_of(model, layout, machine.device)
        yield (family, "bound"), bound(model.opslot_binding)


SCENARIOS = {
    "stock": stock_as_one_process,
    "kernel": kernel_as_one_process,
    "trained": trained_and_saved,
    "adopted": adopted,
    "refusals": refusals,
    "connected": connected,
}
ALONE = {"triton": triton_as_one_process}


def work(rank, port, folder, results, machine, wanted):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    if machine.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)
    dist.init_process_group(machine.group, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    said: dict[Any, Any] = {}
    for name, layout in wanted:
        said[name, layout] = dict({**SCENARIOS, **ALONE}[name](folder, layout, machine))
    torch.save(said, f"{folder}/{rank}")
    results.put(rank)
    dist.barrier()  # the rank with the store leaves last
    dist.destroy_process_group()


def run(folder, machine, wanted):
    """What each rank says of the scenarios that are wanted."""
    with pytest.MonkeyPatch.context() as patch:
        if machine.device == "cpu":
            patch.setenv("CUDA_VISIBLE_DEVICES", "")  # transformers takes the accelerator that it sees
        run_ranks(work, WORLD, folder, machine, wanted)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(WORLD)]


ON_CPU = Machine("cpu", "gloo", kernel="torch", others="auto")
ON_GPU = Machine("cuda", "nccl", kernel="triton", others="eager")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    wanted = [(name, layout) for layout in layouts() for name in SCENARIOS]
    return run(tmp_path_factory.mktemp("ranks"), ON_CPU, wanted)


def tolerance():
    """Of a norm: in each of two layers, forward and backward may be off by what the contract of the kernel allows."""
    contract = opslot.registry().contract("moe_experts", "standard")
    return 4 * contract.tolerances["float32"].rtol


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert len(expected) > 10
    for name, value in expected.items():
        assert actual[name] is not None, f"{name} has no gradient"
        assert actual[name].shape == value.shape, name
        distance = (actual[name] - value).norm()
        assert distance <= tolerance() * value.norm(), f"{name} is off by {distance / value.norm():.1e} of its norm"


layout = pytest.mark.parametrize("layout", ["data", "tensor"])
rank = pytest.mark.parametrize("rank", range(WORLD))
newer = pytest.mark.skipif("data" not in layouts(), reason="this transformers has no ep_size")


def of_layout(said, name, layout, rank=0):
    if layout not in layouts():
        pytest.skip("this transformers has expert parallelism beside tensor parallelism alone")
    return said[rank][name, layout]


@pytest.mark.slow
@layout
@rank
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("who", "family"), [("stock", f) for f in CONFIGS] + [("kernel", f) for f in FAMILIES])
def test_two_processes_give_loss_and_gradients_of_one(said, layout, rank, family, routing, who):
    results = of_layout(said, who, layout, rank)
    assert_same(results[family, routing, "found"], results[family, routing, "expected"])


@pytest.mark.slow
@layout
@pytest.mark.parametrize("family", FAMILIES)
def test_the_case_without_tokens_is_one(said, layout, family):
    """Else the test above would say nothing of it."""
    for routing, empty in zip(ROUTINGS, (False, True), strict=True):
        results = of_layout(said, "kernel", layout, 1)[family, routing, "found"]
        grads = [value for name, value in results.items() if is_of_experts(name)]
        assert len(grads) == 4
        assert all(grad.count_nonzero() == 0 for grad in grads) is empty
    assert any("gate.weight" in name and value.count_nonzero() for name, value in results.items())


@pytest.mark.slow
@layout
@rank
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_ran_on_every_rank(said, layout, rank, family):
    for routing in ROUTINGS:
        results = of_layout(said, "kernel", layout, rank)
        assert results[family, routing, "bound"] == ({ON_CPU.kernel}, ())
        assert results[family, routing, "misses"] == []


@pytest.mark.slow
@layout
def test_it_trains_as_one_process_and_one_process_loads_its_checkpoint(said, layout):
    trained = of_layout(said, "trained", layout)
    losses, norms = trained["steps"].chunk(2)
    assert losses[-1] < losses[0]
    assert norms.min() > 0.5  # all were clipped
    torch.testing.assert_close(trained["steps"], trained["expected steps"], rtol=1e-5, atol=0)
    torch.testing.assert_close(trained["loaded"], trained["expected"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@newer
@rank
def test_a_stock_model_is_adopted_after_sharding_and_unadopted(said, rank):
    adopted = of_layout(said, "adopted", "data", rank)
    assert_same(adopted["adopted"], adopted["expected"])
    assert adopted["bound"] == ({ON_CPU.kernel}, ())
    assert adopted["misses"] == []
    assert adopted["unchanged"]
    assert_same(adopted["unadopted"], adopted["expected"])


@pytest.mark.slow
def test_a_stock_model_under_tensor_parallelism_is_not_adopted(said):
    """Its norms are wrapped too, and keep upstream's forward."""
    adopted = of_layout(said, "adopted", "tensor")
    assert "has a forward of its own" in adopted["refused"]
    assert "build_foundation_model(path, ops, distributed_config=...)" in adopted["refused"]
    assert adopted["unchanged"]


@pytest.mark.slow
@layout
@rank
def test_what_is_refused(said, layout, rank):
    told = of_layout(said, "refusals", layout, rank)
    assert "moe_experts" in told["another choice"]
    assert "save_pretrained" in told["new weights"]
    assert ("takes no part in the collectives" in told["loop"]) is (layout == "tensor")
    assert told["loop beside a kernel"] == ""


@pytest.mark.slow
@newer
@layout
def test_why_upstreams_loop_is_refused(said, layout):
    """When this fails for the loop, transformers has repaired it, and nothing need be refused any more."""
    first, second = (of_layout(said, "connected", layout, rank) for rank in range(WORLD))
    assert first == {"loop": True, "kernel": True}
    assert second == {"loop": layout == "data", "kernel": True}


@pytest.mark.slow
def test_tritons_experts_in_the_interpreter(tmp_path):
    pytest.importorskip("opslot_backends.triton_moe", reason="opslot-backend-triton-moe is not installed")
    pytest.importorskip("triton", reason="there is no triton for this platform")
    for results in run(tmp_path, ON_CPU, [("triton", layout) for layout in layouts()]):
        for found in results.values():
            for family in ("qwen3_moe", "gpt_oss"):
                assert_same(found[family, "found"], found[family, "expected"])
                assert found[family, "bound"][0] == {"interpreted"}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices")
def test_two_gpus_give_loss_and_gradients_of_one(tmp_path):
    known = opslot.registry()
    try:
        known.choose("moe_experts", "standard", ON_GPU.kernel, known.current_device())
    except OpslotError as error:
        pytest.skip(str(error))
    wanted = [(name, layout) for layout in layouts() for name in ("kernel", "trained")]
    for results in run(tmp_path, ON_GPU, wanted):
        for layout in layouts():
            same = results["kernel", layout]
            for family, routing in itertools.product(FAMILIES, ROUTINGS):
                assert_same(same[family, routing, "found"], same[family, routing, "expected"])
                assert same[family, routing, "bound"] == ({ON_GPU.kernel}, ())
                assert same[family, routing, "misses"] == []
            trained = results["trained", layout]
            torch.testing.assert_close(trained["loaded"], trained["expected"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@newer
def test_the_documented_command_trains(tmp_path):
    """Word for word, with an output beside it."""
    (command,) = set(re.findall(r"torchrun [^`\n]*examples/expert_parallel\.py[^`\n]*", USING.read_text("utf-8")))
    assert f"Run: {command}\n" in EXAMPLE.read_text(encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "--output", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert build_foundation_model(tmp_path, "eager").config.num_experts == 8
