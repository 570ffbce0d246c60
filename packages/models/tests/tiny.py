"""The tiny configs that the tests of every family use. Every op of a family runs in its own."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    # Beside the variance of new embeddings, 4e-4, so that a kernel that is given another shows.
    "rms_norm_eps": 1e-4,
}
# Every op of a family runs, and what only some of its models have: biases, sliding windows, a dense layer.
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12}
# One dense layer, then one with six routed experts in two groups and a shared one.
DEEPSEEK = {
    **LATENT,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
ROUTED = {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
# One layer with the delta rule, two value heads to a key head, then one with attention.
HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Angles of time, height and width, by turns.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
PARTIAL_MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "sliding_window": 6,
        "num_key_value_heads": 1,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.5,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 2,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 0.05,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "swiglu_limit": 0.05,
        "output_router_logits": True,
    },
    "glm_moe_dsa": {
        **DEEPSEEK,
        "num_hidden_layers": 3,
        "n_group": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "indexer_types": ["full", "full", "shared"],
    },
    "qwen3_next": {**HYBRID, **ROUTED, "shared_expert_intermediate_size": 32, "rope_parameters": PARTIAL},
    "qwen3_5": {**HYBRID, "rope_parameters": PARTIAL_MROPE},
    "qwen3_5_moe": {
        **HYBRID,
        **ROUTED,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": PARTIAL_MROPE,
        "intermediate_size": None,  # it has none
    },
    "qwen3_vl": {"num_hidden_layers": 2, "rope_parameters": MROPE},
    "qwen3_vl_moe": {**ROUTED, "num_hidden_layers": 3, "mlp_only_layers": [1], "rope_parameters": MROPE},
    "qwen3_omni_moe": {**ROUTED, "num_hidden_layers": 3, "mlp_only_layers": [1], "rope_parameters": MROPE},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "output_router_logits": True,
    },
    "seed_oss": {"num_hidden_layers": 2, "residual_dropout": 0.0, "attention_dropout": 0.0, "mlp_bias": True},
    "gemma2": {
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
    },
    "llama": {"num_hidden_layers": 2, "mlp_bias": True, "attention_bias": True},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 8},
    "mixtral": {
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    },
    "olmoe": {
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "clip_qkv": 0.5,
        "output_router_logits": True,
    },
    "phi3": {
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "output_router_logits": True,
    },
}


# Model types of the text alone. The families below have no language model without images.
TEXT = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
COMPOSED = {"qwen3_omni_moe": "qwen3_omni_moe_thinker", "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl_moe"}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "n_window": 50,
    "n_window_infer": 100,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "max_source_positions": 32,
}
IMAGE, VIDEO, AUDIO_TOKEN, START, END = 90, 91, 92, 93, 94


def text(family: str, **changes: Any) -> dict[str, Any]:
    """The values of a config of text; None in `FAMILIES` takes one of `COMMON` away."""
    return {key: value for key, value in (COMMON | FAMILIES[family]).items() if value is not None} | changes


def composed(family: str, **changes: Any) -> PreTrainedConfig:
    """The config of a whole model of text, images and more; `changes` are the text's, where it has such a key."""
    top = {key: changes.pop(key) for key in ("dtype", "tie_word_embeddings", "num_labels") if key in changes}
    top |= {key: changes.pop(key) for key in ("experts_implementation", "attn_implementation") if key in changes}
    parts: dict[str, Any] = {"text_config": text(family, **changes)}
    if family == "gemma3":
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        parts["vision_config"] = {**vision, "image_size": 16, "patch_size": 4, "vision_use_head": False}
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4}
        return AutoConfig.for_model("gemma3", **parts, **ids, **top)
    deepstack = {} if family.startswith("qwen3_5") else {"deepstack_visual_indexes": [0]}
    parts["vision_config"] = {**VISION, **deepstack}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if family == "qwen3_omni_moe":
        parts["audio_config"] = AUDIO
        ids |= {"audio_token_id": AUDIO_TOKEN, "audio_start_token_id": END, "vision_start_token_id": START}
    else:
        ids |= {"vision_start_token_id": START, "vision_end_token_id": END}
    return AutoConfig.for_model(COMPOSED.get(family, family), **parts, **ids, **top)
