import json
from importlib.metadata import distributions

import opslot
import pytest
import torch
from opslot import BindError, OpslotError, _discovery
from opslot.ops.causal_conv1d import causal_conv1d
from opslot.ops.rms_norm import rms_norm
from opslot_models import build_foundation_model, families
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeModel


@pytest.fixture
def checkpoint(config, tmp_path):
    """A checkpoint in the layout of the hub, one tensor per expert, as stock transformers writes it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def more_kernels(monkeypatch):
    """Kernels that are there and cannot be bound to every model on a CPU."""
    known = _discovery.discover(distributions())
    npu = opslot.Requires(devices=("npu",))
    known.register(opslot.KernelSpec(op="rms_norm", name="half", target=rms_norm, dtypes=("bfloat16",)))
    known.register(opslot.KernelSpec(op="rms_norm", name="elsewhere", target=rms_norm, requires=npu))
    known.register(opslot.KernelSpec(op="causal_conv1d", name="torch_like", target=causal_conv1d))
    monkeypatch.setattr(_discovery, "_registry", known)


def keys(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("family", families())
def test_a_hub_checkpoint_loads_whole_and_saves_back_in_the_same_layout(family, checkpoint, tmp_path, batch):
    if family == "qwen3_moe":
        assert "model.layers.0.mlp.experts.5.gate_proj.weight" in keys(checkpoint)
    model = build_foundation_model(checkpoint, "eager", device="cpu").eval()
    stock = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert torch.equal(model(batch["input_ids"]).logits, stock(batch["input_ids"]).logits)

    model.save_pretrained(tmp_path / "back")
    assert keys(tmp_path / "back") == keys(checkpoint)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["architectures"] == [type(stock).__name__]
    assert "auto_map" not in config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(batch["input_ids"]).logits, stock(batch["input_ids"]).logits)


@pytest.mark.parametrize(
    ("lost", "error", "problem"),
    [
        ("model.norm.weight", BindError, r"is not one of Qwen3MoeForCausalLM.*missing keys: model\.norm\.weight"),
        # transformers itself notices when it merges the experts.
        ("model.layers.0.mlp.experts.2.up_proj.weight", RuntimeError, "issues during automatic conversion"),
    ],
)
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(checkpoint, lost, error, problem):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(error, match=problem):
        build_foundation_model(checkpoint)


def test_weights_that_the_model_would_drop_are_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BindError, match=r"unexpected keys: model\.layers\.0\.self_attn\.q_proj\.bias"):
        build_foundation_model(checkpoint)


def test_a_checkpoint_in_a_subfolder(checkpoint):
    model = build_foundation_model(checkpoint.parent, "eager", subfolder="hub", device="cpu")
    assert model.config.num_experts == 6


def test_a_mistake_in_the_choice_is_noticed_before_anything_is_loaded(tmp_path):
    with pytest.raises(opslot.ConfigError, match="unknown field 'rms_nrom'"):
        build_foundation_model(tmp_path / "nowhere", {"rms_nrom": "torch"})


@pytest.mark.parametrize(
    ("ops", "error", "problem"),
    [
        ({"modules": {"model.layers.7.*": {"rms_norm": "eager"}}}, opslot.ConfigError, "no module of .* matches"),
        ({"rms_norm": "half"}, opslot.KernelUnavailable, "takes bfloat16"),
        ({"rms_norm": "elsewhere"}, opslot.KernelUnavailable, "needs a npu device"),
        ({"strict": True, "causal_conv1d": "torch_like"}, opslot.ConfigError, "has no slot for causal_conv1d"),
    ],
)
def test_what_cannot_be_bound_is_refused_before_weights_are_read(checkpoint, more_kernels, ops, error, problem):
    (checkpoint / "model.safetensors").write_bytes(b"reading this raises another error")
    with pytest.raises(error, match=problem):
        build_foundation_model(checkpoint, ops, device="cpu")


def test_a_choice_is_judged_by_the_dtype_that_is_asked_for(checkpoint, more_kernels):
    model = build_foundation_model(checkpoint, {"rms_norm": "half"}, dtype=torch.bfloat16, device="cpu")
    assert model.model.norm.rms_norm_op.kernel is not None


def test_judging_the_choice_first_leaves_no_trace(config, caplog):
    caplog.set_level("INFO", "opslot")
    mine = config(attn_implementation="eager", dtype="float32")
    before = mine.to_dict()
    torch.manual_seed(3)
    model = build_foundation_model(mine, {"glu": "torch"}, device="cpu")
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(config())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    assert [record.opslot_binding for record in caplog.records] == [model.opslot_binding]
    assert mine.to_dict() == before


def test_a_family_that_is_not_generated():
    known = ", ".join(families())
    with pytest.raises(OpslotError, match=f"no generated model for model type 'gpt2'; there are: {known}"):
        build_foundation_model(GPT2Config())


@pytest.mark.parametrize("family", families())
def test_a_config_of_every_family_builds_its_causal_model(config):
    model = build_foundation_model(config(), device="cpu")
    assert type(model).__name__ == type(AutoModelForCausalLM.from_config(config())).__name__
    assert type(model).__module__.startswith("opslot_models.generated")


def test_an_unknown_architecture_lists_what_there_is(config):
    with pytest.raises(OpslotError, match="no architecture 'Qwen3MoeForVision'; it has: Qwen3MoeForCausalLM"):
        build_foundation_model(config(), architecture="Qwen3MoeForVision")


def test_the_architecture_is_the_configs(config):
    model = build_foundation_model(config(architectures=["Qwen3MoeModel"]), device="cpu")
    assert type(model).__name__ == Qwen3MoeModel.__name__
    assert type(model).__module__.startswith("opslot_models.generated")


def test_attention_is_passed_on(config):
    model = build_foundation_model(config(), {"attn_implementation": "eager", "default": "eager"}, device="cpu")
    assert model.config._attn_implementation == "eager"


def test_a_model_on_meta_is_bound_for_the_device_it_will_be_on(config):
    with torch.device("meta"):
        model = build_foundation_model(config(), "auto", device="cpu")
    assert next(model.parameters()).device.type == "meta"
    assert model.opslot_binding.device.kind == "cpu"
    assert model.opslot_binding.verify() == ()


def test_dtype(config):
    model = build_foundation_model(config(), "eager", dtype=torch.bfloat16, device="cpu")
    assert next(model.parameters()).dtype == torch.bfloat16


def test_two_models_hold_different_kernels(config):
    one = build_foundation_model(config(), {"rms_norm": "torch"}, device="cpu")
    two = build_foundation_model(config(), "eager", device="cpu")
    assert one.model.norm.rms_norm_op.kernel is not None
    assert two.model.norm.rms_norm_op.kernel is None
    assert opslot.OpSlot("rms_norm").kernel is None
