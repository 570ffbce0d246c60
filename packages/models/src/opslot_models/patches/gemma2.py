"""Gemma 2: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, geglu, rotary_pos_emb, zero_centered_norm

SPEC = ModelSpec(
    family="gemma2",
    source="transformers.models.gemma2.modeling_gemma2",
    guards=(
        zero_centered_norm("Gemma2"),
        geglu("Gemma2"),
        rotary_pos_emb("Gemma2"),
        causal_loss("Gemma2", "logit_softcap=self.config.final_logit_softcapping"),
    ),
)
