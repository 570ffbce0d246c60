import copy
import subprocess
import sys
import types

import opslot
import pytest
import torch
from opslot import BindError
from opslot_models import adopt, families
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM, Trainer, TrainingArguments

every_family = pytest.mark.parametrize("family", families())


def stock(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


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


def test_a_users_subclass_keeps_its_class_and_is_named(config):
    class Mine(Qwen3MoeForCausalLM):
        pass

    torch.manual_seed(0)
    adoption = adopt(Mine(config()), device="cpu")
    assert adoption.left == ("the model (Mine)",)
    assert "left as they are, without slots: the model (Mine)" in str(adoption)
    assert "cross_entropy_loss" not in {row.op for row in adoption.binding.rows}


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
    torch.testing.assert_close(runs["auto"], runs["whole"], rtol=1e-3, atol=1e-3)


@every_family
def test_an_adopted_model_saves_what_stock_loads(config, tmp_path, batch):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(stock(config()))
    opslot.bind(model.eval(), "eager", device="cpu")
    assert torch.equal(loaded(batch["input_ids"]).logits, model(batch["input_ids"]).logits)


@every_family
def test_copies_and_pickles_keep_their_kernels(config, batch, every_kernel):
    import io

    model = stock(config())
    adopt(model, every_kernel, device="cpu")
    for twin in (copy.deepcopy(model), torch.load(_saved(model, io.BytesIO()), weights_only=False)):
        assert twin.model.norm.rms_norm_op.kernel is model.model.norm.rms_norm_op.kernel
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
