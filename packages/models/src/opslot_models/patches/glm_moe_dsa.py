"""GLM-5 (GLM-MoE-DSA): where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import CallGuard, EntryGuard, ModelSpec, RegionGuard, Slot

from ._decoder import RUNS_SPARSE, SPARSE, causal_loss, experts, interleaved_rotary_pos_emb, rms_norm, swiglu

SINCE = ("5.24", "the cache holds expanded keys, and the latents at hand are those of the new tokens alone")
LATENT = Slot("dsa_attention", "glm", check="opslot_models.adoption:latent_obstacle")

SPEC = ModelSpec(
    family="glm_moe_dsa",
    source="transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
    guards=(
        rms_norm("GlmMoeDsa"),
        swiglu("GlmMoeDsa"),
        experts("GlmMoeDsa"),
        interleaved_rotary_pos_emb("GlmMoeDsaAttention"),
        interleaved_rotary_pos_emb("GlmMoeDsaIndexer"),
        EntryGuard(
            target="GlmMoeDsaIndexer.forward",
            slot=Slot("dsa_indexer", "glm"),
            before="q.float",
            result="kernel(q, k, self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)), attention_mask, "
            "self.index_topk)",
        ),
        CallGuard(
            target="GlmMoeDsaAttention.forward",
            slot=LATENT,
            since=SINCE,
            call="self.expand_kv",
            when=SPARSE,
            uses=RUNS_SPARSE,
            result="None, None",
        ),
        RegionGuard(
            target="GlmMoeDsaAttention.forward",
            slot=LATENT,
            since=SINCE,
            first="topk_indices.new_ones",
            last="attention_interface",
            operand=False,
            arguments=(
                # Under autocast a projection gives another dtype than a norm or a rotation, and attention takes its.
                *("q_pass", *(f"{part}.to(q_pass.dtype)" for part in ("q_rot", "k_pass", "k_rot"))),
                "self.dsa_attention_op.weight(self.kv_b_proj).to(q_pass.dtype)",
                *("topk_indices", "self.scaling", "plain_mask(attention_mask)"),
            ),
            result="attn_output",
            cleared=("attn_weights",),
            when=SPARSE,
            uses=(*RUNS_SPARSE, "opslot_models.adoption:plain_mask"),
        ),
        causal_loss("GlmMoeDsa"),
    ),
    untrained=("GlmMoeDsaIndexer",),
)
