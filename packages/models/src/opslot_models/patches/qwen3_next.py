"""Qwen3-Next: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    DECODE_STEP,
    causal_loss,
    experts,
    gated_delta_net,
    load_balancing_loss,
    rotary_pos_emb,
    swiglu,
    zero_centered_norm,
)

SPEC = ModelSpec(
    family="qwen3_next",
    source="transformers.models.qwen3_next.modeling_qwen3_next",
    guards=(
        *gated_delta_net("Qwen3Next"),
        zero_centered_norm("Qwen3Next"),
        rotary_pos_emb("Qwen3Next", "partial"),
        swiglu("Qwen3Next"),
        experts("Qwen3Next"),
        load_balancing_loss("Qwen3Next"),
        causal_loss("Qwen3Next"),
    ),
    unguarded=(("Qwen3NextGatedDeltaNet.forward", DECODE_STEP),),
)
