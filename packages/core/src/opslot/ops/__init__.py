"""The contracts that opslot itself brings, one file per op."""

from .._backend import Backend
from .._device import CORE_KINDS
from . import (
    cross_entropy_loss,
    glu,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rms_norm_gated,
    rotary_pos_emb,
    rotary_pos_emb_vision,
)

BACKEND = Backend(
    api=1,
    contracts=(
        cross_entropy_loss.CONTRACT,
        *glu.CONTRACTS,
        load_balancing_loss.CONTRACT,
        moe_experts.CONTRACT,
        *rms_norm.CONTRACTS,
        *rms_norm_gated.CONTRACTS,
        *rotary_pos_emb.CONTRACTS,
        rotary_pos_emb_vision.CONTRACT,
    ),
    device_kinds=CORE_KINDS,
)
