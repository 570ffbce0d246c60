"""The guards of a decoder in Llama's manner. `prefix` is what the family's class names begin with."""

from opslot_patchgen import CallGuard, EntryGuard, Guard, RegionGuard, Slot


def dense_decoder(prefix: str) -> tuple[Guard, ...]:
    """All that a family without experts needs. A family that differs in one place takes the others by name."""
    return (rms_norm(prefix), swiglu(prefix), rotary_pos_emb(prefix), causal_loss(prefix))


def rms_norm(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNorm.forward",
        slot=Slot("rms_norm", "standard"),
        result="kernel(hidden_states, self.weight, self.variance_epsilon)",
    )


def swiglu(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}MLP.forward",
        slot=Slot("glu", "swiglu", activation="act_fn"),
        result="self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))",
    )


def rotary_pos_emb(prefix: str) -> Guard:
    return CallGuard(
        target=f"{prefix}Attention.forward",
        slot=Slot("rotary_pos_emb", "full"),
        call="apply_rotary_pos_emb",
    )


def causal_loss(prefix: str) -> Guard:
    return RegionGuard(
        target=f"{prefix}ForCausalLM.forward",
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
    )
