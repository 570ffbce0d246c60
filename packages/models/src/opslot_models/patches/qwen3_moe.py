"""Qwen3-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import CallGuard, EntryGuard, ForwardGuard, ModelSpec, RegionGuard, Slot

SPEC = ModelSpec(
    family="qwen3_moe",
    source="transformers.models.qwen3_moe.modeling_qwen3_moe",
    guards=(
        EntryGuard(
            target="Qwen3MoeRMSNorm.forward",
            slot=Slot("rms_norm", "standard"),
            result="kernel(hidden_states, self.weight, self.variance_epsilon)",
        ),
        EntryGuard(
            target="Qwen3MoeMLP.forward",
            slot=Slot("glu", "swiglu", activation="act_fn"),
            result="self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))",
        ),
        CallGuard(
            target="Qwen3MoeAttention.forward",
            slot=Slot("rotary_pos_emb", "full"),
            call="apply_rotary_pos_emb",
        ),
        ForwardGuard(
            target="Qwen3MoeExperts",
            slot=Slot("moe_experts", "standard", activation="act_fn"),
            attributes=("gate_up_proj", "down_proj"),
        ),
        RegionGuard(
            target="Qwen3MoeForCausalLM.forward",
            slot=Slot("cross_entropy_loss", "causal", check="opslot_models.adoption:loss_obstacle"),
            first="self.lm_head",
            last="self.loss_function",
            # A loss function that the user sets after bind is the user's choice, and runs.
            when="labels is not None and torch.is_grad_enabled() and own_loss(self) is None",
            uses=("opslot_models.adoption:own_loss",),
            cleared=("logits",),
            result="loss",
            arguments=(
                "hidden_states",
                "self.cross_entropy_loss_op.weight(self.lm_head)",
                "labels",
                'num_items_in_batch=kwargs.get("num_items_in_batch")',
                'ignore_index=kwargs.get("ignore_index", -100)',
                'shift_labels=kwargs.get("shift_labels")',
            ),
        ),
        CallGuard(
            target="Qwen3MoeForCausalLM.forward",
            slot=Slot("load_balancing_loss", "standard"),
            call="load_balancing_loss_func",
        ),
    ),
)
