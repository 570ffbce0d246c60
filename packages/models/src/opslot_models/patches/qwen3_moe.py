"""Qwen3-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import CallGuard, ForwardGuard, ModelSpec, Slot

from ._decoder import dense_decoder

SPEC = ModelSpec(
    family="qwen3_moe",
    source="transformers.models.qwen3_moe.modeling_qwen3_moe",
    guards=(
        *dense_decoder("Qwen3Moe"),
        ForwardGuard(
            target="Qwen3MoeExperts",
            slot=Slot("moe_experts", "standard", activation="act_fn", check="opslot_models.adoption:experts_obstacle"),
            attributes=("gate_up_proj", "down_proj"),
        ),
        CallGuard(
            target="Qwen3MoeForCausalLM.forward",
            slot=Slot("load_balancing_loss", "standard"),
            call="load_balancing_loss_func",
        ),
    ),
)
