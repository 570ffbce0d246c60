"""Qwen3-Omni as a whole: the thinker with audio, the talker, what predicts its codes, and what makes sound of them."""

import opslot
import pytest
import torch
from opslot_models import adopt, families
from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

from packages.models.tests import tiny
from packages.models.tests.parity import (
    assert_close_with_gradients,
    assert_equal,
    both,
    calls_of,
    every_op,
    expected_calls,
)
from packages.models.tests.tiny import AUDIO_TOKEN, COMMON, END, composed

pytestmark = pytest.mark.skipif("qwen3_omni_moe" not in families(), reason="not served for the installed transformers")
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture
def omni():
    text = tiny.text("qwen3_omni_moe")
    dense = {**COMMON, "num_hidden_layers": 2, "rope_parameters": PLAIN}
    talker = {
        "text_config": {**text, "shared_expert_intermediate_size": 32, "mlp_only_layers": []},
        "code_predictor_config": {**dense, "num_code_groups": 4},
        "num_code_groups": 4,
        "thinker_hidden_size": 64,
        # Upstream reads these two and declares neither.
        "spatial_merge_size": 2,
        "vocab_size": 96,
    }
    sound = {"codebook_size": 32, "num_quantizers": 4, "decoder_dim": 32, "upsample_rates": [2, 2], "sliding_window": 8}
    thinker = composed("qwen3_omni_moe").to_dict()
    return AutoConfig.for_model(
        "qwen3_omni_moe",
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config={**dense, **sound, "upsampling_ratios": [2]},
    )


@pytest.fixture
def parts(omni):
    """The whole model from upstream's classes, and ours. Upstream leaves the talker's experts as the memory was."""
    upstream, ours = both(omni, "Qwen3OmniMoeForConditionalGeneration")
    torch.manual_seed(3)
    for parameter in upstream.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours.load_state_dict(upstream.state_dict())
    return upstream, ours


def embeddings(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def batches():
    """What each part of the model is called with."""
    tokens = torch.arange(1, 35).view(2, 17)
    heard = tokens.clone()
    heard[0, 2:5], heard[0, 1], heard[0, 5] = AUDIO_TOKEN, END, 7
    audio = {"input_features": embeddings(1, 16, 24), "feature_attention_mask": torch.ones(1, 24, dtype=torch.long)}
    return {
        "thinker": {"input_ids": heard, **audio, "labels": tokens},
        "talker": {
            "inputs_embeds": embeddings(2, 9, 64),
            "attention_mask": torch.ones(2, 9, dtype=torch.long),
            "labels": tokens[:, :9],
            "output_router_logits": True,
        },
        "talker.code_predictor": {"inputs_embeds": embeddings(2, 4, 64), "labels": tokens[:, :4]},
    }


@pytest.mark.parametrize("part", ["thinker", "talker", "talker.code_predictor"])
def test_every_part_is_upstream(parts, deterministic, part):
    upstream, ours = (model.get_submodule(part) for model in parts)
    assert_equal(upstream, ours, batches()[part])


def test_sound_is_upstreams(parts, recorded):
    registry, recorders = recorded
    upstream, ours = (model.code2wav for model in parts)
    codes = torch.arange(40).view(1, 4, 10) % 32
    expected = upstream(codes)
    assert torch.equal(ours(codes), expected)
    binding = opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    torch.testing.assert_close(ours(codes), expected)
    assert calls_of(recorders) == expected_calls(binding)


@pytest.mark.parametrize("part", ["thinker", "talker", "talker.code_predictor"])
def test_every_slot_of_a_part_is_reached(parts, deterministic, recorded, part):
    registry, recorders = recorded
    upstream, ours = (model.get_submodule(part) for model in parts)
    upstream.set_experts_implementation("eager")
    binding = opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    batch = batches()[part]
    expected, actual = upstream(**batch), ours(**batch)
    beside = {"rotary_pos_emb_vision/full"}
    if part == "talker":  # whose code predictor is called by `generate` alone
        beside |= {"rotary_pos_emb/full", "rms_norm/standard", "glu/swiglu"}
    found = {slot: count for slot, count in calls_of(recorders).items() if slot not in beside}
    assert found == expected_calls(binding, beside)
    assert_close_with_gradients(upstream, ours, expected, actual)


def test_adopting_the_whole(omni, parts):
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration._from_config(omni)
    adoption = adopt(model, "eager", device="cpu")
    assert adoption.left == ()
    assert [type(module) for module in model.modules()] == [type(module) for module in parts[1].modules()]
