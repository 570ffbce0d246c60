"""The contracts that opslot itself brings, one file per op."""

from .._backend import Backend
from .._device import CORE_KINDS
from . import (
    causal_conv1d,
    chunk_gated_delta_rule,
    cross_entropy_loss,
    glu,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rotary_pos_emb,
)

BACKEND = Backend(
    api=1,
    contracts=(
        causal_conv1d.CONTRACT,
        chunk_gated_delta_rule.CONTRACT,
        cross_entropy_loss.CONTRACT,
        cross_entropy_loss.TOKEN_CLS,
        glu.CONTRACT,
        load_balancing_loss.CONTRACT,
        moe_experts.CLAMPED,
        moe_experts.CONTRACT,
        moe_experts.GPT_OSS,
        rms_norm.CONTRACT,
        rotary_pos_emb.CONTRACT,
    ),
    device_kinds=CORE_KINDS,
)
