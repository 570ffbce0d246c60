"""All-eager is upstream, bit for bit; and each slot is reached with arguments that fit its contract."""

import inspect
import itertools
import re
from pathlib import Path

import opslot
import pytest
import torch
import transformers
from opslot import BindError
from opslot_models import families
from opslot_models._families import generated_module

from packages.models.tests.parity import (
    assert_close_with_gradients,
    assert_equal,
    both,
    calls_of,
    every_op,
    expected_calls,
    language_model,
    perturb,
)

every_family = pytest.mark.parametrize("family", families())
LABELS = {
    "ForCausalLM": {},
    "ForConditionalGeneration": {},
    "ForSequenceClassification": {"labels": torch.tensor([0, 1])},
    "ForTokenClassification": {"labels": torch.arange(34).view(2, 17) % 2},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
}
HEADS = [(family, name) for family in families() for name in generated_module(family).__all__ if "For" in name]
# These have a config of several parts, with images.
COMPOSED = [(family, name) for family, name in HEADS if getattr(transformers, name).config_class.sub_configs]
# The talker of Qwen3-Omni and what stands around it are tested in a file of their own.
HEADS = [(family, name) for family, name in HEADS if (family, name) not in COMPOSED and "OmniMoe" not in name]
COMPOSED = [(family, name) for family, name in COMPOSED if "OmniMoe" not in name or "Thinker" in name]


MULTIMODAL = sorted({family for family, _ in COMPOSED})


def guarded(family):
    """The ops that the generated module has guards for."""
    source = Path(generated_module(family).__file__).read_text(encoding="utf-8")
    return {op for op, _ in re.findall(r"# opslot: (\w+)/(\w+)$", source, re.MULTILINE)}


def test_the_families_that_are_generated():
    assert set(families()) == {
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "seed_oss"),
        *("deepseek_v4", "glm_moe_dsa", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"),
        *("gemma2", "gemma3", "llama", "mistral", "mixtral"),
        *("olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    }


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_eager_is_upstream(config, batch, deterministic, dtype):
    upstream, ours = both(config(dtype=dtype))
    again, _ = both(config(dtype=dtype))
    perturb(upstream, again, ours)
    assert_equal(upstream.to(dtype), again.to(dtype), batch)  # else there is nothing to be equal to
    upstream.zero_grad()
    assert_equal(upstream, ours.to(dtype), batch)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_eager_is_upstream_with_every_implementation_of_the_experts(config, batch, deterministic, experts, dtype):
    upstream, ours = both(config(experts_implementation=experts, dtype=dtype))
    assert ours.config._experts_implementation == experts
    assert_equal(upstream.to(dtype), ours.to(dtype), batch)


@pytest.mark.parametrize(("family", "head"), HEADS, ids=[name for _, name in HEADS])
def test_every_head_is_upstream_and_has_slots(family, config, batch, deterministic, head):
    del batch["labels"]
    upstream, ours = both(config(num_labels=2), head)
    batch |= LABELS[f"For{head.partition('For')[2]}"] or {"labels": batch["input_ids"]}
    assert_equal(upstream, ours, batch)
    losses = {"cross_entropy_loss", "load_balancing_loss"} if not head.endswith("ForCausalLM") else set()
    assert {row.op for row in ours.opslot_binding.rows} == guarded(family) - losses - {"rotary_pos_emb_vision"}
    assert upstream_modules(ours) == []


def upstream_modules(model):
    """The modules of upstream's modeling files that have a generated family and are in use all the same."""
    theirs = tuple(f"transformers.models.{family}." for family in families())
    return [type(module).__name__ for module in model.modules() if type(module).__module__.startswith(theirs)]


@pytest.mark.parametrize(("family", "head"), COMPOSED, ids=[name for _, name in COMPOSED])
def test_a_model_with_images_is_upstream_and_has_slots(family, media, deterministic, head):
    config, batch = media
    upstream, ours = both(config, head)
    perturb(upstream, ours)
    labels = batch["input_ids"] if head.endswith("Generation") else LABELS[f"For{head.partition('For')[2]}"]["labels"]
    assert_equal(upstream, ours, {**batch, "labels": labels})
    losses = {"cross_entropy_loss", "load_balancing_loss"} if not head.endswith("Generation") else set()
    assert {row.op for row in ours.opslot_binding.rows} == guarded(family) - losses
    assert upstream_modules(ours) == []


def test_the_fused_loss_of_a_model_with_images(images, deterministic, recorded):
    config, batch = images
    registry, recorders = recorded
    upstream, ours = both(config, "Gemma3ForConditionalGeneration")
    ops = {"rms_norm": "recorder", "cross_entropy_loss": "recorder", "default": "eager"}
    opslot.bind(ours, ops, device="cpu", registry=registry)
    expected, actual = (model(**batch, labels=batch["input_ids"]) for model in (upstream, ours))
    torch.testing.assert_close(actual.loss, expected.loss)
    assert actual.logits is None
    (call,) = recorders["cross_entropy_loss", "causal"].calls
    assert call.get("logit_softcap") is None  # only the model of text alone caps its logits


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_fused_loss_caps_the_logits(config, batch, deterministic, recorded):
    registry, recorders = recorded
    upstream, ours = both(config(final_logit_softcapping=0.05))
    uncapped, _ = both(config(final_logit_softcapping=None))
    opslot.bind(ours, {"cross_entropy_loss": "recorder", "default": "eager"}, device="cpu", registry=registry)
    expected = upstream(**batch).loss
    assert (uncapped(**batch).loss - expected).abs() > 1e-3
    torch.testing.assert_close(ours(**batch).loss, expected)
    assert recorders["cross_entropy_loss", "causal"].calls[0]["logit_softcap"] == 0.05


# Qwen3-Omni's thinker has no such argument.
@pytest.mark.parametrize("family", [family for family in families() if family != "qwen3_omni_moe"])
def test_a_fused_loss_sees_the_tokens_that_are_kept(config, batch, deterministic, recorded):
    registry, recorders = recorded
    upstream, ours = both(config())
    opslot.bind(ours, {"cross_entropy_loss": "recorder", "default": "eager"}, device="cpu", registry=registry)
    batch["labels"] = batch["labels"][:, -9:]
    torch.testing.assert_close(ours(**batch, logits_to_keep=9).loss, upstream(**batch, logits_to_keep=9).loss)
    assert recorders["cross_entropy_loss", "causal"].calls[0]["hidden_states"].shape == (2, 9, 64)


@every_family
def test_every_slot_is_reached_and_the_numbers_agree(config, routed_batch, deterministic, recorded):
    registry, recorders = recorded
    # One softmax in the references of bf16 would round otherwise; float32 agrees to a few ulps.
    upstream, ours = both(config(**_eager_experts(config())))
    perturb(upstream, ours)
    binding = opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    expected, actual = upstream(**routed_batch), ours(**routed_batch)
    assert actual.logits is None
    assert calls_of(recorders) == expected_calls(binding, {"rotary_pos_emb_vision/full"})
    assert_close_with_gradients(upstream, ours, expected, actual)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_slot_is_reached_with_images_too(media, deterministic, recorded):
    registry, recorders = recorded
    config, batch = media
    config = type(config).from_dict(config.to_dict(), experts_implementation="eager")
    upstream, ours = both(config, language_model(config).replace("ForCausalLM", "ForConditionalGeneration"))
    perturb(upstream, ours)
    binding = opslot.bind(ours, every_op(registry), device="cpu", registry=registry)
    batch["labels"] = batch["input_ids"]
    expected, actual = upstream(**batch), ours(**batch)
    found = calls_of(recorders)
    if family_of(config) != "gemma3":  # whose tower is SigLIP, a family of its own
        # The tower runs for the images, and again for the videos.
        assert found.pop("rotary_pos_emb_vision/full") == 2 * config.vision_config.depth
    assert found == expected_calls(binding, {"rotary_pos_emb_vision/full"})
    assert_close_with_gradients(upstream, ours, expected, actual)


def family_of(config):
    return type(config).__module__.split(".")[-2]


def _eager_experts(config):
    return {"experts_implementation": "eager"} if hasattr(config.get_text_config(), "num_experts") else {}


def test_the_experts_and_their_loss_receive_what_their_contracts_say(config, batch, recorded):
    registry, recorders = recorded
    upstream, ours = both(config())
    ops = {"moe_experts": "recorder", "load_balancing_loss": "recorder", "default": "eager"}
    opslot.bind(ours, ops, device="cpu", registry=registry)
    torch.testing.assert_close(ours(**batch).aux_loss, upstream(**batch).aux_loss)
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_norms_of_query_and_key_see_one_head_at_a_time(config, batch, recorded):
    registry, recorders = recorded
    _, ours = both(config())
    opslot.bind(ours, {"rms_norm": "recorder", "default": "eager"}, device="cpu", registry=registry)
    ours(**batch)
    shapes = [tuple(call["x"].shape) for call in recorders["rms_norm", "standard"].calls]
    assert shapes.count((2, 17, 4, 16)) == shapes.count((2, 17, 2, 16)) == ours.config.num_hidden_layers


@every_family
def test_the_loss_receives_what_the_trainer_passes(config, batch, recorded):
    registry, recorders = recorded
    _, ours = both(config())
    opslot.bind(ours, {"cross_entropy_loss": "recorder"}, device="cpu", registry=registry)
    ours(**batch, num_items_in_batch=torch.tensor(7), shift_labels=batch["labels"])
    (call,) = recorders["cross_entropy_loss", "causal"].calls
    assert call["num_items_in_batch"] == 7
    assert call["ignore_index"] == -100
    assert torch.equal(call["shift_labels"], batch["labels"])


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_the_fused_loss_trains_the_head_also_where_it_is_the_embedding(config, batch, deterministic, tied):
    upstream, ours = both(config(tie_word_embeddings=tied), ops={"cross_entropy_loss": "chunk_loss"})
    for model in (upstream, ours):
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        model(**batch, num_items_in_batch=11).loss.backward()
    for name in ("lm_head", "embeddings"):
        layers = [model.lm_head if name == "lm_head" else model.get_input_embeddings() for model in (upstream, ours)]
        torch.testing.assert_close(layers[1].weight.grad, layers[0].weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@every_family
def test_logits_are_there_wherever_no_gradient_is_recorded(config, batch, deterministic, recorded):
    registry, recorders = recorded
    upstream, ours = both(config())
    opslot.bind(ours, {"cross_entropy_loss": "recorder", "default": "eager"}, device="cpu", registry=registry)
    with torch.no_grad():
        expected, actual = upstream(**batch), ours(**batch)
    assert torch.equal(expected.logits, actual.logits)
    assert torch.equal(expected.loss, actual.loss)
    assert recorders["cross_entropy_loss", "causal"].calls == []
    del batch["labels"]
    assert ours(**batch).logits is not None


@every_family
def test_generate_and_gradient_checkpointing(config, batch, deterministic, every_kernel):
    upstream, ours = both(config(), ops=every_kernel)
    tokens = batch["input_ids"][:1, :8]
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(upstream.generate(tokens, **arguments), ours.generate(tokens, **arguments))

    plain = ours(**batch).loss
    plain.backward()
    expected = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    ours.zero_grad()
    ours.gradient_checkpointing_enable()
    ours.train()
    checkpointed = ours(**batch).loss
    torch.testing.assert_close(checkpointed, plain)
    checkpointed.backward()
    actual = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    torch.testing.assert_close(actual, expected)


HYBRID = [family for family in families() if "causal_conv1d" in guarded(family)]
ENDS = (0, 5, 6, 17)


@pytest.mark.parametrize("family", [family for family in families() if family not in HYBRID])
def test_packed_sequences_are_the_sequences_apart(family, config, batch, deterministic, every_kernel):
    # Scores that ReLU made zero are equal, and which of them come first depends on what stands beside them.
    changes = {"index_topk": 32} if family == "glm_moe_dsa" else {}
    upstream, ours = both(config(output_router_logits=False, **changes), ops=every_kernel)
    tokens = batch["input_ids"][:1]
    pieces = [tokens[:, start:end] for start, end in itertools.pairwise(ENDS)]
    positions = torch.cat([torch.arange(piece.shape[1]) for piece in pieces])[None]
    # With a cache, upstream takes them for one sequence.
    packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    ours.eval()
    if ours.config._attn_implementation != "eager":  # which takes none apart, and is all that gpt-oss has on a CPU
        with torch.no_grad():
            apart = torch.cat([ours(piece).logits for piece in pieces], dim=1)
            torch.testing.assert_close(ours(**packed).logits, apart, rtol=1e-4, atol=1e-5)
    labels = tokens.clone()
    labels[:, list(ENDS[1:-1])] = -100  # the first token of a piece follows nothing
    losses = [model(**packed, labels=labels).loss for model in (upstream, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", HYBRID)
def test_packed_sequences_of_a_hybrid_need_kernels_that_take_them_apart(config, batch, deterministic, recorded):
    """Upstream's own convolution runs on over the borders, and its delta rule refuses them."""
    registry, recorders = recorded
    _, ours = both(config(output_router_logits=False))
    ops = {"causal_conv1d": "recorder", "chunk_gated_delta_rule": "recorder", "default": "eager"}
    opslot.bind(ours, ops, device="cpu", registry=registry)
    tokens = batch["input_ids"][:1]
    pieces = [tokens[:, start:end] for start, end in itertools.pairwise(ENDS)]
    positions = torch.cat([torch.arange(piece.shape[1]) for piece in pieces])[None]
    ends = torch.tensor(ENDS, dtype=torch.int32)
    # What a collator of packed sequences gives.
    others = torch.tensor([0, 17], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": others, "max_length_q": 11, "max_length_k": 17}
    packed |= {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    apart = torch.cat([ours(piece).logits for piece in pieces], dim=1)
    torch.testing.assert_close(ours(**packed).logits, apart, rtol=1e-4, atol=1e-5)
    for op in ("causal_conv1d", "chunk_gated_delta_rule"):
        assert torch.equal(recorders[op, "standard"].calls[-1]["cu_seqlens"], ends)
    with pytest.raises(BindError, match=r"seq_idx without cu_seq_lens_q reaches .*GatedDeltaNet, whose kernel of"):
        ours(input_ids=tokens, seq_idx=torch.zeros(1, 17, dtype=torch.int32))
    opslot.bind(ours, ops | {"causal_conv1d": "eager"}, device="cpu", registry=registry)
    with pytest.raises(BindError, match=r"packed sequences .* and none of causal_conv1d, which would run over"):
        ours(**packed)


@pytest.mark.parametrize("family", HYBRID)
def test_a_convolution_with_another_activation_gets_no_kernel(config, batch, recorded):
    registry, _ = recorded
    upstream, ours = both(config(hidden_act="gelu"))
    with pytest.raises(BindError, match="its activation is 'gelu', and kernels compute SiLU"):
        opslot.bind(ours, {"causal_conv1d": "recorder", "default": "eager"}, device="cpu", registry=registry)
    opslot.bind(ours, {"chunk_gated_delta_rule": "recorder", "default": "eager"}, device="cpu", registry=registry)
    torch.testing.assert_close(ours(**batch).loss, upstream(**batch).loss)


@pytest.mark.parametrize("family", ["phi3"])
def test_a_partial_rotation_gets_tables_of_its_part(config, batch, recorded):
    registry, recorders = recorded
    _, ours = both(config())
    opslot.bind(ours, {"rotary_pos_emb": "recorder", "default": "eager"}, device="cpu", registry=registry)
    ours(**batch)
    shapes = {tuple(call[name].shape) for call in recorders["rotary_pos_emb", "partial"].calls for name in ("q", "cos")}
    assert shapes == {(2, 4, 17, 16), (1, 17, 8)}


@pytest.mark.parametrize("family", ["seed_oss"])
def test_a_dropout_behind_the_kernel_is_upstreams(config, batch, recorded):
    registry, recorders = recorded
    upstream, ours = both(config(residual_dropout=0.5))
    opslot.bind(ours, {"glu": "recorder", "default": "eager"}, device="cpu", registry=registry)
    losses = []
    for model in (upstream, ours):
        torch.manual_seed(4)
        losses.append(model.train()(**batch).loss)
    assert recorders["glu", "swiglu"].calls
    torch.testing.assert_close(losses[1], losses[0])
    assert not torch.equal(losses[0], upstream(**batch).loss)


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_a_config_that_rotates_halves_has_no_kernel_for_neighbours(config, batch, recorded):
    registry, _ = recorded
    upstream, ours = both(config(rope_interleave=False))
    with pytest.raises(BindError, match="its config has rope_interleave=False, which rotates halves"):
        opslot.bind(ours, {"rotary_pos_emb": "recorder", "default": "eager"}, device="cpu", registry=registry)
    opslot.bind(ours, "auto", device="cpu", registry=registry)
    torch.testing.assert_close(ours(**batch).loss, upstream(**batch).loss)


@pytest.mark.parametrize("family", ["mixtral"])
def test_routing_weights_of_another_dtype_than_the_tokens(config, batch, deterministic):
    """Mixtral keeps them in float32."""
    plain = config(dtype=torch.bfloat16, experts_implementation="eager")
    upstream, ours = both(plain, ops={"moe_experts": "torch", "default": "eager"})
    for model in (upstream.bfloat16(), ours.bfloat16()):
        model(**batch).loss.backward()
    for (name, a), b in zip(upstream.named_parameters(), ours.parameters(), strict=True):
        if name.endswith(("gate_up_proj", "down_proj", "gate.weight")):
            # Some roundings of bfloat16, of 2^-8 each, on the way.
            torch.testing.assert_close(b.grad, a.grad, rtol=2**-4, atol=2**-6 * a.grad.abs().max().item(), msg=name)


@every_family
def test_signatures_are_upstreams(config):
    upstream, ours = both(config())
    theirs, mine = (re.sub(r"[\w.]+\.", "", str(inspect.signature(type(m).forward))) for m in (upstream, ours))
    assert mine == theirs  # where an output is a class of the module, each has its own
    assert type(ours).__name__ == type(upstream).__name__
    assert not ours.is_custom_code()
