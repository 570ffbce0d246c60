"""torch.compile: no break that stock does not have, one compilation, one more after a rebind, none on the way back."""

import opslot
import pytest
import torch
from opslot import Backend, KernelSpec, Registry
from opslot.ops import BACKEND as CORE
from opslot_models import build_foundation_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# All forms of a guard; what the other families have, these have too.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "phi3", "qwen3_moe"])
def test_the_whole_training_forward_is_one_graph(config, batch, every_kernel):
    """As in stock transformers, unbound and bound; and what is compiled computes the same."""
    plain = config(**router_off(config()))
    frames, results = [], []
    for make in (
        AutoModelForCausalLM.from_config,
        lambda config: build_foundation_model(config, "eager", device="cpu"),
        lambda config: build_foundation_model(config, every_kernel, device="cpu"),
    ):
        torch.manual_seed(0)
        model = make(plain)
        results.append(gradients(model, model(**batch).loss))
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        results.append(gradients(model, compiled(**batch).loss))
        compiled(**batch)
        frames.append(counter.frame_count)
    assert frames == [1, 1, 1]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-6)


# The guards of sparse attention, of streams and of the delta rule, with their references for kernels. Stock Qwen3-Next
# fails in torch 2.13 where autograd is traced.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"), [("deepseek_v4", "aot_eager"), ("glm_moe_dsa", "aot_eager"), ("qwen3_next", "eager")]
)
def test_guards_in_the_middle_of_a_method_are_in_the_graph(config, batch, backend):
    registry = Registry()
    registry.add(CORE, "opslot")
    contracts = [contract for contract in registry.contracts() if contract.op != "moe_experts"]  # whose loop is not
    kernels = [
        KernelSpec(op=contract.op, variant=contract.variant, name="reference", target=contract.load_reference())
        for contract in contracts
    ]
    registry.add(Backend(api=1, kernels=tuple(kernels)), "references")
    model = build_foundation_model(config(**router_off(config())), "eager", device="cpu")
    ops = {contract.config_fields()[0]: "reference" for contract in contracts}
    for choice in ({}, ops):
        opslot.bind(model, {"default": "eager", **choice}, device="cpu", registry=registry)
        expected = gradients(model, model(**batch, use_cache=False).loss)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        torch.testing.assert_close(
            gradients(model, compiled(**batch, use_cache=False).loss), expected, rtol=1e-4, atol=1e-6
        )
        assert counter.frame_count == 1


def router_off(config):
    """Stock transformers breaks the graph where it counts the router's choices."""
    return {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_rebinding_compiles_once_more_and_the_way_back_is_free(config, batch):
    model = build_foundation_model(config(output_router_logits=False), "eager", device="cpu")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for ops in ("eager", "auto", {"rms_norm": "torch", "default": "eager"}, "auto", "eager"):
        opslot.bind(model, ops, device="cpu")
        compiled(**batch)
        compiled(**batch)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_layers_compiled_one_by_one_share_one_graph(config, batch, ops):
    plain = config(num_hidden_layers=6, mlp_only_layers=[], output_router_logits=False)
    model = build_foundation_model(plain, ops, device="cpu")
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        model(**batch, use_cache=False)
    assert counter.frame_count == 1
