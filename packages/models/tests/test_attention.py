import opslot
import pytest
from opslot import ConfigError, KernelUnavailable
from opslot_models import adopt, build_foundation_model
from transformers import PreTrainedModel, Qwen3MoeForCausalLM


def choose(how, config, ops):
    if how == "build":
        return build_foundation_model(config(), ops, device="cpu").opslot_binding
    return adopt(Qwen3MoeForCausalLM(config()), ops, device="cpu").binding


@pytest.mark.parametrize("how", ["build", "adopt"])
def test_a_name_that_transformers_does_not_offer(config, how):
    with pytest.raises(ConfigError, match=r"code: attn_implementation: transformers offers no 'native-sparse'; .*sdpa"):
        choose(how, config, {"attn_implementation": "native-sparse"})


@pytest.mark.parametrize("how", ["build", "adopt"])
def test_a_name_that_transformers_knows_and_that_is_not_installed(config, how):
    wanted = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(KernelUnavailable, match=r"'flash_attention_2' cannot run here: .*pip install flash-attn, or"):
        choose(how, config, wanted)


@pytest.mark.parametrize("how", ["build", "adopt"])
def test_what_is_offered_is_passed_on(config, how, monkeypatch):
    binding = choose(how, config, {"attn_implementation": "eager"})
    assert binding._model.config._attn_implementation == binding.attention == binding.to_dict()["attention"] == "eager"
    assert "attention: eager, run by transformers" in str(binding)
    assert binding.config().attn_implementation == "eager"
    monkeypatch.setenv("OPSLOT_OPS", "attn_implementation=flex_attention")
    binding = choose(how, config, {"attn_implementation": "eager"})
    assert binding._model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("how", ["build", "adopt"])
def test_what_the_variable_does_not_name_stays_as_code_chose_it(config, how, monkeypatch):
    """The layer on top says nothing of attention; an error names the layer that does."""
    monkeypatch.setenv("OPSLOT_OPS", "rms_norm=eager")
    assert choose(how, config, {"attn_implementation": "eager"}).attention == "eager"
    with pytest.raises(ConfigError, match="code: attn_implementation: transformers offers no 'native-sparse'"):
        choose(how, config, {"attn_implementation": "native-sparse"})


def test_an_import_error_of_something_else_is_not_said_to_be_attention(config, monkeypatch):
    def broken(*args, **kwargs):
        raise ImportError("something else")

    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", broken)
    with pytest.raises(ImportError, match="something else") as caught:
        choose("adopt", config, {"attn_implementation": "sdpa"})
    assert not isinstance(caught.value, opslot.OpslotError)
