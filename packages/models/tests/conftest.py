from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, PreTrainedConfig

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
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
FAMILIES: dict[str, dict[str, Any]] = {
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


@pytest.fixture
def family() -> str:
    """A test that holds for every family parametrises this; the others use the family that has every op."""
    return "qwen3_moe"


@pytest.fixture
def config(family: str) -> Callable[..., PreTrainedConfig]:
    def make(**changes: object) -> PreTrainedConfig:
        model_type = {"gemma3": "gemma3_text"}.get(family, family)  # alone, without images
        return AutoConfig.for_model(model_type, **{**COMMON, **FAMILIES[family], **changes})

    return make


@pytest.fixture
def images() -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    """A model of text and images, and a batch with one image of four tokens."""
    text = {**COMMON, **FAMILIES["gemma3"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=2, **ids)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 90, (2, 17), generator=generator)
    tokens[0, 3:7] = 90
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    return config, {"input_ids": tokens, "pixel_values": pixels, "token_type_ids": (tokens == 90).long()}


@pytest.fixture
def every_kernel() -> dict[str, Any]:
    """A kernel for every op that has one: `auto` leaves some to the model's own code on a CPU."""
    return {
        "rms_norm": {"standard": "torch", "zero_centered": "eager", "fp32_weight": "eager"},
        "rotary_pos_emb": {"full": "torch", "partial": "eager", "half_table": "eager", "interleaved": "eager"},
        "glu": {"swiglu": "torch", "geglu_tanh": "eager"},
        "moe_experts": {"standard": "torch", "gpt_oss": "eager"},
        "load_balancing_loss": "torch",
        "cross_entropy_loss": "chunk_loss",
    }


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Upstream's batched experts differ from themselves from run to run otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 96, (2, 17), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
