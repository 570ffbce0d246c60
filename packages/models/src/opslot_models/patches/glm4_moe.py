"""GLM-4.5: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, experts, rms_norm, rotary_pos_emb, swiglu

SPEC = ModelSpec(
    family="glm4_moe",
    source="transformers.models.glm4_moe.modeling_glm4_moe",
    guards=(
        rms_norm("Glm4Moe"),
        swiglu("Glm4Moe"),
        experts("Glm4Moe"),
        rotary_pos_emb("Glm4Moe", "partial"),
        causal_loss("Glm4Moe"),
    ),
)
