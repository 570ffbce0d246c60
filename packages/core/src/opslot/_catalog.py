"""Catalog: which distribution of this project brings a kernel, so that an error can say what to install.

Names only. Nothing is loaded from here, and a backend that is installed speaks for itself.
"""

_LIGER = "opslot-backend-liger"
_TRITON = "opslot-backend-triton-moe"
_QUACK = "opslot-backend-quack"
_FLA = "opslot-backend-fla"
_TILELANG = "opslot-backend-tilelang"
_NPU = "opslot-backend-npu"
_TORCH = "opslot-backend-torch"

# op: {kernel: distribution}. Ops stand here before their contracts do: their fields in a configuration are known.
KERNELS: dict[str, dict[str, str]] = {
    "rms_norm": {"liger": _LIGER, "quack": _QUACK, "triton": _TRITON, "npu": _NPU, "torch": _TORCH},
    "rms_norm_gated": {"fla": _FLA, "npu": _NPU},
    "rotary_pos_emb": {"liger": _LIGER, "triton": _TRITON, "npu": _NPU, "torch": _TORCH},
    "rotary_pos_emb_vision": {"npu": _NPU},
    "glu": {"liger": _LIGER, "torch": _TORCH},
    "moe_experts": {"liger": _LIGER, "triton": _TRITON, "quack": _QUACK, "npu": _NPU, "torch": _TORCH},
    "cross_entropy_loss": {"liger": _LIGER, "chunk_loss": _TORCH, "npu": _NPU},
    "load_balancing_loss": {"triton": _TRITON, "torch": _TORCH},
    "causal_conv1d": {"fla": _FLA, "npu": _NPU},
    "chunk_gated_delta_rule": {"fla": _FLA, "flash_qla": _FLA, "npu": _NPU, "npu_ascendc": _NPU},
    "dsa_indexer": {"tilelang": _TILELANG},
    "dsa_attention": {"tilelang": _TILELANG},
    "mhc": {"tilelang": _TILELANG},
}
_ALIASES = {"liger_kernel": "liger"}


def distribution_of(op: str, name: str) -> str | None:
    """The distribution that brings kernel `name` for `op`, or None when no distribution of this project does."""
    return KERNELS.get(op, {}).get(_ALIASES.get(name, name))


def op_of_field(field: str) -> str | None:
    """The op that a configuration field means, for ops whose contract is not installed."""
    op = field.removesuffix("_implementation")
    return op if op in KERNELS else None
