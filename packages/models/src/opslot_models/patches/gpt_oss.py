"""gpt-oss: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ForwardGuard, ModelSpec, Slot

from ._decoder import causal_loss, load_balancing_loss, rms_norm, rotary_pos_emb

SPEC = ModelSpec(
    family="gpt_oss",
    source="transformers.models.gpt_oss.modeling_gpt_oss",
    guards=(
        rms_norm("GptOss", "fp32_weight"),
        ForwardGuard(
            target="GptOssExperts",
            slot=Slot("moe_experts", "gpt_oss", check="opslot_models.adoption:experts_obstacle"),
            attributes=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias", "alpha", "limit"),
        ),
        rotary_pos_emb("GptOss", "half_table"),
        load_balancing_loss("GptOss"),
        causal_loss("GptOss"),
    ),
)
