"""Qwen3-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder, experts, load_balancing_loss

SPEC = ModelSpec(
    family="qwen3_moe",
    source="transformers.models.qwen3_moe.modeling_qwen3_moe",
    guards=(*dense_decoder("Qwen3Moe"), experts("Qwen3Moe"), load_balancing_loss("Qwen3Moe")),
)
