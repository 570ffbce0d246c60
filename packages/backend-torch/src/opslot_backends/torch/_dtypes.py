"""Which dtype eager would multiply matrices in."""

import torch


def matmul_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer would take `tensor`: autocast's where that is on, else its own.

    A custom autograd function hides its products from autocast, so the kernels cast as autocast would have.
    """
    kind = tensor.device.type
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype
