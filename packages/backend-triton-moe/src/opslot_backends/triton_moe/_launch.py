"""Where a kernel is launched: on its tensors' device, which need not be the current one."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device. Nothing to choose on the CPU, where its interpreter runs."""
    if not tensor.is_cuda:
        return nullcontext()
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard
