"""Qwen3-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder, experts

SPEC = ModelSpec(
    family="qwen3_moe",
    source="transformers.models.qwen3_moe.modeling_qwen3_moe",
    guards=(*dense_decoder("Qwen3Moe"), *experts("Qwen3Moe")),
)
