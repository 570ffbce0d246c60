"""moe_experts/standard in Liger's grouped kernels: the gather and the activation are part of the first product."""

from typing import Any

import torch
from liger_kernel import ops
from torch import Tensor

from ._function import first_order, matmul_dtype
from ._implementation import require

IMPLEMENTATION = require(ops.LigerFusedMoEFunction, "moe_experts", verified=("triton",))


def implementation() -> str:
    return IMPLEMENTATION


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed experts with SwiGLU. An index of another's expert becomes the first expert with the weight 0."""
    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            f"moe_experts/standard: top_k_index and top_k_weights must both be [T, K], got {tuple(top_k_index.shape)} "
            f"and {tuple(top_k_weights.shape)}"
        )
    mine = top_k_index < gate_up.shape[0]
    index = top_k_index.masked_fill(~mine, 0).to(torch.int32)
    weights = torch.where(mine, top_k_weights, 0)
    dtype = matmul_dtype(hidden_states)
    for name, parameter in (("gate_up", gate_up), ("down", down)):
        if matmul_dtype(parameter) != dtype:
            raise ValueError(
                f"moe_experts/standard: liger needs one dtype, got hidden_states {hidden_states.dtype} and {name} "
                f"{parameter.dtype}"
            )
    out: Tensor = _Experts.apply(hidden_states.to(dtype), gate_up.to(dtype), down.to(dtype), index, weights)
    return out.to(hidden_states.dtype)


class _Experts(ops.LigerFusedMoEFunction):  # type: ignore[misc]  # Liger has no annotations
    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ops.LigerFusedMoEFunction.backward(ctx, grad)
