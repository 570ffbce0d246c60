"""Llama: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder

SPEC = ModelSpec(
    family="llama",
    source="transformers.models.llama.modeling_llama",
    guards=dense_decoder("Llama"),
)
