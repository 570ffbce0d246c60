"""The contracts that opslot itself brings, one file per op."""

from .._backend import Backend
from .._device import CORE_KINDS
from . import (
    causal_conv1d,
    chunk_gated_delta_rule,
    cross_entropy_loss,
    dsa_attention,
    dsa_indexer,
    glu,
    load_balancing_loss,
    mhc,
    moe_experts,
    rms_norm,
    rms_norm_gated,
    rotary_pos_emb,
    rotary_pos_emb_vision,
)

BACKEND = Backend(
    api=1,
    contracts=(
        *causal_conv1d.CONTRACTS,
        *chunk_gated_delta_rule.CONTRACTS,
        *cross_entropy_loss.CONTRACTS,
        *dsa_attention.CONTRACTS,
        *dsa_indexer.CONTRACTS,
        *glu.CONTRACTS,
        *load_balancing_loss.CONTRACTS,
        *mhc.CONTRACTS,
        *moe_experts.CONTRACTS,
        *rms_norm.CONTRACTS,
        *rms_norm_gated.CONTRACTS,
        *rotary_pos_emb.CONTRACTS,
        *rotary_pos_emb_vision.CONTRACTS,
    ),
    device_kinds=CORE_KINDS,
)
