from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
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
}
# Every op of a family runs, and what only some of its models have: biases, sliding windows, a dense layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "mlp_bias": True, "attention_bias": True},
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
        return AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})

    return make


@pytest.fixture
def every_kernel() -> dict[str, str]:
    """A kernel for every op: `auto` leaves some to the model's own code on a CPU."""
    ops = ("rms_norm", "rotary_pos_emb", "glu", "moe_experts", "load_balancing_loss")
    return {**dict.fromkeys(ops, "torch"), "cross_entropy_loss": "chunk_loss"}


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
