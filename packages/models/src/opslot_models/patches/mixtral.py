"""Mixtral: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, experts, load_balancing_loss, rms_norm, rotary_pos_emb

SPEC = ModelSpec(
    family="mixtral",
    source="transformers.models.mixtral.modeling_mixtral",
    guards=(
        rms_norm("Mixtral"),
        rotary_pos_emb("Mixtral"),
        experts("Mixtral"),
        load_balancing_loss("Mixtral"),
        causal_loss("Mixtral"),
    ),
)
