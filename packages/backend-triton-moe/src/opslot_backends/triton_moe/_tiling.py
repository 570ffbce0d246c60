"""How the products are cut into blocks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Columns and depth of a block, whose rows are a tile's; the warps that share it and the stages of its loads."""

    columns: int
    depth: int
    warps: int
    stages: int
    rows: int = 128


_H200 = {
    "up": {2: Blocks(128, 64, 8, 3), 4: Blocks(64, 32, 8, 3)},
    "product": {2: Blocks(256, 64, 8, 3), 4: Blocks(128, 32, 8, 3)},
    "weight_gradient": {2: Blocks(256, 64, 8, 3), 4: Blocks(128, 32, 8, 3)},
}
_INTERPRETED = {
    "up": Blocks(32, 32, 1, 1),
    "product": Blocks(32, 32, 1, 1),
    "weight_gradient": Blocks(32, 16, 1, 1, 32),
}


def tile(x: Tensor) -> int:
    """Rows of a tile."""
    return 128 if x.device.type == "cuda" else 16


def blocks(kernel: str, x: Tensor) -> Blocks:
    return _H200[kernel][x.element_size()] if x.device.type == "cuda" else _INTERPRETED[kernel]


def programs(x: Tensor) -> int:
    """One for each multiprocessor."""
    if x.device.type != "cuda":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def precision(x: Tensor) -> str:
    """How products of float32 are made: as PyTorch is told to, where TF32 is not allowed by three products of it."""
    if x.dtype is not torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"
