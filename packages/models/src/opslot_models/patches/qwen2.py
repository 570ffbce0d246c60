"""Qwen2: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder

SPEC = ModelSpec(
    family="qwen2",
    source="transformers.models.qwen2.modeling_qwen2",
    guards=dense_decoder("Qwen2"),
)
