"""Qwen3-VL: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    causal_loss,
    rms_norm,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu,
)

SPEC = ModelSpec(
    family="qwen3_vl",
    source="transformers.models.qwen3_vl.modeling_qwen3_vl",
    guards=(
        rms_norm("Qwen3VLText"),
        swiglu("Qwen3VLText"),
        rotary_pos_emb("Qwen3VLText"),
        rotary_pos_emb_vision("Qwen3VL"),
        causal_loss("Qwen3VL", head="ForConditionalGeneration"),
    ),
)
