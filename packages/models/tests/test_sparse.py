"""Attention to chosen keys, the delta rule and the streams of DeepSeek-V4: when their kernels run, and with what."""

import importlib
import inspect

import opslot
import pytest
import torch
from opslot import BindError
from opslot_models import families
from opslot_models._families import generated_module
from opslot_models.adoption import keys_in_mask
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from packages.models.tests.parity import both, calls_of, every_op, perturb

SPARSE = [family for family in ("deepseek_v4", "glm_moe_dsa") if family in families()]
HYBRID = [family for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next") if family in families()]


def attends(family):
    """GLM's attention has no guard where the cache holds expanded keys, before transformers 5.24."""
    return family != "glm_moe_dsa" or "v5_17" not in generated_module(family).__name__


WITH_ATTENTION = [family for family in SPARSE if attends(family)]


@pytest.mark.parametrize("family", SPARSE + HYBRID)
def test_decoding_with_a_kernel_in_every_slot(family, config, batch, deterministic, recorded):
    registry, recorders = recorded
    upstream, ours = both(config(experts_implementation="eager"))
    perturb(upstream, ours)
    opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    tokens = batch["input_ids"][:1, :9]
    arguments = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    arguments |= {"output_logits": True, "return_dict_in_generate": True}
    expected, actual = upstream.generate(tokens, **arguments), ours.generate(tokens, **arguments)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-5)
    ran = calls_of(recorders)
    if family in HYBRID:  # a step with a state is upstream's own
        layers = ours.config.layer_types.count("linear_attention")
        assert ran["chunk_gated_delta_rule/standard"] == ran["causal_conv1d/standard"] == layers
    elif attends(family):
        variant = "glm" if family == "glm_moe_dsa" else family
        # At a single token there may be no mask, and then upstream runs.
        assert ran[f"dsa_attention/{variant}"] >= ours.config.num_hidden_layers
        assert ran[f"dsa_indexer/{variant}"] >= 2


@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_weights_and_dropout_of_attention_are_upstreams(family, config, batch, recorded):
    registry, recorders = recorded
    upstream, ours = both(config(attention_dropout=0.4, attn_implementation="eager"))
    opslot.bind(ours, {"dsa_attention": "recorder", "default": "eager"}, device="cpu", registry=registry)
    losses = []
    for model in (upstream, ours):
        torch.manual_seed(4)
        losses.append(model.train()(**batch).loss)
    assert torch.equal(losses[0], losses[1])
    expected, actual = (model.eval()(**batch, output_attentions=True) for model in (upstream, ours))
    assert calls_of(recorders) == {}
    torch.testing.assert_close(actual.attentions, expected.attentions, rtol=0, atol=0)
    ours(**batch)  # without either, the kernel runs
    assert sum(calls_of(recorders).values()) == ours.config.num_hidden_layers
    for model in (upstream, ours):
        model.config.output_attentions = True
    assert len(ours(**batch).attentions) == ours.config.num_hidden_layers
    assert sum(calls_of(recorders).values()) == ours.config.num_hidden_layers


@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_an_attention_of_the_users_own_is_not_bypassed(family, config, batch, recorded):
    registry, recorders = recorded
    ops = {"dsa_attention": "recorder", "default": "eager"}
    ran = []

    def mine(module, query, key, value, attention_mask, **kwargs):
        ran.append(module)
        code = importlib.import_module(type(module).__module__)
        return code.eager_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    _, ours = both(config(attn_implementation="eager"))
    opslot.bind(ours, ops, device="cpu", registry=registry)
    ours.set_attn_implementation("mine")
    ours(**batch)
    assert len(ran) == ours.config.num_hidden_layers
    assert calls_of(recorders) == {}
    with pytest.raises(BindError, match="its config has attn_implementation='mine', which a kernel would bypass"):
        opslot.bind(ours, ops, device="cpu", registry=registry)


@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_a_mask_that_is_a_bias_is_an_error(family, config, batch, recorded):
    registry, _ = recorded
    upstream, ours = both(config(attn_implementation="eager", output_router_logits=False))
    opslot.bind(ours, {"dsa_attention": "recorder", "default": "eager"}, device="cpu", registry=registry)
    tokens = batch["input_ids"]
    mask = torch.full((2, 1, 17, 17), torch.finfo(torch.float32).min).triu(1)
    mask = mask.masked_fill(torch.ones(17, 17).tril(-3).bool(), torch.finfo(torch.float32).min)
    bias = mask + 0.5 * torch.rand(mask.shape) * (mask == 0)
    ours(tokens, attention_mask=mask)
    with pytest.raises(RuntimeError, match="takes no bias in the attention mask: choose eager"):
        ours(tokens, attention_mask=bias)
    opslot.bind(ours, "eager", device="cpu", registry=registry)
    assert torch.equal(ours(tokens, attention_mask=bias).logits, upstream(tokens, attention_mask=bias).logits)


@pytest.mark.parametrize("family", [*HYBRID, *SPARSE])
def test_a_prompt_in_pieces(family, config, batch, recorded):
    """With a cache, where a kernel gets the state of the piece before."""
    registry, _ = recorded
    upstream, ours = both(config(experts_implementation="eager", output_router_logits=False))
    perturb(upstream, ours)
    opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    name = "cache" if "cache" in inspect.signature(type(ours).forward).parameters else "past_key_values"
    results = []
    with torch.no_grad():
        for model in (upstream, ours):
            held, found = None, []
            for piece in batch["input_ids"].split(6, dim=1):
                out = model.eval()(piece, use_cache=True, **{name: held})
                held = out[name]
                found.append(out.logits)
            results.append(torch.cat(found, dim=1))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [family for family in SPARSE if family == "deepseek_v4"])
def test_a_proof_of_streams_does_not_wait_for_the_norms_in_them(family, config, batch, recorded):
    registry, _ = recorded
    _, ours = both(config())
    binding = opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    with binding.proof() as proof:
        ours(**batch).loss.backward()
    proof.check()


@pytest.mark.parametrize("family", [family for family in WITH_ATTENTION if family == "glm_moe_dsa"])
def test_a_projection_that_is_more_than_its_weight_has_no_attention_to_latents(family, config, batch, recorded):
    registry, _ = recorded
    ops = {"dsa_attention": "recorder", "default": "eager"}
    _, ours = both(config())
    lora = LoraConfig(target_modules=["kv_b_proj"], init_lora_weights=False)
    opslot.bind(ours, ops, device="cpu", registry=registry)
    wrapped = get_peft_model(ours, lora)
    with pytest.raises(BindError, match=r"would read the weight of Linear, which is not a plain nn\.Linear"):
        wrapped(**batch)
    with pytest.raises(BindError, match=r"its kv_b_proj is not a plain nn\.Linear"):
        opslot.bind(ours, ops, device="cpu", registry=registry)
    opslot.bind(ours, "auto", device="cpu", registry=registry)
    assert wrapped(**batch).loss.isfinite()


@pytest.mark.parametrize("family", [family for family in SPARSE if family == "deepseek_v4"])
def test_the_keys_of_a_mask(family, config):
    _, ours = both(config())
    sliding, compressed, heavily = (layer.self_attn for layer in ours.model.layers)
    assert [layer.compressor is None for layer in (sliding, compressed, heavily)] == [True, False, False]
    for attention, most in ((sliding, 6), (compressed, 6 + 2), (heavily, 17)):
        assert keys_in_mask(attention, torch.zeros(1, 1, 2, most), 3).shape == (3, 2, most)
        seen = torch.rand(2, 1, 9, 17, generator=torch.Generator().manual_seed(2)).argsort(-1) < most
        seen[0, 0, 3] = False
        seen[1, 0, 4, 9:] = False
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        keys = keys_in_mask(attention, mask, 2)
        assert keys.shape == (2, 9, most)
        again = torch.zeros(2, 9, 18, dtype=torch.bool).scatter(-1, keys.where(keys >= 0, 17), True)[..., :17]
        assert torch.equal(again, seen.squeeze(1))
        assert all(row[row >= 0].unique().numel() == (row >= 0).sum() for row in keys.flatten(0, 1))
    for more in (7, 17):  # a mask of the caller's own
        with pytest.raises(RuntimeError, match="shows more keys than a window of DeepSeek-V4: choose"):
            keys_in_mask(sliding, torch.zeros(1, 1, 2, 17).masked_fill(torch.arange(17) >= more, float("-inf")), 1)


@pytest.mark.parametrize("family", [*SPARSE, *(family for family in HYBRID if family == "qwen3_5_moe")])
def test_training_with_a_kernel_in_every_slot(family, config, batch, deterministic, recorded):
    registry, _ = recorded
    upstream, ours = both(config(experts_implementation="eager"))
    perturb(upstream, ours)
    opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    losses = []
    for model in (upstream, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(8):
            loss = model.train()(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < losses[0][0] - 0.3
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
