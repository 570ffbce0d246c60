"""Seed-OSS: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import EntryGuard, ModelSpec, Slot

from ._decoder import causal_loss, rms_norm, rotary_pos_emb

SPEC = ModelSpec(
    family="seed_oss",
    source="transformers.models.seed_oss.modeling_seed_oss",
    guards=(
        rms_norm("SeedOss"),
        EntryGuard(
            target="SeedOssMLP.forward",
            slot=Slot("glu", "swiglu", activation="act_fn"),
            result="nn.functional.dropout(self.down_proj(kernel(self.gate_proj(x), self.up_proj(x))), "
            "p=self.residual_dropout, training=self.training)",
        ),
        rotary_pos_emb("SeedOss"),
        causal_loss("SeedOss"),
    ),
)
