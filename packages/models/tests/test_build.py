import json
from importlib.metadata import distributions
from pathlib import Path

import opslot
import pytest
import torch
import transformers
from opslot import BindError, OpslotError, _discovery
from opslot.ops.causal_conv1d import causal_conv1d
from opslot.ops.rms_norm import rms_norm
from opslot_models import build_foundation_model, families
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeModel

from packages.models.tests import tiny
from packages.models.tests.parity import stock


@pytest.fixture
def checkpoint(config, tmp_path):
    """A checkpoint in the layout of the hub, one tensor per expert, as stock transformers writes it."""
    stock(config()).save_pretrained(tmp_path / "hub")
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


PER_EXPERT = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.5.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.5.gate_proj.weight",
}


@pytest.mark.parametrize("family", families())
def test_a_hub_checkpoint_loads_whole_and_saves_back_in_the_same_layout(family, checkpoint, tmp_path, batch):
    if family in PER_EXPERT:
        assert PER_EXPERT[family] in keys(checkpoint)
    model = build_foundation_model(checkpoint, "eager", device="cpu").eval()
    upstream = getattr(transformers, type(model).__name__)
    expected = upstream.from_pretrained(checkpoint).eval()
    assert torch.equal(model(batch["input_ids"]).logits, expected(batch["input_ids"]).logits)

    model.save_pretrained(tmp_path / "back")
    assert keys(tmp_path / "back") == keys(checkpoint)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["architectures"] == [upstream.__name__]
    assert "auto_map" not in config
    again = upstream.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(batch["input_ids"]).logits, expected(batch["input_ids"]).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_a_checkpoint_in_several_files(checkpoint, tmp_path, batch):
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    expected.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    model = build_foundation_model(tmp_path / "parts", "eager", device="cpu").eval()
    assert torch.equal(model(batch["input_ids"]).logits, expected(batch["input_ids"]).logits)
    model.save_pretrained(tmp_path / "back", max_shard_size="50KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(batch["input_ids"]).logits, expected(batch["input_ids"]).logits)


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def other_layout(tensors):
    return {name.replace("model.layers.", "transformer.h."): value for name, value in tensors.items()}


EXPERTS = "model.layers.0.mlp.experts."
PARTS = ("gate_proj", "up_proj", "down_proj")


def one_expert_more(tensors):
    return tensors | {f"{EXPERTS}6.{part}.weight": tensors[f"{EXPERTS}5.{part}.weight"].clone() for part in PARTS}


def another_in_its_place(tensors):
    """As many as the config says, so that transformers would move three experts up."""
    return without(*(f"{EXPERTS}3.{part}.weight" for part in PARTS))(one_expert_more(tensors))


NOT_ONE = "is not one of Qwen3MoeForCausalLM.*"
CHANGES = {
    "missing": (without("model.norm.weight"), NOT_ONE + r"missing keys: model\.norm\.weight\. "),
    "unexpected": (
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)},
        NOT_ONE + r"unexpected keys: model\.layers\.0\.self_attn\.q_proj\.bias\. ",
    ),
    "another shape": (
        lambda tensors: tensors | {"model.norm.weight": torch.ones(32)},
        NOT_ONE + r"mismatched keys: model\.norm\.weight \(\(32,\) in the checkpoint, \(64,\) in the model\)",
    ),
    "another layout": (
        other_layout,
        NOT_ONE + r"missing keys: model\.layers\.0\..* and \d+ more; unexpected keys: transformer\.h\.0\..* more",
    ),
    "part of an expert": (without(f"{EXPERTS}2.up_proj.weight"), rf"lacks tensors of .*: {EXPERTS}2\.up_proj\.weight$"),
    "part of the last expert": (without(f"{EXPERTS}5.up_proj.weight"), rf"lacks .*: {EXPERTS}5\.up_proj\.weight$"),
    "the last expert": (
        without(*(f"{EXPERTS}5.{part}.weight" for part in PARTS)),
        NOT_ONE + r"mlp\.experts\.gate_up_proj \(\(5, 64, 64\) in the checkpoint, \(6, 64, 64\) in the model\)",
    ),
    "an expert too many": (
        one_expert_more,
        NOT_ONE + r"mlp\.experts\.down_proj \(\(7, 64, 32\) in the checkpoint, \(6, 64, 32\) in the model\)",
    ),
    "another expert": (
        another_in_its_place,
        rf"lacks tensors of .* stacked in their place: {EXPERTS}3\.down_proj\.weight, .*{EXPERTS}3\.up_proj\.weight$",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_not_the_models_is_refused_by_name(checkpoint, change):
    edit, problem = CHANGES[change]
    file = checkpoint / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(BindError, match=problem):
        build_foundation_model(checkpoint, "eager", device="cpu")


def test_experts_are_counted_over_all_files(checkpoint, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    index = tmp_path / "parts/model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][f"{EXPERTS}4.gate_proj.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(BindError, match=rf"lacks tensors of .*{EXPERTS}4\.gate_proj\.weight$"):
        build_foundation_model(tmp_path / "parts", "eager", device="cpu")


def test_a_file_that_is_none_of_safetensors_is_refused_by_loading_it(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(SafetensorError):
        build_foundation_model(checkpoint, "eager", device="cpu")


@pytest.mark.parametrize("file", ["model.safetensors", "model-00002-of-*.safetensors"])
def test_a_file_that_is_not_there_is_named(checkpoint, tmp_path, file):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "parts", max_shard_size="50KB" if "*" in file else "5GB")
    (lost,) = (tmp_path / "parts").glob(file)
    lost.unlink()
    with pytest.raises(OSError, match=lost.name):
        build_foundation_model(tmp_path / "parts", "eager", device="cpu")


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
    expected = AutoModelForCausalLM.from_config(config())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert [record.opslot_binding for record in caplog.records] == [model.opslot_binding]
    assert mine.to_dict() == before


def test_a_family_that_is_not_generated():
    known = ", ".join(families())
    with pytest.raises(OpslotError, match=f"no generated model for model type 'gpt2'; there are: {known}"):
        build_foundation_model(GPT2Config())


@pytest.mark.parametrize("family", families())
def test_a_config_of_every_family_builds_its_language_model(config):
    model = build_foundation_model(config(), device="cpu")
    assert type(model).__name__ == type(stock(config())).__name__
    assert type(model).__module__.startswith("opslot_models.generated")


@pytest.mark.parametrize(
    "family", [family for family in families() if family in tiny.TEXT.keys() | tiny.COMPOSED.keys()]
)
def test_a_config_of_the_whole_builds_the_model_with_images(family):
    config = tiny.composed(family)
    model = build_foundation_model(config, device="cpu")
    assert type(model).__name__ == type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"
    assert isinstance(model.config, type(config))


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_a_config_that_no_language_model_has_lists_what_there_is(config):
    text = config().text_config
    with pytest.raises(
        OpslotError, match=r"no language model for a Qwen3VLTextConfig; name an architecture: .*TextModel"
    ):
        build_foundation_model(text, device="cpu")
    model = build_foundation_model(text, device="cpu", architecture="Qwen3VLTextModel")
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


@pytest.mark.parametrize("name", ["./not/there", "~/not_there", "/not/there"])
def test_a_folder_that_is_not_there(name):
    with pytest.raises(OpslotError, match=f"there is no folder {name}, where the checkpoint should be"):
        build_foundation_model(name)
    with pytest.raises(OpslotError, match="there is no folder"):
        build_foundation_model(Path(name))
