"""Phi-3: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import EntryGuard, ModelSpec, Slot

from ._decoder import causal_loss, rms_norm, rotary_pos_emb

SPEC = ModelSpec(
    family="phi3",
    source="transformers.models.phi3.modeling_phi3",
    guards=(
        rms_norm("Phi3"),
        EntryGuard(
            target="Phi3MLP.forward",
            slot=Slot("glu", "swiglu", activation="activation_fn"),
            result="self.down_proj(kernel(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))",
        ),
        rotary_pos_emb("Phi3", "partial"),
        causal_loss("Phi3"),
    ),
)
