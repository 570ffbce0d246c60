"""Qwen3.5-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    DECODE_STEP,
    causal_loss,
    experts,
    gated_delta_net,
    load_balancing_loss,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu,
    zero_centered_norm,
)

SPEC = ModelSpec(
    family="qwen3_5_moe",
    source="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    guards=(
        *gated_delta_net("Qwen3_5Moe"),
        zero_centered_norm("Qwen3_5Moe"),
        rotary_pos_emb("Qwen3_5Moe", "partial"),
        rotary_pos_emb_vision("Qwen3_5Moe"),
        swiglu("Qwen3_5Moe"),
        experts("Qwen3_5Moe"),
        load_balancing_loss("Qwen3_5Moe"),
        load_balancing_loss("Qwen3_5Moe", head="ForConditionalGeneration"),
        causal_loss("Qwen3_5Moe"),
        causal_loss("Qwen3_5Moe", head="ForConditionalGeneration"),
    ),
    unguarded=(("Qwen3_5MoeGatedDeltaNet.forward", DECODE_STEP),),
)
