"""DeepSeek-V2: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import causal_loss, experts, rms_norm, swiglu

SPEC = ModelSpec(
    family="deepseek_v2",
    source="transformers.models.deepseek_v2.modeling_deepseek_v2",
    guards=(
        rms_norm("DeepseekV2"),
        swiglu("DeepseekV2"),
        experts("DeepseekV2"),
        causal_loss("DeepseekV2"),
    ),
    unguarded=(("DeepseekV2Attention.forward", "rotates: neighbours, as complex numbers in float32, is no variant"),),
)
