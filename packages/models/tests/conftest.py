from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3MoeConfig


@pytest.fixture
def config() -> Callable[..., PreTrainedConfig]:
    """A Qwen3-MoE in which every op runs: one dense layer, two sparse ones, router logits recorded."""

    def make(**changes: object) -> PreTrainedConfig:
        return Qwen3MoeConfig(
            **{
                "vocab_size": 96,
                "hidden_size": 64,
                "intermediate_size": 96,
                "moe_intermediate_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [1],
                "output_router_logits": True,
                "max_position_embeddings": 64,
                "pad_token_id": 0,
                **changes,
            }
        )

    return make


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
