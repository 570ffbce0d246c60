"""Gemma 3: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, geglu, rotary_pos_emb, zero_centered_norm

SPEC = ModelSpec(
    family="gemma3",
    source="transformers.models.gemma3.modeling_gemma3",
    guards=(
        zero_centered_norm("Gemma3"),
        geglu("Gemma3"),
        rotary_pos_emb("Gemma3"),
        causal_loss("Gemma3", "logit_softcap=self.config.final_logit_softcapping"),
        causal_loss("Gemma3", head="ForConditionalGeneration"),
    ),
)
