import copy
import subprocess
import sys
import types

import opslot
import pytest
import torch
from opslot import BindError
from opslot_models import Left, adopt, families
from opslot_models import adoption as adoption_module
from opslot_models._families import twins
from transformers import (
    Gemma3ForConditionalGeneration,
    Qwen3MoeForCausalLM,
    SiglipVisionModel,
    Trainer,
    TrainingArguments,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())


@every_family
def test_an_adopted_model_is_the_model_that_it_was(config, batch, deterministic):
    expected_model = stock(config())
    model = copy.deepcopy(expected_model)
    adoption = adopt(model, "eager", device="cpu")
    assert adoption.left == ()
    assert len(adoption.swapped) == sum("transformers.models" in type(m).__module__ for m in expected_model.modules())
    expected, actual = expected_model(**batch), model(**batch)
    for field in {"loss", "logits", "aux_loss"} & set(expected):
        assert torch.equal(expected[field], actual[field])
    assert list(model.state_dict()) == list(expected_model.state_dict())


FRESH = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
for family in ("gemma2", "llama", "mixtral", "qwen3_moe"):
    config = AutoConfig.for_model(family, vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    if hasattr(config, "num_experts"):
        config.num_experts, config.moe_intermediate_size = 6, 32
        config.num_experts_per_tok, config.output_router_logits = 2, True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(20).view(2, 10)
    {before}
    from opslot_models import adopt
    adopt(model, {ops!r}, device="cpu")
    out = model(tokens, labels=tokens, output_hidden_states=True)
    assert out.loss.isfinite()
    router = (len(out.router_logits), bool(1.9 < out.aux_loss < 2.5)) if "aux_loss" in out else ()
    print(family, len(out.hidden_states), *router)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "ops"), [("", "auto"), ("model(tokens, labels=tokens)", "eager")])
def test_what_a_model_records_in_a_process_that_never_built_a_generated_one(before, ops):
    """transformers finds what to record by class, in a registry that only its own __init__ fills."""
    code = FRESH.format(before=before, ops=ops)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["gemma2 3", "llama 3", "mixtral 3 2 True", "qwen3_moe 3 2 True"]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_what_is_recorded_by_class_is_known_for_the_class_that_a_module_gets(config, batch):
    model = stock(config())
    ours = {str(cls) for cls in twins(model.config.model_type).values()}
    for name in ours & _CAN_RECORD_REGISTRY.keys():
        _CAN_RECORD_REGISTRY.pop(name)  # as if no generated model was ever built
    adopt(model, "eager", device="cpu")
    out = model(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    if "router_logits" in stock(config())(**batch):
        assert out.router_logits


def test_adopting_again_only_binds_again(config):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    again = adopt(model, "eager", device="cpu")
    assert again.swapped == ()
    assert {row.kernel for row in again.binding.rows} == {"eager"}


def test_a_model_without_a_generated_family_is_an_error():
    with pytest.raises(BindError, match=f"no module of a generated family; there are: {', '.join(families())}"):
        adopt(torch.nn.Linear(2, 2))


def test_a_forward_set_before_is_refused_by_name_and_nothing_is_swapped(config):
    model = stock(config())
    norm = model.model.layers[1].input_layernorm
    norm.forward = norm.forward
    with pytest.raises(BindError, match=r"model\.layers\.1\.input_layernorm has a forward of its own"):
        adopt(model)
    assert {type(m).__module__.split(".")[0] for m in model.modules()} == {"torch", "transformers"}


class Plain(Qwen3MoeForCausalLM):
    def helper(self):
        return 1


class Overriding(Qwen3MoeForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


OWN_CODE = "a class derived from Qwen3MoeForCausalLM keeps its own code, and so has no slots for "
LOSSES = "cross_entropy_loss, load_balancing_loss"


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Plain, OWN_CODE + LOSSES),
        (Overriding, f"it overrides forward of Qwen3MoeForCausalLM, where a kernel of {LOSSES} would run"),
    ],
)
def test_a_users_subclass_keeps_its_class_and_is_named_with_the_reason(config, batch, cls, reason):
    torch.manual_seed(0)
    model = cls(config())
    adoption = adopt(model, device="cpu")
    assert type(model) is cls
    assert adoption.left == (Left("", cls.__name__, reason),)
    assert f"left as they are, without slots:\n    the model ({cls.__name__}): {reason}" in str(adoption)
    assert not {"cross_entropy_loss", "load_balancing_loss"} & {row.op for row in adoption.binding.rows}
    torch.testing.assert_close(model(**batch).loss, stock(config())(**batch).loss)


def derived(module, *overridden):
    """Give a module a class of a user's that derives from its own."""
    module.__class__ = type("Mine", (type(module),), {name: lambda self, *args: None for name in overridden})


def test_reasons_tell_where_a_users_code_stands_in_the_way(config):
    model = stock(config())
    layers = model.model.layers
    derived(layers[0])
    derived(layers[0].mlp.experts, "forward")
    derived(layers[1].mlp, "forward")
    derived(layers[2].self_attn.q_norm, "extra_repr")
    reasons = {one.name: one.reason for one in adopt(model, "eager", device="cpu").left}
    own = "a class derived from Qwen3Moe{} keeps its own code"
    overrides = "it overrides forward of Qwen3Moe{}, where a kernel of {} would run"
    assert reasons == {
        "model.layers.0": own.format("DecoderLayer") + "; there is no slot in that class",
        "model.layers.0.mlp.experts": overrides.format("Experts", "moe_experts"),
        "model.layers.1.mlp": overrides.format("MLP", "glu"),
        "model.layers.2.self_attn.q_norm": own.format("RMSNorm") + ", and so has no slots for rms_norm",
    }


def remote(cls):
    """A class as transformers makes one of a checkpoint's own code."""
    return type(cls.__name__, (cls,), {"__module__": "transformers_modules.acme.model.modeling_acme"})


def test_code_of_a_checkpoint_is_left_and_alone_it_is_refused(config):
    model = stock(config())
    model.__class__ = remote(Qwen3MoeForCausalLM)
    reason = "the code of the checkpoint (trust_remote_code) runs, of which nothing is generated"
    assert adopt(model, device="cpu").left == (Left("", "Qwen3MoeForCausalLM", reason),)
    alone = torch.nn.Sequential(remote(torch.nn.Linear)(2, 2))
    with pytest.raises(BindError, match=r"no module of a generated family; .*\. 0 \(Linear\): the code of the checkp"):
        adopt(alone)


def test_a_class_that_something_put_into_upstreams_file_is_left(config, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as upstream

    extra = type("Extra", (torch.nn.Module,), {"__module__": upstream.__name__})
    model = stock(config())
    model.extra = extra()
    (left,) = adopt(model, "eager", device="cpu").left
    assert left == Left("extra", "Extra", "the generated module has no class for Extra as it is here")


def test_images_and_text_in_one_model(images, deterministic):
    """The text model and the projector get slots; SigLIP, which is not generated, is listed in one line."""
    config, batch = images
    torch.manual_seed(0)
    expected = Gemma3ForConditionalGeneration(config)
    model = copy.deepcopy(expected)
    adoption = adopt(model, "eager", device="cpu")
    tower = [one for one in adoption.left if not one.name.startswith("model.vision_tower")]
    assert tower == []
    assert {one.reason for one in adoption.left} == {"no family siglip is generated"}
    more = len(adoption.left) - 1
    line = f"    model.vision_tower (SiglipVisionModel) and {more} more: no family siglip is generated"
    assert str(adoption).splitlines()[-1] == line
    named = {name for name, module in expected.named_modules() if "siglip" in type(module).__module__}
    assert {one.name for one in adoption.left} == named
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 90, -100)
    for one in (expected, model):
        one(**batch, labels=labels).loss.backward()
    assert torch.equal(model(**batch).logits, expected(**batch).logits)
    for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    adopt(model, {"cross_entropy_loss": "chunk_loss", "default": "eager"}, device="cpu")
    loss = model(**batch, labels=labels).loss
    torch.testing.assert_close(loss, expected(**batch, labels=labels).loss, rtol=1e-5, atol=1e-6)


def state(model):
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    attention = [(id(config), config._attn_implementation) for config in configs]
    return [(type(module), dict(vars(module))) for module in model.modules()], attention


@pytest.mark.parametrize("place", ["the last swap", "the attention of the last tower", "the bind"])
def test_a_failure_in_one_tower_takes_everything_back(images, monkeypatch, place):
    config, _ = images
    config.vision_config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config)
    model.second = Gemma3ForConditionalGeneration(copy.deepcopy(config))
    before = state(model)
    ops = {"default": "auto", "attn_implementation": "flex_attention"}
    if place == "the last swap":
        do = adoption_module.Swap.do

        def fail(swap):
            do(swap)
            if swap.name == "second.model.language_model.rotary_emb":
                raise RuntimeError("planted")

        monkeypatch.setattr(adoption_module.Swap, "do", fail)
    elif place == "the attention of the last tower":

        def refuse(self, *args, **kwargs):
            raise RuntimeError("planted")

        monkeypatch.setattr(SiglipVisionModel, "get_correct_attn_implementation", refuse)
    else:
        model.second.lm_head.register_forward_hook(lambda *args: None)
        before = state(model)
        ops["cross_entropy_loss"] = "chunk_loss"
    with pytest.raises((RuntimeError, BindError), match=r"planted|second cannot use kernel .* its head has hooks"):
        adopt(model, ops, device="cpu")
    assert state(model) == before
    monkeypatch.undo()
    adopt(model, "eager", device="cpu")


class OtherNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x * (1 + self.weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Qwen3MoeRMSNorm.forward", lambda self, hidden_states: hidden_states),
        ("apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)),
        ("Qwen3MoeRMSNorm", OtherNorm),
        ("Qwen3MoeRMSNorm.extra_repr", lambda self: ""),
        ("Qwen3MoeRMSNorm.__call__", lambda self, hidden_states: hidden_states),
        ("Qwen3MoeForCausalLM.generate", lambda self, *args, **kwargs: None),
        ("Qwen3MoeModel.extra", property(lambda self: None)),
        ("create_causal_mask", lambda *args, **kwargs: None),
        ("Cache", OtherNorm),
    ],
)
def test_a_patch_of_upstreams_module_is_not_silently_undone(config, monkeypatch, name, value):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as upstream

    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(getattr(upstream, owner) if owner else upstream, attribute, value, raising=False)
    model = stock(config())
    with pytest.raises(BindError, match=f"is patched \\({name}\\), and the generated classes would silently run"):
        adopt(model)
    other = torch.nn.Sequential(OtherNorm(4))
    with pytest.raises(BindError, match="no module of a generated family"):
        adopt(other)
    assert type(other[0]) is OtherNorm


@pytest.mark.parametrize(
    "ops",
    [
        {"rms_norm": "typo"},
        {"attn_implementation": "eager", "rms_norm": "typo"},
        {"attn_implementation": "eager", "glu": "torch"},
        {"attn_implementation": "no such attention"},
    ],
)
def test_after_an_error_the_model_is_as_it_was(config, ops):
    model = stock(config(hidden_act="gelu"))  # so that binding glu fails, after all names were found right
    before = [(type(module), dict(vars(module))) for module in model.modules()], model.config._attn_implementation
    with pytest.raises(ValueError):  # noqa: PT011  # ours, and transformers' for an attention it does not know
        adopt(model, ops, device="cpu")
    after = [(type(module), dict(vars(module))) for module in model.modules()], model.config._attn_implementation
    assert after == before


@pytest.mark.parametrize(
    ("family", "op"),
    [
        *((family, "glu") for family in ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")),
        *((family, "moe_experts") for family in ("mixtral", "olmoe", "qwen3_moe")),
    ],
)
def test_another_activation_is_refused(config, op):
    model = stock(config(hidden_act="gelu"))
    problem = rf"model\.layers\.\d\.mlp.* cannot use kernel 'torch' for {op}/.*: its activation GELU"
    with pytest.raises(BindError, match=problem):
        adopt(model, {op: "torch"}, device="cpu")


@every_family
@pytest.mark.parametrize("adopt_first", [True, False])
def test_peft(config, batch, adopt_first):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        target_modules=r".*self_attn\.(q_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj)", init_lora_weights=False
    )
    models = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = stock(config())
        if ours and adopt_first:
            adopt(model, "auto", device="cpu")
        torch.manual_seed(1)
        model = get_peft_model(model, lora)
        if ours and not adopt_first:
            adopt(model, "auto", device="cpu")
        models.append(model)
    expected, actual = (model(**batch).loss for model in models)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    actual.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-6, msg=name)


class Rows(torch.utils.data.Dataset):
    """Sequences with unequal numbers of labels, so that a mean of means would differ."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(1, 17) * (index + 3) % 90 + 1
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(16) > 2 + index, -100)}


def losses(model, folder, accumulation):
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Rows(),
    )
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@every_family
def test_trainer_with_gradient_accumulation(config, tmp_path):
    runs = {}
    for name, ops, accumulation in (
        ("stock", None, 2),
        ("eager", "eager", 2),
        ("auto", "auto", 2),
        ("whole", "auto", 1),
    ):
        model = stock(config(output_router_logits=False))
        if ops is not None:
            adopt(model, ops, device="cpu")
        runs[name] = losses(model, tmp_path, accumulation)
    assert torch.equal(runs["eager"], runs["stock"])
    torch.testing.assert_close(runs["auto"], runs["stock"], rtol=1e-4, atol=1e-4)
    if getattr(model, "accepts_loss_kwargs", True):  # else Trainer takes a mean of means
        torch.testing.assert_close(runs["auto"], runs["whole"], rtol=1e-3, atol=1e-3)


@every_family
def test_an_adopted_model_saves_what_stock_loads(config, tmp_path, batch):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    model.save_pretrained(tmp_path)
    loaded = type(stock(config())).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(stock(config()))
    opslot.bind(model.eval(), "eager", device="cpu")
    assert torch.equal(loaded(batch["input_ids"]).logits, model(batch["input_ids"]).logits)


@every_family
def test_copies_and_pickles_keep_their_kernels(config, batch, every_kernel):
    import io

    model = stock(config())
    adopt(model, every_kernel, device="cpu")
    for twin in (copy.deepcopy(model), torch.load(_saved(model, io.BytesIO()), weights_only=False)):
        for one, other in zip(twin.modules(), model.modules(), strict=True):
            slots = [name for name in dir(type(other)) if name.endswith("_op")]
            assert all(getattr(one, name).kernel is getattr(other, name).kernel for name in slots)
        assert torch.equal(twin(**batch).loss, model(**batch).loss)


def _saved(model, buffer):
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def fake_family(name, monkeypatch):
    """Upstream's and our module of a family with one class, as two files would define them."""
    modules = []
    for kind in ("upstream", "ours"):
        module = types.ModuleType(f"{kind}_{name}")
        module.__file__ = f"{kind}_{name}.py"
        source = "import torch\nclass Norm(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        modules.append(module)
    return modules


@pytest.mark.parametrize("patched", ["a", "b"])
def test_each_family_of_a_model_is_judged_by_its_own_module(monkeypatch, patched):
    from opslot_models import adoption

    found = {name: fake_family(name, monkeypatch) for name in ("a", "b")}
    monkeypatch.setattr(adoption, "known_families", lambda: tuple(found))
    monkeypatch.setattr(adoption, "upstream_module", lambda name: f"upstream_{name}")
    monkeypatch.setattr(adoption, "twins", lambda name: {found[name][0].Norm: found[name][1].Norm})
    model = torch.nn.Sequential(found["a"][0].Norm(), found["b"][0].Norm())
    assert len(adoption.plan_swaps(model)) == 2
    # Something that the other family does not define must be seen too.
    for module in found[patched]:
        module.helper = types.FunctionType(module.Norm.forward.__code__, module.__dict__)
        module.helper.__module__ = module.__name__
    found[patched][0].helper = lambda x: x
    with pytest.raises(BindError, match=f"upstream_{patched} is patched"):
        adoption.plan_swaps(model)
