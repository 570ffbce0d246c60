"""moe_experts/standard: tokens sorted by expert, then one grouped matrix product a projection.

Shapes: T tokens, K choices a token, H hidden, I intermediate, E experts; S = T * K + 1 rows in the order of their
experts. Rows of no expert of ours (index E) come after those of all experts, and no product writes them. The very last
row is a spare one that belongs to nobody: it is set to zero, and every choice of no expert reads it. So what nobody
wrote is never read, not even to be multiplied by zero, which would keep a NaN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order, matmul_dtype


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed SwiGLU experts. Keeps the gate_up activations alone and computes the rest again in backward."""
    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            "moe_experts/standard: torch needs top_k_index and top_k_weights of one shape [T, K], "
            f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )
    dtype = matmul_dtype(hidden_states)
    if dtype != hidden_states.dtype:  # autocast
        gate_up, down = gate_up.to(dtype), down.to(dtype)
    if gate_up.dtype != dtype or down.dtype != dtype:
        raise ValueError(
            f"moe_experts/standard: torch needs one dtype, got hidden_states {dtype}, gate_up {gate_up.dtype} and "
            f"down {down.dtype}"
        )
    out: Tensor = _Experts.apply(
        hidden_states.to(dtype), top_k_index, top_k_weights, gate_up, down, hidden_states.dtype
    )  # type: ignore[no-untyped-call]
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        experts, choices = gate_up.shape[0], index.shape[1]
        by_expert, order = index.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(experts, device=x.device), right=True, out_int32=True)
        spare = order.shape[0]
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(spare, device=x.device))
        place = torch.where(rank < ends[-1], rank, spare).view(index.shape)
        order = F.pad(order, (0, 1))
        token, routing = order // choices, weights.reshape(-1)[order].unsqueeze(-1) if spare else weights.new_zeros(1, 1)

        ctx.product = _product_for(x, gate_up, down)
        if ctx.product is not F.grouped_mm:
            ends = ends.cpu()  # the loop reads it: once here, and not again in backward
        hidden = ctx.product(x[token], gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        # The routing weight goes in before the second product: as exact, and on the smaller matrix.
        active = F.silu(gate).mul_(up).mul_(routing)
        result = ctx.product(active, down.transpose(1, 2), offs=ends)
        ctx.save_for_backward(x, token, place, routing, ends, gate_up, down, hidden)
        ctx.weights_dtype = weights.dtype
        return _sum_choices(result, place, out_dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, token, place, routing, ends, gate_up, down, hidden = ctx.saved_tensors
        want_x, _, want_weights, want_gate_up, want_down, _ = ctx.needs_input_grad
        d_x = d_weights = d_gate_up = d_down = None
        grad = grad.to(x.dtype)[token]
        gate, up = hidden.chunk(2, dim=-1)
        silu = F.silu(gate)
        active = silu * up
        d_active = ctx.product(grad, down, offs=ends)
        if want_weights:
            d_routing = (d_active * active).sum(-1, dtype=routing.dtype)
            d_routing[-1] = 0
            d_weights = d_routing[place]
        if want_down:
            d_down = ctx.product(grad.t(), active.mul_(routing), offs=ends)
        del grad, active
        if want_x or want_gate_up:
            d_up = silu.mul_(d_active.mul_(routing))
            d_gate = torch.ops.aten.silu_backward(d_active.mul_(up), gate)
            d_hidden = torch.cat((d_gate, d_up), dim=-1)
            del silu, d_active, d_gate, d_up
            if want_gate_up:
                d_gate_up = ctx.product(d_hidden.t(), x[token], offs=ends)
            if want_x:
                d_x = _sum_choices(ctx.product(d_hidden, gate_up, offs=ends), place, x.dtype)
        return d_x, None, d_weights, d_gate_up, d_down, None


def _sum_choices(rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, H] -> [T, H]: add up the rows of each token. Sums in float32, and in a fixed order."""
    rows[-1] = 0
    if rows.device.type == "cpu" and rows.dtype == dtype:
        return F.embedding_bag(place, rows, mode="sum")  # gathers and adds in one pass
    return rows[place].sum(1, dtype=dtype)
