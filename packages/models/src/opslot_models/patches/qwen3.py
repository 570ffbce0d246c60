"""Qwen3: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder

SPEC = ModelSpec(
    family="qwen3",
    source="transformers.models.qwen3.modeling_qwen3",
    guards=dense_decoder("Qwen3"),
)
