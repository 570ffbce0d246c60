"""The contract's reference, its samples, and the probe of the device kind."""

from opslot import Sample


def frozen_scale(x, factor=2.0):
    """x * factor, elementwise."""
    return x * factor


def samples(device, dtype, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, generator=generator).to(device, dtype).requires_grad_()
    yield Sample("matrix", (x,))
    yield Sample(name="keyword", args=(x,), kwargs={"factor": 3.0})


def probe(index):
    return None
