"""unadopt is the inverse of adopt: classes, instances, attention, and what transformers keys by class."""

import copy

import opslot
import pytest
import torch
from opslot import BindError
from opslot_models import adopt, build_foundation_model, families, unadopt
from peft import LoraConfig, get_peft_model
from transformers import Gemma3ForConditionalGeneration
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())


def state(model):
    """What adopting may change: every class, what every instance holds, the attention of every tower."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    attention = [config._attn_implementation for config in configs]
    return [(type(module), dict(vars(module))) for module in model.modules()], attention


def same(actual, expected):
    for field in {"loss", "logits", "aux_loss"} & set(expected):
        assert torch.equal(actual[field], expected[field])
    for field in {"hidden_states", "router_logits"} & set(expected):
        assert len(actual[field]) == len(expected[field])


@every_family
def test_the_way_back_is_exact(config, batch, every_kernel, deterministic):
    expected = stock(config())
    model = copy.deepcopy(expected)
    before = state(model)
    adoption = adopt(model, {**every_kernel, "attn_implementation": "eager"}, device="cpu")
    assert model.config._attn_implementation == "eager"
    assert unadopt(model) == adoption.swapped
    assert state(model) == before
    assert {type(module).__module__.partition(".")[0] for module in model.modules()} == {"torch", "transformers"}
    same(model(**batch, output_hidden_states=True), expected(**batch, output_hidden_states=True))
    model(**batch).loss.backward()
    expected(**batch).loss.backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_after_training_steps_the_weights_are_the_trained_ones(config, batch, every_kernel):
    model = stock(config())
    adopt(model, every_kernel, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    unadopt(model)
    fresh = stock(config())
    fresh.load_state_dict(weights)
    same(model(**batch), fresh(**batch))
    assert model(**batch).logits is not None


def test_under_peft(config, batch, every_kernel):
    models = []
    for _ in range(2):
        model = stock(config())
        torch.manual_seed(1)
        models.append(get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)))
    before = state(models[1])
    adopt(models[1], {**every_kernel, "attn_implementation": "eager"}, device="cpu")
    assert state(models[1]) != before
    unadopt(models[1])
    assert state(models[1]) == before
    same(models[1](**batch), models[0](**batch))


def test_the_binding_that_is_left_says_so_and_does_no_harm(config):
    model = stock(config())
    binding = adopt(model, {"rms_norm": "torch", "default": "eager"}, device="cpu").binding
    before = state(model)
    unadopt(model)
    assert all("the class of the module was changed after bind" in problem for problem in binding.verify())
    assert len(binding.verify()) == len(binding.rows)
    binding.unbind()
    adopt(model, {"rms_norm": "torch", "default": "eager"}, device="cpu")
    assert [cls for cls, _ in state(model)[0]] == [cls for cls, _ in before[0]]


def test_a_built_model_becomes_stock(config, batch):
    model = build_foundation_model(config(), "auto", device="cpu")
    expected = stock(config())
    recorded = _CAN_RECORD_REGISTRY.pop(str(type(expected.model)))  # as if no stock model was ever built
    unadopt(model)
    assert dict(_CAN_RECORD_REGISTRY)[str(type(model.model))] == recorded
    assert type(model) is type(expected)
    assert not hasattr(model, "opslot_binding")
    out = model(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert len(out.router_logits) == 2


def test_a_slot_that_a_users_module_made_itself_stays_and_is_empty(config):
    model = stock(config())
    model.extra = torch.nn.Module()
    model.extra.norm_op = opslot.OpSlot("rms_norm")
    adopt(model, {"rms_norm": "torch"}, device="cpu")
    assert model.extra.norm_op.kernel is not None
    unadopt(model)
    assert model.extra.norm_op.kernel is None


def test_the_attention_of_each_tower_comes_back_unless_someone_else_chose_since(images):
    config, _ = images
    config.vision_config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config)
    towers = config, config.text_config, config.vision_config
    before = [tower._attn_implementation for tower in towers]
    assert before == ["sdpa", "sdpa", "eager"]
    adopt(model, {"attn_implementation": "eager"}, device="cpu")
    adopt(model, {"attn_implementation": "flex_attention"}, device="cpu")
    assert {tower._attn_implementation for tower in towers} == {"flex_attention"}
    copied = copy.deepcopy(model)
    unadopt(model)
    assert [tower._attn_implementation for tower in towers] == before
    copied.config.vision_config._attn_implementation = "sdpa"
    unadopt(copied)
    assert copied.config.text_config._attn_implementation == "sdpa"
    assert copied.config.vision_config._attn_implementation == "sdpa"


def test_what_was_never_adopted_is_an_error(config):
    model = stock(config())
    with pytest.raises(BindError, match="Qwen3MoeForCausalLM has no module of a generated class: it was not adopted"):
        unadopt(model)
    adopt(model, "auto", device="cpu")
    unadopt(model)
    with pytest.raises(BindError, match="or is stock again"):
        unadopt(model)


def replaced_forward(model):
    norm = model.model.layers[1].input_layernorm
    norm.forward = norm.forward


def parametrised(model):
    torch.nn.utils.parametrize.register_parametrization(model.model.norm, "weight", torch.nn.Identity())


def stale(model):
    model.model.norm.__class__ = type(
        "Qwen3MoeRMSNorm", (type(model.model.norm),), {"__module__": type(model).__module__}
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replaced_forward, r"model\.layers\.1\.input_layernorm has a forward of its own .* undo what set it"),
        (parametrised, r"model\.norm is parametrised, .*remove_parametrizations\(\.\.\.\) first"),
        (stale, r"model\.norm has the generated class Qwen3MoeRMSNorm, and upstream's class of that name is not its"),
    ],
)
def test_where_upstreams_code_would_not_run_nothing_changes(config, change, problem):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    change(model)
    before = state(model)
    with pytest.raises(BindError, match=problem):
        unadopt(model)
    assert state(model) == before


def test_not_during_backward(config, batch):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    problems = []

    def hook(grad):
        try:
            unadopt(model)
        except BindError as error:
            problems.append(str(error))

    model.model.norm.weight.register_hook(hook)
    model(**batch).loss.backward()
    assert problems == ["a model cannot be unadopted during backward, where activations may be recomputed"]


def test_a_subclass_of_a_generated_class_keeps_its_class_without_kernels(config):
    model = build_foundation_model(config(), "auto", device="cpu")
    mine = type("Mine", (type(model),), {})
    model.__class__ = mine
    unadopt(model)
    assert type(model) is mine
    assert type(model.model).__module__.startswith("transformers.")
    assert model.load_balancing_loss_op.kernel is None


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_runs_stock_code_afterwards(config, batch, in_place):
    torch._dynamo.reset()
    plain = config(output_router_logits=False)
    expected, model = stock(plain), stock(plain)
    adopt(model, {"cross_entropy_loss": "chunk_loss", "rms_norm": "torch", "default": "eager"}, device="cpu")
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    assert compiled(**batch).logits is None
    unadopt(model)
    same(compiled(**batch), expected(**batch))
    torch._dynamo.reset()


def test_nothing_is_left_of_states_for_a_drafter(config, batch):
    model = stock(config(output_router_logits=False))
    adopt(model, "eager", device="cpu")
    for one in (model, model.model):
        one.set_aux_hidden_state_layers([1])
    unadopt(model)
    assert not hasattr(model(**batch), "aux_hidden_states")
    assert not any("_aux_hidden_state_hooks" in vars(module) for module in model.modules())


def test_kernels_are_not_put_back_into_a_stock_model(config):
    model = stock(config())
    binding = adopt(model, "auto", device="cpu").binding
    unadopt(model)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(
        BindError, match="the class of the module was changed after bind and has no such slot: bind or adopt"
    ):
        binding.apply()
    assert [dict(vars(module)) for module in model.modules()] == before
    adopt(model, "eager", device="cpu")
    binding.apply()
    assert binding.verify() == ()
