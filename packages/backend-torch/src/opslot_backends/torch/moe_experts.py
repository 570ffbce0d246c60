"""moe_experts/standard: tokens sorted by expert, then one matrix product an expert.

Shapes: T tokens, K choices a token, S = T * K rows in the order of their experts, H hidden, I intermediate, E experts.
Rows sent to no expert of ours (index E) sort to the tail. Nothing computes them, so their memory is never written, and
every reader of rows masks the tail by selecting, since a product with 0 would keep a NaN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order, matmul_dtype


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed SwiGLU experts. Saves the gate_up activations alone and computes the rest again in backward."""
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
        experts = gate_up.shape[0]
        by_expert, order = index.reshape(-1).sort(stable=True)
        rows = torch.arange(order.shape[0], device=order.device)
        place = torch.empty_like(order).scatter_(0, order, rows).view(index.shape)
        token = order // index.shape[1]
        routing = weights.reshape(-1)[order].unsqueeze(-1)
        ends = torch.searchsorted(by_expert, torch.arange(experts, device=order.device), right=True, out_int32=True)

        ctx.grouped = _can_group(x, gate_up, down)
        if not ctx.grouped:
            ends = ends.cpu()  # the loop reads it: once here, not again in backward
        forward = _grouped_forward if ctx.grouped else _loop("forward")
        hidden, result = forward(x, token, routing, ends, gate_up, down)
        ctx.save_for_backward(x, token, place, routing, ends, gate_up, down, hidden)
        ctx.weights_dtype = weights.dtype
        return _sum_choices(result, place, out_dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, token, place, routing, ends, gate_up, down, hidden = ctx.saved_tensors
        want_x, _, want_weights, want_gate_up, want_down, _ = ctx.needs_input_grad
        backward = _grouped_backward if ctx.grouped else _loop("backward")
        d_x, d_routing, d_gate_up, d_down = backward(
            grad.to(x.dtype),
            x,
            hidden,
            token,
            routing,
            ends,
            gate_up,
            down,
            want_x,
            want_weights,
            want_gate_up,
            want_down,
        )
        return (
            _sum_choices(d_x, place, x.dtype) if want_x else None,
            None,
            d_routing[place].to(ctx.weights_dtype) if want_weights else None,
            d_gate_up if want_gate_up else None,
            d_down if want_down else None,
            None,
        )


def _sum_choices(rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, H] -> [T, H]: add up the rows of each token. Sums in float32, and in a fixed order."""
    if rows.device.type == "cpu" and rows.dtype == dtype:
        # Gathers and adds in one pass.
        return F.embedding_bag(place, rows, mode="sum")
    return rows[place].sum(1, dtype=dtype)


def _can_group(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped_mm has a kernel for these. Elsewhere it is slower than our loop, or refuses."""
    if x.shape[0] == 0:
        return False
    if x.device.type == "cpu":
        # Its loop over experts is native there. The compiler takes it in bfloat16 alone.
        native = x.dtype in _GROUPED_ON_CPU and not torch.compiler.is_compiling()
    else:
        native = x.dtype is torch.bfloat16 and _has_grouped_kernel(x.device)
    # Rows, and the start of each operand, must be aligned to 16 bytes.
    unit = 16 // x.element_size()
    sizes = gate_up.shape[2] % unit == 0 and down.shape[2] % unit == 0
    if not (native and sizes and gate_up.is_contiguous() and down.is_contiguous()):
        return False
    # The compiler cannot trace an offset. Parameters have none, and grouped_mm refuses what is not aligned.
    return torch.compiler.is_compiling() or all(w.storage_offset() % unit == 0 for w in (gate_up, down))


_GROUPED_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)


def _has_grouped_kernel(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    )


def _grouped_forward(
    x: Tensor, token: Tensor, routing: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    # The routing weight goes in before the second product: as exact, and on the smaller matrix.
    active = F.silu(gate).mul_(up).mul_(routing)
    result = F.grouped_mm(active, down.transpose(1, 2), offs=ends)
    return hidden, result.masked_fill_(_tail(ends, token), 0)


def _grouped_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    token: Tensor,
    routing: Tensor,
    ends: Tensor,
    gate_up: Tensor,
    down: Tensor,
    want_x: bool,
    want_routing: bool,
    want_gate_up: bool,
    want_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = grad.new_empty(0)
    d_x = d_routing = d_gate_up = d_down = none
    grad = grad[token]
    gate, up = hidden.chunk(2, dim=-1)
    silu = F.silu(gate)
    active = silu * up
    if want_x or want_routing or want_gate_up:
        d_active = F.grouped_mm(grad, down, offs=ends)
    if want_routing:
        d_routing = (d_active * active).sum(-1, dtype=routing.dtype).masked_fill_(_tail(ends, token).squeeze(-1), 0)
    if want_down:
        d_down = F.grouped_mm(grad.t(), active.mul_(routing), offs=ends)
    if want_x or want_gate_up:
        d_up = silu.mul_(d_active.mul_(routing))
        d_gate = torch.ops.aten.silu_backward(d_active.mul_(up), gate)
        d_hidden = torch.cat((d_gate, d_up), dim=-1)
        if want_gate_up:
            d_gate_up = F.grouped_mm(d_hidden.t(), x[token], offs=ends)
        if want_x:
            d_x = F.grouped_mm(d_hidden, gate_up, offs=ends).masked_fill_(_tail(ends, token), 0)
    return d_x, d_routing, d_gate_up, d_down


def _tail(ends: Tensor, token: Tensor) -> Tensor:
    """[S, 1]: true for rows that belong to no expert of ours."""
    return (torch.arange(token.shape[0], device=token.device) >= ends[-1]).unsqueeze(-1)


def _loop_forward(
    x: Tensor, token: Tensor, routing: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    rows = token.shape[0]
    hidden = x.new_empty(rows, gate_up.shape[1])
    result = x.new_empty(rows, x.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            mine = slice(start, end)
            gate, up = torch.mm(x[token[mine]], gate_up[expert].t(), out=hidden[mine]).chunk(2, dim=-1)
            active = F.silu(gate).mul_(up).mul_(routing[mine])
            torch.mm(active, down[expert].t(), out=result[mine])
        start = end
    result[start:] = 0
    return hidden, result


def _loop_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    token: Tensor,
    routing: Tensor,
    ends: Tensor,
    gate_up: Tensor,
    down: Tensor,
    want_x: bool,
    want_routing: bool,
    want_gate_up: bool,
    want_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = want_x, want_routing, want_gate_up, want_down
    d_x, d_routing, d_gate_up, d_down = _loop_gradients(x, routing, gate_up, down, *wanted)
    inner = down.shape[2]
    start = 0
    for expert, end in enumerate(ends.tolist()):
        mine = slice(start, end)
        start = end
        if mine.start == mine.stop:
            for weight in (d_gate_up[expert : expert + 1], d_down[expert : expert + 1]):
                weight.zero_()
            continue
        grad_rows = grad[token[mine]]
        gate, up = hidden[mine].chunk(2, dim=-1)
        silu = F.silu(gate)
        active = silu * up
        d_active = torch.mm(grad_rows, down[expert])
        if want_routing:
            torch.sum(d_active * active, dim=-1, out=d_routing[mine])
        if want_down:
            torch.mm(grad_rows.t(), active.mul_(routing[mine]), out=d_down[expert])
        if want_x or want_gate_up:
            d_active.mul_(routing[mine])
            d_hidden = torch.empty_like(hidden[mine])
            torch.mul(d_active, silu, out=d_hidden[:, inner:])
            torch.ops.aten.silu_backward.grad_input(d_active.mul_(up), gate, grad_input=d_hidden[:, :inner])
            if want_gate_up:
                torch.mm(d_hidden.t(), x[token[mine]], out=d_gate_up[expert])
            if want_x:
                torch.mm(d_hidden, gate_up[expert], out=d_x[mine])
    d_x[start:] = 0
    d_routing[start:] = 0
    return d_x, d_routing, d_gate_up, d_down


def _loop_gradients(
    x: Tensor,
    routing: Tensor,
    gate_up: Tensor,
    down: Tensor,
    want_x: bool,
    want_routing: bool,
    want_gate_up: bool,
    want_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the gradients that are wanted, and empty tensors for those that are not."""
    rows = routing.shape[0]
    return (
        x.new_empty(rows if want_x else 0, x.shape[1]),
        routing.new_empty(rows if want_routing else 0),
        torch.empty_like(gate_up) if want_gate_up else gate_up.new_empty(0),
        torch.empty_like(down) if want_down else down.new_empty(0),
    )


# How many rows an expert gets is data, which a compiled graph cannot loop over: there the loop is one opaque operator.
_loop_forward_op = torch.library.custom_op("opslot_torch::experts_forward", _loop_forward, mutates_args=())
_loop_backward_op = torch.library.custom_op("opslot_torch::experts_backward", _loop_backward, mutates_args=())


@_loop_forward_op.register_fake
def _(x: Tensor, token: Tensor, routing: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(token.shape[0], gate_up.shape[1]), x.new_empty(token.shape[0], x.shape[1])


@_loop_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    token: Tensor,
    routing: Tensor,
    ends: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _loop_gradients(x, routing, gate_up, down, *wanted)


def _loop(name: str) -> Any:
    plain, operator = {
        "forward": (_loop_forward, _loop_forward_op),
        "backward": (_loop_backward, _loop_backward_op),
    }[name]
    return operator if torch.compiler.is_compiling() else plain
