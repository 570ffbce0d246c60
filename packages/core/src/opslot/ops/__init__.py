"""The contracts that opslot itself brings, one file per op."""

from .._backend import Backend
from .._device import CORE_KINDS
from . import (
    cross_entropy_loss,
    dsa_attention,
    dsa_indexer,
    glu,
    load_balancing_loss,
    mhc,
    moe_experts,
    rms_norm,
    rotary_pos_emb,
)

BACKEND = Backend(
    api=1,
    contracts=(
        cross_entropy_loss.CONTRACT,
        *dsa_attention.CONTRACTS,
        *dsa_indexer.CONTRACTS,
        glu.CONTRACT,
        load_balancing_loss.CONTRACT,
        *mhc.CONTRACTS,
        moe_experts.CONTRACT,
        rms_norm.CONTRACT,
        rotary_pos_emb.CONTRACT,
    ),
    device_kinds=CORE_KINDS,
)
