"""DeepSeek-V3: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, experts, interleaved_rotary_pos_emb, rms_norm, swiglu

SPEC = ModelSpec(
    family="deepseek_v3",
    source="transformers.models.deepseek_v3.modeling_deepseek_v3",
    guards=(
        rms_norm("DeepseekV3"),
        swiglu("DeepseekV3"),
        experts("DeepseekV3"),
        interleaved_rotary_pos_emb("DeepseekV3Attention", check="opslot_models.adoption:interleave_obstacle"),
        causal_loss("DeepseekV3"),
    ),
)
