"""moe_experts/standard in Liger's grouped kernels: gather and activation in the first product, a hand-written backward."""

from typing import Any

import torch
from liger_kernel import ops
from torch import Tensor

from ._function import first_order
from ._implementation import require

IMPLEMENTATION = require(ops.LigerFusedMoEFunction, "moe_experts", verified=("triton",))


def implementation() -> str:
    return IMPLEMENTATION


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    mine = top_k_index < gate_up.shape[0]
    index = top_k_index.masked_fill(~mine, 0).to(torch.int32)
    weights = torch.where(mine, top_k_weights, 0).to(hidden_states.dtype)
    out: Tensor = _Experts.apply(hidden_states, gate_up, down, index, weights)
    return out


class _Experts(ops.LigerFusedMoEFunction):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_order(ops.LigerFusedMoEFunction.backward)(ctx, grad)
