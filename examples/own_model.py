"""A model of your own, without transformers: declare slots, guard the code, bind.  Run: uv run examples/own_model.py"""

import opslot
import torch
from torch import nn


class Norm(nn.Module):
    rms_norm_op = opslot.OpSlot("rms_norm", "standard")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.rms_norm_op.kernel
        if kernel is not None:
            return kernel(x, self.weight, 1e-6)
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def my_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


opslot.register(opslot.KernelSpec(op="rms_norm", name="mine", target=my_norm))
model = nn.Sequential(Norm(64), nn.Linear(64, 64), Norm(64))
x = torch.randn(2, 8, 64)
expected = model(x)
binding = opslot.bind(model, {"rms_norm": "mine"})
print(binding)
torch.testing.assert_close(model(x), expected)
binding.unbind()
assert torch.equal(model(x), expected)
