from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opslot import Backend, KernelSpec, Registry
from opslot.ops import BACKEND as CORE
from transformers import AutoConfig, PreTrainedConfig

from packages.models.tests import tiny
from packages.models.tests.parity import Recorder


@pytest.fixture
def family() -> str:
    """A test that holds for every family parametrises this; the others use the family that has every op."""
    return "qwen3_moe"


@pytest.fixture
def config(family: str) -> Callable[..., PreTrainedConfig]:
    def make(**changes: object) -> PreTrainedConfig:
        if family in tiny.COMPOSED:
            return tiny.composed(family, **changes)
        return AutoConfig.for_model(tiny.TEXT.get(family, family), **tiny.text(family, **changes))

    return make


@pytest.fixture
def media(family: str) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    """A model of text, images and more, and a batch with some of each; every image or video is four tokens."""
    if family == "gemma3":
        return _one_image()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, tiny.IMAGE, (2, 17), generator=generator)
    batch = {"input_ids": tokens}
    if "num_experts" in tiny.FAMILIES[family]:
        batch["output_router_logits"] = True  # as in `routed_batch`
    kinds = torch.zeros_like(tokens)
    for row, kind, token in ((0, 1, tiny.IMAGE), (1, 2, tiny.VIDEO)):
        tokens[row, 2], tokens[row, 7] = tiny.START, tiny.END
        tokens[row, 3:7], kinds[row, 3:7] = token, kind
    grid = torch.tensor([[1, 4, 4]])
    for name in ("pixel_values", "pixel_values_videos"):
        batch[name] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    batch |= {"image_grid_thw": grid, "video_grid_thw": grid}
    if family != "qwen3_omni_moe":
        return tiny.composed(family, num_labels=2), batch | {"mm_token_type_ids": kinds}
    return tiny.composed(family), batch


@pytest.fixture
def images() -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    """A model of text and images, and a batch with one image of four tokens."""
    return _one_image()


def _one_image() -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, tiny.IMAGE, (2, 17), generator=generator)
    tokens[0, 3:7] = tiny.IMAGE
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    types = (tokens == tiny.IMAGE).long()
    config = tiny.composed("gemma3", num_labels=2)
    return config, {"input_ids": tokens, "pixel_values": pixels, "token_type_ids": types}


@pytest.fixture
def every_kernel() -> dict[str, Any]:
    """A kernel for every op that has one: `auto` leaves some to the model's own code on a CPU."""
    return {
        "rms_norm": {"standard": "torch", "zero_centered": "eager", "fp32_weight": "eager", "unweighted": "eager"},
        "rotary_pos_emb": {"full": "torch", "partial": "eager", "half_table": "eager", "interleaved": "eager"},
        "glu": {"swiglu": "torch", "geglu_tanh": "eager", "swiglu_clamped": "eager"},
        "moe_experts": {"standard": "torch", "gpt_oss": "eager", "clamped": "eager"},
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


@pytest.fixture
def routed_batch(family: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A batch that asks for the routers' loss, where transformers 5.17 reads that from no config: with images."""
    asked = family in tiny.COMPOSED and "num_experts" in tiny.FAMILIES[family]
    return {**batch, "output_router_logits": True} if asked else batch


@pytest.fixture
def recorded():
    registry = Registry()
    registry.add(CORE, "opslot")
    recorders = {contract.key: Recorder(contract) for contract in registry.contracts()}
    kernels = tuple(
        KernelSpec(op=op, variant=v, name="recorder", target=r, deterministic=True) for (op, v), r in recorders.items()
    )
    registry.add(Backend(api=1, kernels=kernels), "recorders")
    return registry, recorders
