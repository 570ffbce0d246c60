"""The guards of a decoder in Llama's manner. `prefix` is what the family's class names begin with."""

from opslot_patchgen import CallGuard, EntryGuard, ForwardGuard, Guard, RegionGuard, Slot


def dense_decoder(prefix: str) -> tuple[Guard, ...]:
    """All that a family without experts needs. A family that differs in one place takes the others by name."""
    return (rms_norm(prefix), swiglu(prefix), rotary_pos_emb(prefix), causal_loss(prefix))


def rms_norm(prefix: str, variant: str = "standard", *, since: tuple[str, str] | None = None) -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNorm.forward",
        slot=Slot("rms_norm", variant),
        since=since,
        result="kernel(hidden_states, self.weight, self.variance_epsilon)",
    )


def unweighted_norm(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}UnweightedRMSNorm.forward",
        slot=Slot("rms_norm", "unweighted"),
        result="kernel(x, self.eps)",
    )


def gated_norm(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNormGated.forward",
        slot=Slot("rms_norm_gated", "standard"),
        result="kernel(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)",
    )


def zero_centered_norm(prefix: str) -> Guard:
    return EntryGuard(
        target=f"{prefix}RMSNorm.forward",
        slot=Slot("rms_norm", "zero_centered"),
        result="kernel(x, self.weight, self.eps)",
    )


def swiglu(prefix: str, name: str = "MLP") -> Guard:
    return EntryGuard(
        target=f"{prefix}{name}.forward",
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


def interleaved_rotary_pos_emb(owner: str, *, check: str | None = None) -> Guard:
    return CallGuard(
        target=f"{owner}.forward",
        slot=Slot("rotary_pos_emb", "interleaved", check=check),
        call="apply_rotary_pos_emb_interleave",
    )


def rotary_pos_emb_vision(prefix: str) -> Guard:
    return CallGuard(
        target=f"{prefix}VisionAttention.forward",
        slot=Slot("rotary_pos_emb_vision", "full"),
        call="apply_rotary_pos_emb_vision",
    )


PACKED = "packs_alike(self, kwargs)"
PACKS = ("opslot_models.adoption:packs_alike",)


def gated_delta_net(prefix: str) -> tuple[Guard, ...]:
    """The calls, since a decorator of the functions runs fla or causal_conv1d in their place where it is installed.

    A collator that packs sequences passes `cu_seq_lens_q`, which upstream gives to the delta rule alone.
    """
    target = f"{prefix}GatedDeltaNet.forward"
    return (
        gated_norm(prefix),
        CallGuard(
            target=target,
            slot=Slot("causal_conv1d", "standard", check="opslot_models.adoption:convolution_obstacle"),
            call="causal_conv1d_fn",
            when=PACKED,
            uses=PACKS,
            forwarded=(("cu_seqlens", "cu_seq_lens_q"),),
        ),
        CallGuard(
            target=target,
            slot=Slot("chunk_gated_delta_rule", "standard"),
            call="torch_chunk_gated_delta_rule",
            when=PACKED,
            uses=PACKS,
            forwarded=(),
        ),
    )


# A kernel returns no attention weights and drops none of them, so it leaves those calls to upstream.
SPARSE = "runs_sparse(self, attention_mask, kwargs)"
RUNS_SPARSE = ("opslot_models.adoption:runs_sparse",)
DECODE_STEP = "computes for one token with a state, at decoding: the contracts are of whole sequences"


def causal_loss(prefix: str, *arguments: str, head: str = "ForCausalLM", linear: str = "lm_head") -> Guard:
    """`arguments` are what the family does to its logits before the loss, as keywords of the kernel."""
    check = "loss_obstacle" if linear == "lm_head" else f"{linear}_loss_obstacle"
    return RegionGuard(
        target=f"{prefix}{head}.forward",
        slot=Slot("cross_entropy_loss", "causal", check=f"opslot_models.adoption:{check}"),
        first=f"self.{linear}",
        last="self.loss_function",
        # A loss function that the user sets after bind is the user's choice, and runs.
        when="labels is not None and torch.is_grad_enabled() and own_loss(self) is None",
        uses=("opslot_models.adoption:own_loss",),
        cleared=("logits",),
        result="loss",
        arguments=(f"self.cross_entropy_loss_op.weight(self.{linear})", "labels", *arguments),
        forwarded=(("num_items_in_batch", None), ("ignore_index", -100), ("shift_labels", None)),
    )


def experts(prefix: str) -> Guard:
    return ForwardGuard(
        target=f"{prefix}Experts",
        slot=Slot("moe_experts", "standard", activation="act_fn", check="opslot_models.adoption:experts_obstacle"),
        attributes=("gate_up_proj", "down_proj"),
    )


def load_balancing_loss(prefix: str, head: str = "ForCausalLM") -> Guard:
    return CallGuard(
        target=f"{prefix}{head}.forward",
        slot=Slot("load_balancing_loss", "standard"),
        call="load_balancing_loss_func",
        # While generating, upstream gives it the mask of all tokens and the router's logits of one.
        when="torch.is_grad_enabled()",
    )
