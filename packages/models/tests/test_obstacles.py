"""What a kernel would bypass or misread is refused by name: at bind, and at the call when it came after bind."""

import opslot
import pytest
import torch
from opslot import BindError
from opslot_models import adopt, build_foundation_model, families
from peft import LoraConfig, get_peft_model
from torch.nn.utils import parametrize

from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())
FUSED_LOSS = {"cross_entropy_loss": "chunk_loss", "default": "eager"}
EXPERTS = {"moe_experts": "torch", "default": "eager"}


def row_of(binding, op):
    (row,) = [row for row in binding.rows if row.op == op]
    return row


def router_off(config):
    """So that the loss is what the loss function gives and nothing is added."""
    return {"output_router_logits": False} if hasattr(config.get_text_config(), "output_router_logits") else {}


def own_loss(logits, labels, vocab_size, **kwargs):
    return logits.sum()


@every_family
def test_a_loss_function_of_the_users_is_not_bypassed(config, batch):
    model = stock(config(**router_off(config())))
    model.loss_function = own_loss
    with pytest.raises(BindError, match=r"its loss_function is 'own_loss', which a fused loss would bypass"):
        adopt(model, FUSED_LOSS, device="cpu")
    row = row_of(adopt(model, "auto", device="cpu").binding, "cross_entropy_loss")
    assert row.kernel == "eager"
    assert "loss_function" in row.reason
    out = model(**batch)
    assert torch.equal(out.loss, out.logits.sum())


@every_family
def test_a_loss_function_that_is_set_after_bind_runs_and_is_noticed(config, batch):
    model = stock(config(**router_off(config())))
    binding = adopt(model, FUSED_LOSS, device="cpu").binding
    assert model(**batch).logits is None
    model.loss_function = own_loss
    out = model(**batch)
    assert torch.equal(out.loss, out.logits.sum())
    assert "its loss_function is 'own_loss'" in binding.verify()[0]


class Quantised(torch.nn.Linear):
    """As bitsandbytes does it: a subclass of Linear that reads its weight in its own way."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * 2)


class QuantisedTensor(torch.Tensor):
    """As torchao does it: a parameter whose memory is not its values."""


def packed(weight):
    """An integer parameter, as most libraries store theirs."""
    return torch.nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


def quantised_layer(model):
    model.lm_head = Quantised(64, 96, bias=False)


def quantised_tensor(model):
    weight = model.lm_head.weight.detach().as_subclass(QuantisedTensor)
    model.lm_head.weight = torch.nn.Parameter(weight)
    assert type(model.lm_head.weight) is QuantisedTensor


def packed_weight(model):
    model.lm_head.weight = packed(model.lm_head.weight)


HEADS = {
    "hook": (lambda model: model.lm_head.register_forward_hook(lambda *args: None), "has hooks"),
    "bias": (lambda model: setattr(model.lm_head, "bias", torch.nn.Parameter(torch.zeros(96))), "has a bias"),
    "LoRA": (lambda model: get_peft_model(model, LoraConfig(target_modules=["lm_head"])), "is not a plain nn.Linear"),
    "quantised layer": (quantised_layer, "is not a plain nn.Linear"),
    "quantised tensor": (quantised_tensor, "has a weight of type QuantisedTensor"),
    "packed weight": (packed_weight, "has a weight of torch.int8"),
}


@every_family
@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_does_more_than_its_weight_says_gets_no_fused_loss(config, batch, case):
    change, problem = HEADS[case]
    model = stock(config(tie_word_embeddings=False))
    change(model)
    with pytest.raises(BindError, match=f"{type(model).__name__} cannot use kernel 'chunk_loss'.*its head {problem}"):
        adopt(model, FUSED_LOSS, device="cpu")
    binding = adopt(model, {"default": "eager", "cross_entropy_loss": "auto"}, device="cpu").binding
    row = row_of(binding, "cross_entropy_loss")
    assert row.kernel == "eager"
    assert problem in row.reason
    if case != "packed weight":  # for which there is no forward
        assert model(**batch).logits is not None


@every_family
@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_is_changed_after_bind_is_refused_at_the_first_call(config, batch, case):
    change, problem = HEADS[case]
    model = stock(config(tie_word_embeddings=False))
    binding = adopt(model, FUSED_LOSS, device="cpu").binding
    change(model)
    with pytest.raises(BindError, match=rf"{type(model).__name__}\.cross_entropy_loss_op: .*{problem}"):
        model(**batch)
    assert any(problem in found for found in binding.verify())


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


@every_family
def test_a_parametrised_head_is_read_as_what_the_parametrisation_gives(config, batch, deterministic):
    models = [stock(config(tie_word_embeddings=False)) for _ in range(2)]
    adopt(models[1], FUSED_LOSS, device="cpu")
    losses = []
    for model in models:
        parametrize.register_parametrization(model.lm_head, "weight", Doubled())
        losses.append(model(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    expected, actual = (model.lm_head.parametrizations.weight.original.grad for model in models)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adopt_first", [True, False])
def test_lora_on_the_weights_of_experts_is_in_what_the_kernel_reads(config, batch, deterministic, adopt_first):
    lora = LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    models = []
    for ours in (False, True):
        model = stock(config())
        if ours and adopt_first:
            adopt(model, EXPERTS, device="cpu")
        torch.manual_seed(1)
        model = get_peft_model(model, lora)
        if ours and not adopt_first:
            adopt(model, EXPERTS, device="cpu")
        models.append(model)
    with torch.no_grad(), models[1].disable_adapter():
        base = models[1](**batch).loss
    expected, actual = (model(**batch).loss for model in models)
    torch.testing.assert_close(actual, expected)
    assert (actual - base).abs() > 1e-4  # else there is no adapter to lose
    expected.backward()
    actual.backward()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    gradients = {name: (a.grad, b.grad) for (name, a), b in pairs if a.requires_grad}
    assert sum("experts" in name for name in gradients) == 8
    for name, (a, b) in gradients.items():
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-6, msg=name)


def quantise_experts(model, how):
    experts = model.model.layers[2].mlp.experts
    if how == "tensor":
        experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().as_subclass(QuantisedTensor))
    else:
        experts.down_proj = packed(experts.down_proj)


EXPERT_WEIGHTS = {"tensor": "of type QuantisedTensor", "packed": "of torch.int8"}


@pytest.mark.parametrize("how", EXPERT_WEIGHTS)
def test_quantised_experts_are_refused_by_name(config, how):
    model = stock(config())
    quantise_experts(model, how)
    name = r"model\.layers\.2\.mlp\.experts"
    with pytest.raises(BindError, match=rf"{name} cannot use kernel 'torch'.*its down_proj is {EXPERT_WEIGHTS[how]}"):
        adopt(model, EXPERTS, device="cpu")


@pytest.mark.parametrize("how", EXPERT_WEIGHTS)
def test_experts_that_are_quantised_after_bind_are_refused_at_the_first_call(config, batch, how):
    model = stock(config())
    binding = adopt(model, EXPERTS, device="cpu").binding
    quantise_experts(model, how)
    problem = rf"Qwen3MoeExperts\.moe_experts_op would read down_proj, which is {EXPERT_WEIGHTS[how]}"
    with pytest.raises(BindError, match=problem):
        model(**batch)
    assert "model.layers.2.mlp.experts" in binding.verify()[0]


def kernelize(model, mode=None):
    """What the kernels package does to a model, as far as it matters here: it replaces forwards of instances."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda hidden_states: hidden_states
    model._use_kernels = True


@pytest.fixture
def hub_kernels(monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.register_kernel_mapping_transformers", lambda: None)
    monkeypatch.setattr("transformers.modeling_utils.kernelize", kernelize)


@every_family
def test_use_kernels_is_refused_when_building_and_when_adopting(config, tmp_path, hub_kernels):
    model = stock(config())
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path, use_kernels=True).use_kernels  # the stand-in works
    with pytest.raises(BindError, match=f"use_kernels would replace forwards inside {type(model).__name__}"):
        build_foundation_model(tmp_path, "auto", use_kernels=True, device="cpu")
    model.set_use_kernels(True)
    with pytest.raises(BindError, match=f"{type(model).__name__} runs under use_kernels"):
        adopt(model, "eager", device="cpu")
    assert type(model).__module__.startswith("transformers.")


@every_family
def test_use_kernels_is_refused_after_bind(config, batch, hub_kernels):
    for model in (build_foundation_model(config(), "auto", device="cpu"), stock(config())):
        adopt(model, "auto", device="cpu")
        with pytest.raises(BindError, match="use_kernels would replace forwards"):
            model.use_kernels = True
        assert not model.use_kernels
        model.set_use_kernels(False)
        model.train().eval()
        assert torch.isfinite(model(**batch).loss)


# Upstream marks no norm of Gemma for the hub's kernels; in the others it is the same class under other names.
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_a_forward_replaced_behind_the_models_back_is_named(config):
    """Calling kernelize itself passes the model by; the next bind refuses it, and `verify` names every module."""
    model = build_foundation_model(config(), {"rms_norm": "torch", "default": "eager"}, device="cpu")
    binding = model.opslot_binding
    kernelize(model)
    norms = [row.module for row in binding.rows if row.op == "rms_norm"]
    problems = binding.verify()
    assert len(problems) == len(norms)
    for name, problem in zip(norms, problems, strict=True):
        assert problem.startswith(f"{name} (rms_norm/standard -> torch): its forward was replaced by")
    with pytest.raises(BindError, match=r"model\.layers\.0.*norm cannot use kernel 'torch'.*its forward was replaced"):
        opslot.bind(model, {"rms_norm": "torch"}, device="cpu")
    again = opslot.bind(model, "auto", device="cpu")
    assert {row.kernel for row in again.rows if row.op == "rms_norm"} == {"eager"}


@pytest.mark.parametrize(
    ("family", "activation"), [("llama", "act_fn"), ("qwen3_moe", "act_fn"), ("phi3", "activation_fn")]
)
def test_an_activation_with_hooks_is_refused_and_one_that_changes_is_named(config, batch, activation):
    """A kernel computes the activation itself: hooks on the module would never run."""
    model = stock(config())
    owner = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    handle = getattr(owner, activation).register_forward_hook(lambda *args: None)
    with pytest.raises(BindError, match=f"its {activation} has hooks, which no kernel would run"):
        adopt(model, {"glu": "torch", "default": "eager"}, device="cpu")
    handle.remove()
    binding = adopt(model, {"glu": "torch", "default": "eager"}, device="cpu").binding
    setattr(owner, activation, torch.nn.GELU())
    with binding.proof() as proof:
        model(**batch).loss.backward()
    (miss,) = proof.misses()
    assert "its activation GELU" in miss.reason
    assert binding.verify() == (str(miss),)
