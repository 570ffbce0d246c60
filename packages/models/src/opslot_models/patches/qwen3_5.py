"""Qwen3.5: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    DECODE_STEP,
    causal_loss,
    gated_delta_net,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu,
    zero_centered_norm,
)

SPEC = ModelSpec(
    family="qwen3_5",
    source="transformers.models.qwen3_5.modeling_qwen3_5",
    guards=(
        *gated_delta_net("Qwen3_5"),
        zero_centered_norm("Qwen3_5"),
        rotary_pos_emb("Qwen3_5", "partial"),
        rotary_pos_emb_vision("Qwen3_5"),
        swiglu("Qwen3_5"),
        causal_loss("Qwen3_5"),
        causal_loss("Qwen3_5", head="ForConditionalGeneration"),
    ),
    unguarded=(("Qwen3_5GatedDeltaNet.forward", DECODE_STEP),),
)
