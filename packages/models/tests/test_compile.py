"""torch.compile: no break that stock does not have, one compilation, one more after a rebind, none on the way back."""

import opslot
import pytest
import torch
from opslot_models import build_foundation_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen3MoeForCausalLM


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_the_whole_training_forward_is_one_graph(config, batch, ops):
    plain = config(output_router_logits=False)
    counters = []
    for model in (Qwen3MoeForCausalLM(plain), build_foundation_model(plain, ops, device="cpu")):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        compiled(**batch).loss.backward()
        compiled(**batch)
        counters.append(counter.frame_count)
    assert counters == [1, 1]


def test_compiled_equals_eager(config, batch):
    torch.manual_seed(0)
    model = build_foundation_model(config(output_router_logits=False), "auto", device="cpu")
    expected = model(**batch).loss
    expected.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    actual = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).loss
    actual.backward()
    torch.testing.assert_close(actual, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


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
