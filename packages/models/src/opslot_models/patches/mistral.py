"""Mistral: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import dense_decoder

SPEC = ModelSpec(
    family="mistral",
    source="transformers.models.mistral.modeling_mistral",
    guards=dense_decoder("Mistral"),
)
