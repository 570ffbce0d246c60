"""DeepSeek-V3: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import CallGuard, ModelSpec, Slot

from ._decoder import causal_loss, experts, rms_norm, swiglu

SPEC = ModelSpec(
    family="deepseek_v3",
    source="transformers.models.deepseek_v3.modeling_deepseek_v3",
    guards=(
        rms_norm("DeepseekV3"),
        swiglu("DeepseekV3"),
        experts("DeepseekV3"),
        CallGuard(
            target="DeepseekV3Attention.forward",
            slot=Slot("rotary_pos_emb", "interleaved", check="opslot_models.adoption:interleave_obstacle"),
            call="apply_rotary_pos_emb_interleave",
        ),
        causal_loss("DeepseekV3"),
    ),
)
