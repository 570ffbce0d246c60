"""moe_experts/standard in Liger's grouped kernels: the gather and the activation are part of the first product."""

from typing import Any

import torch
from opslot.autograd import first_order, matmul_dtype
from torch import Tensor

from ._function import on_device_of
from ._implementation import chosen

IMPLEMENTATION, (LigerFusedMoEFunction,) = chosen(
    "moe_experts", "liger_kernel.ops.fused_moe", ("LigerFusedMoEFunction",)
)


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
    tokens, inner = top_k_index.shape[0], down.shape[-1]
    shapes = tuple(hidden_states.shape), tuple(gate_up.shape), tuple(down.shape)
    experts, hidden = gate_up.shape[0], hidden_states.shape[-1]
    # Liger takes each size from one of the tensors, and would read past the others.
    if shapes != ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)):
        raise ValueError(
            f"moe_experts/standard: hidden_states must be [T, H], gate_up [E, 2I, H] and down [E, H, I], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]} for choices of {tokens} tokens"
        )
    mine = (top_k_index >= 0) & (top_k_index < experts)
    index = top_k_index.masked_fill(~mine, 0).to(torch.int32)
    weights = torch.where(mine, top_k_weights, 0)
    dtype = matmul_dtype(hidden_states)
    for name, parameter in (("gate_up", gate_up), ("down", down)):
        if matmul_dtype(parameter) != dtype:
            raise ValueError(
                f"moe_experts/standard: liger needs one dtype, got hidden_states {hidden_states.dtype} and {name} "
                f"{parameter.dtype}"
            )
    with on_device_of(hidden_states):
        out: Tensor = _Experts.apply(hidden_states.to(dtype), gate_up.to(dtype), down.to(dtype), index, weights)
    return out.to(hidden_states.dtype)


class _Experts(LigerFusedMoEFunction):  # type: ignore[misc, valid-type]  # Liger has no annotations
    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return LigerFusedMoEFunction.backward(ctx, grad)
