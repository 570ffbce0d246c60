"""Qwen3-Omni-MoE: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import ModelSpec

from ._decoder import (
    causal_loss,
    experts,
    load_balancing_loss,
    rms_norm,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu,
)

SPEC = ModelSpec(
    family="qwen3_omni_moe",
    source="transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
    guards=(
        *(rms_norm(f"Qwen3OmniMoe{part}") for part in ("ThinkerText", "Text", "", "Code2Wav")),
        *(swiglu(f"Qwen3OmniMoe{part}") for part in ("ThinkerText", "TalkerText", "")),
        swiglu("Qwen3OmniMoeCode2Wav", "Mlp"),
        *(experts(f"Qwen3OmniMoe{part}") for part in ("ThinkerText", "TalkerText")),
        *(rotary_pos_emb(f"Qwen3OmniMoe{part}") for part in ("ThinkerText", "TalkerCodePredictor", "Code2Wav")),
        rotary_pos_emb_vision("Qwen3OmniMoe"),
        *(load_balancing_loss(f"Qwen3OmniMoe{part}", "ForConditionalGeneration") for part in ("Thinker", "Talker")),
        causal_loss("Qwen3OmniMoeThinker", head="ForConditionalGeneration"),
        causal_loss("Qwen3OmniMoeTalker", head="ForConditionalGeneration", linear="codec_head"),
    ),
    unguarded=(
        (
            "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.forward",
            "takes for a loss: its head is one of a list, chosen by the step of the generation",
        ),
    ),
)
