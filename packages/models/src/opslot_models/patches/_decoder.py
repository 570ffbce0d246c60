"""The guards of a decoder in Llama's manner. `prefix` is what the family's class names begin with."""

from opslot_patchgen import CallGuard, EntryGuard, ForwardGuard, Guard, RegionGuard, Slot


def dense_decoder(prefix: str) -> tuple[Guard, ...]:
    """All that a family without experts needs. A family that differs in one place takes the others by name."""
    return (rms_norm(prefix), swiglu(prefix), rotary_pos_emb(prefix), causal_loss(prefix))


def rms_norm(prefix: str, variant: str = "standard") -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNorm.forward",
        slot=Slot("rms_norm", variant),
        result="kernel(hidden_states, self.weight, self.variance_epsilon)",
    )


def zero_centered_norm(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNorm.forward",
        slot=Slot("rms_norm", "zero_centered"),
        result="kernel(x, self.weight, self.eps)",
    )


def swiglu(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}MLP.forward",
        slot=Slot("glu", "swiglu", activation="act_fn"),
        result="self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))",
    )


def geglu(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}MLP.forward",
        slot=Slot("glu", "geglu_tanh", activation="act_fn"),
        result="self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))",
    )


def rotary_pos_emb(prefix: str, variant: str = "full") -> Guard:
    return CallGuard(
        target=f"{prefix}Attention.forward",
        slot=Slot("rotary_pos_emb", variant),
        call="apply_rotary_pos_emb",
    )


def causal_loss(prefix: str, *arguments: str, head: str = "ForCausalLM") -> Guard:
    """`arguments` are what the family does to its logits before the loss, as keywords of the kernel."""
    return RegionGuard(
        target=f"{prefix}{head}.forward",
        slot=Slot("cross_entropy_loss", "causal", check="opslot_models.adoption:loss_obstacle"),
        first="self.lm_head",
        last="self.loss_function",
        # A loss function that the user sets after bind is the user's choice, and runs.
        when="labels is not None and torch.is_grad_enabled() and own_loss(self) is None",
        uses=("opslot_models.adoption:own_loss",),
        cleared=("logits",),
        result="loss",
        arguments=("self.cross_entropy_loss_op.weight(self.lm_head)", "labels", *arguments),
        forwarded=(("num_items_in_batch", None), ("ignore_index", -100), ("shift_labels", None)),
    )


def experts(prefix: str) -> Guard:
    return ForwardGuard(
        target=f"{prefix}Experts",
        slot=Slot("moe_experts", "standard", activation="act_fn", check="opslot_models.adoption:experts_obstacle"),
        attributes=("gate_up_proj", "down_proj"),
    )


def load_balancing_loss(prefix: str) -> Guard:
    return CallGuard(
        target=f"{prefix}ForCausalLM.forward",
        slot=Slot("load_balancing_loss", "standard"),
        call="load_balancing_loss_func",
        # While generating, upstream gives it the mask of all tokens and the router's logits of one.
        when="torch.is_grad_enabled()",
    )
