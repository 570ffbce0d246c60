"""OLMoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, experts, load_balancing_loss, rms_norm, rotary_pos_emb

SPEC = ModelSpec(
    family="olmoe",
    source="transformers.models.olmoe.modeling_olmoe",
    guards=(
        rms_norm("Olmoe"),
        rotary_pos_emb("Olmoe"),
        experts("Olmoe"),
        load_balancing_loss("Olmoe"),
        causal_loss("Olmoe"),
    ),
)
