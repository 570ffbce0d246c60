"""All-eager is upstream, bit for bit; and each slot is reached with arguments that fit its contract."""

import inspect

import opslot
import pytest
import torch
import transformers
from opslot import Backend, KernelSpec, Registry
from opslot.ops import BACKEND as CORE
from opslot_models import build_foundation_model

HEADS = {
    "Qwen3MoeForCausalLM": {},
    "Qwen3MoeForSequenceClassification": {"labels": torch.tensor([0, 1])},
    "Qwen3MoeForTokenClassification": {"labels": torch.arange(34).view(2, 17) % 2},
    "Qwen3MoeForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
}


def both(config, architecture="Qwen3MoeForCausalLM", ops="eager"):
    """The same model from upstream's class and from ours."""
    torch.manual_seed(0)
    upstream = getattr(transformers, architecture)._from_config(config)
    torch.manual_seed(0)
    return upstream, build_foundation_model(config, ops, architecture=architecture, device="cpu")


def plain(value):
    """A field of an output as tensors: a key-value cache as its keys and values."""
    return [(layer.keys, layer.values) for layer in value.layers] if hasattr(value, "layers") else value


def assert_equal(one, other, batch):
    """Initialisation, outputs field by field and every gradient."""
    for (name, expected), (ours, actual) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == ours
        assert torch.equal(expected, actual), name
    torch.manual_seed(2)  # the token classification head has a dropout
    expected = one(**batch)
    torch.manual_seed(2)
    actual = other(**batch)
    assert list(expected) == list(actual)
    for field in expected:
        torch.testing.assert_close(plain(actual[field]), plain(expected[field]), rtol=0, atol=0, msg=field)
    expected.loss.backward()
    actual.loss.backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_eager_is_upstream(config, batch, deterministic, experts, dtype):
    upstream, ours = both(config(experts_implementation=experts, dtype=dtype))
    again, _ = both(config(experts_implementation=experts, dtype=dtype))
    assert ours.config._experts_implementation == experts
    assert_equal(upstream.to(dtype), again.to(dtype), batch)  # else there is nothing to be equal to
    upstream.zero_grad()
    assert_equal(upstream, ours.to(dtype), batch)


@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_is_upstream_and_has_slots(config, batch, deterministic, architecture):
    del batch["labels"]
    upstream, ours = both(config(num_labels=2), architecture)
    batch |= HEADS[architecture] or {"labels": batch["input_ids"]}
    assert_equal(upstream, ours, batch)
    slots = {row.op for row in ours.opslot_binding.rows}
    assert {"rms_norm", "rotary_pos_emb", "glu", "moe_experts"} <= slots
    assert {type(module).__module__.split(".")[0] for module in ours.modules()} <= {
        "torch",
        "opslot_models",
        "transformers",
    }
    left = [type(m).__name__ for m in ours.modules() if type(m).__module__.startswith("transformers.models.")]
    assert left == []


class Recorder:
    """A kernel that computes the reference and keeps what it was called with."""

    def __init__(self, contract):
        self.contract, self.calls = contract, []
        self.__signature__ = contract.signature()

    def __call__(self, *args, **kwargs):
        arguments = self.__signature__.bind(*args, **kwargs)
        self.calls.append(arguments.arguments)
        return self.contract.load_reference()(*args, **kwargs)


@pytest.fixture
def recorded():
    registry = Registry()
    registry.add(CORE, "opslot")
    recorders = {contract.key: Recorder(contract) for contract in registry.contracts()}
    kernels = tuple(KernelSpec(op=op, variant=v, name="recorder", target=r) for (op, v), r in recorders.items())
    registry.add(Backend(api=1, kernels=kernels), "recorders")
    return registry, recorders


def test_every_slot_is_reached_and_the_numbers_agree(config, batch, deterministic, recorded):
    registry, recorders = recorded
    # One softmax in the references of bf16 would round otherwise; float32 agrees to a few ulps.
    upstream, ours = both(config(experts_implementation="eager"))
    names = {contract.config_fields()[0]: "recorder" for contract in registry.contracts()}
    opslot.bind(ours, names, device="cpu", registry=registry)
    expected, actual = upstream(**batch), ours(**batch)
    assert actual.logits is None
    assert {op for (op, _), recorder in recorders.items() if not recorder.calls} == set()
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    expected.loss.backward()
    actual.loss.backward()
    for (name, a), b in zip(upstream.named_parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
    experts = recorders["moe_experts", "standard"].calls[0]
    assert [tuple(tensor.shape) for tensor in experts.values()] == [
        (34, 64),
        (34, 2),
        (34, 2),
        (6, 64, 64),
        (6, 64, 32),
    ]
    router_logits = recorders["load_balancing_loss", "standard"].calls[0]["gate_logits"]
    assert [tuple(tensor.shape) for tensor in router_logits] == [(34, 6)] * 2


def test_the_loss_receives_what_the_trainer_passes(config, batch, recorded):
    registry, recorders = recorded
    _, ours = both(config())
    opslot.bind(ours, {"cross_entropy_loss": "recorder"}, device="cpu", registry=registry)
    ours(**batch, num_items_in_batch=torch.tensor(7), shift_labels=batch["labels"])
    (call,) = recorders["cross_entropy_loss", "causal"].calls
    assert call["num_items_in_batch"] == 7
    assert call["ignore_index"] == -100
    assert torch.equal(call["shift_labels"], batch["labels"])


def test_logits_are_there_wherever_no_gradient_is_recorded(config, batch, recorded):
    registry, recorders = recorded
    upstream, ours = both(config())
    opslot.bind(ours, {"cross_entropy_loss": "recorder"}, device="cpu", registry=registry)
    with torch.no_grad():
        expected, actual = upstream(**batch), ours(**batch)
    assert torch.equal(expected.logits, actual.logits)
    assert torch.equal(expected.loss, actual.loss)
    assert recorders["cross_entropy_loss", "causal"].calls == []
    del batch["labels"]
    assert ours(**batch).logits is not None


def test_generate_and_gradient_checkpointing(config, batch, deterministic):
    upstream, ours = both(config(), ops="auto")
    tokens = batch["input_ids"][:1, :8]
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(upstream.generate(tokens, **arguments), ours.generate(tokens, **arguments))

    plain = ours(**batch).loss
    ours.gradient_checkpointing_enable()
    ours.train()
    checkpointed = ours(**batch).loss
    torch.testing.assert_close(checkpointed, plain)
    checkpointed.backward()
    assert all(p.grad is not None for n, p in ours.named_parameters() if "norm" in n)


def test_signatures_are_upstreams(config):
    upstream, ours = both(config())
    assert inspect.signature(type(ours).forward) == inspect.signature(type(upstream).forward)
    assert type(ours).__name__ == type(upstream).__name__
    assert not ours.is_custom_code()
