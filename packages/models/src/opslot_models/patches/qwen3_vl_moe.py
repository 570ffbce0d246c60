"""Qwen3-VL-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    causal_loss,
    experts,
    load_balancing_loss,
    rms_norm,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu,
)

SPEC = ModelSpec(
    family="qwen3_vl_moe",
    source="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    guards=(
        rms_norm("Qwen3VLMoeText"),
        swiglu("Qwen3VLMoeText"),
        experts("Qwen3VLMoeText"),
        rotary_pos_emb("Qwen3VLMoeText"),
        rotary_pos_emb_vision("Qwen3VLMoe"),
        load_balancing_loss("Qwen3VLMoe", head="ForConditionalGeneration"),
        causal_loss("Qwen3VLMoe", head="ForConditionalGeneration"),
    ),
)
