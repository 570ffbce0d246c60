"""moe_experts/standard: tokens sorted by expert, then one grouped matrix product a projection.

Shapes: T tokens, K choices a token, H hidden, I intermediate, E experts; S = T * K + 1 rows in the order of their
experts. Rows of no expert of ours (index E) come after those of all experts, and no product writes them. The very last
row is a spare one that belongs to nobody: it is set to zero, and every choice of no expert reads it. So what nobody
wrote is never read, not even to be multiplied by zero, which would keep a NaN.
"""

from typing import Any

from opslot.autograd import first_order, is_watched, matmul_dtype

import torch
import torch.nn.functional as F
from torch import Tensor


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
    # Each for itself: under autocast the tokens may have its dtype already, and the weights not.
    gate_up, down = gate_up.to(matmul_dtype(gate_up)), down.to(matmul_dtype(down))
    if gate_up.dtype != dtype or down.dtype != dtype:
        raise ValueError(
            f"moe_experts/standard: torch needs one dtype, got hidden_states {dtype}, gate_up {gate_up.dtype} and "
            f"down {down.dtype}"
        )
    tokens = hidden_states.shape[0]
    x = hidden_states.to(dtype)
    if tokens == 0:  # as one token that no expert serves
        x, top_k_weights = F.pad(x, (0, 0, 0, 1)), F.pad(top_k_weights, (0, 0, 0, 1))
        top_k_index = F.pad(top_k_index, (0, 0, 0, 1), value=gate_up.shape[0])
    out: Tensor = _Experts.apply(x, top_k_index, top_k_weights, gate_up, down, hidden_states.dtype)  # type: ignore[no-untyped-call]
    return out if tokens else out[:0]


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
        token, routing = order // choices, weights.reshape(-1)[order].unsqueeze(-1)

        ctx.native = _has_grouped_mm(x, gate_up, down)
        if not ctx.native:
            ends = ends.cpu()  # the loop reads it: once here, and not again in backward
        product = _product(ctx.native)
        hidden = product(x[token], gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        # The routing weight goes in before the second product: as exact, and on the smaller matrix.
        active = F.silu(gate).mul_(up).mul_(routing)
        result = product(active, down.transpose(1, 2), offs=ends)
        ctx.save_for_backward(x, token, place, routing, ends, gate_up, down, hidden)
        return _sum_choices(result, place, out_dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, token, place, routing, ends, gate_up, down, hidden = ctx.saved_tensors
        want_x, _, want_weights, want_gate_up, want_down, _ = ctx.needs_input_grad
        product = _product(ctx.native)
        d_x = d_weights = d_gate_up = d_down = None
        grad = grad.to(x.dtype)[token]
        gate, up = hidden.chunk(2, dim=-1)
        silu = F.silu(gate)
        active = silu * up
        if want_x or want_weights or want_gate_up:
            d_active = product(grad, down, offs=ends)
        if want_weights:
            d_routing = (d_active * active).sum(-1, dtype=routing.dtype)
            d_routing[-1:].zero_()
            d_weights = d_routing[place]
        if want_down:
            d_down = product(grad.t(), active.mul_(routing), offs=ends)
        del grad, active
        if want_x or want_gate_up:
            d_up = silu.mul_(d_active.mul_(routing))
            d_gate = torch.ops.aten.silu_backward(d_active.mul_(up), gate)
            d_hidden = torch.cat((d_gate, d_up), dim=-1)
            del silu, d_active, d_gate, d_up
            if want_gate_up:
                d_gate_up = product(d_hidden.t(), x[token], offs=ends)
            if want_x:
                d_x = _sum_choices(product(d_hidden, gate_up, offs=ends), place, x.dtype)
        return d_x, None, d_weights, d_gate_up, d_down, None


def _sum_choices(rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, H] -> [T, H]: add up the rows of each token. Sums in float32, and in a fixed order."""
    if is_watched():
        rows = rows.clone()
    rows[-1:].zero_()  # assigning 0 would wait for the device
    if rows.device.type == "cpu" and rows.dtype == dtype:
        return F.embedding_bag(place, rows, mode="sum")  # gathers and adds in one pass
    return rows[place].sum(1, dtype=dtype)


def _has_grouped_mm(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped_mm takes these, in a kernel of its own: elsewhere it is a loop no better than ours."""
    if x.device.type == "cpu":
        # The compiler takes it in bfloat16 alone.
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


def _product(native: bool) -> Any:
    if native:
        return F.grouped_mm
    # How many rows an expert gets is data, which a compiled graph cannot loop over: there it is one opaque operator.
    return _loop_op if is_watched() else _loop


def _loop(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """What F.grouped_mm does, one product an expert: rows [S, .] @ [E, ., .], or columns [., S] @ rows [S, .]."""
    out = _loop_output(a, b, offs)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            torch.mm(a[start:end], b[expert], out=out[start:end])
        else:
            torch.mm(a[:, start:end], b[start:end], out=out[expert])
        start = end
    if b.dim() == 3:
        out[start:].zero_()  # what an operator returns is defined
    return out


def _loop_output(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_empty(len(offs), a.shape[0], b.shape[1])


_loop_op = torch.library.custom_op("opslot_torch::grouped_mm", _loop, mutates_args=())
_loop_op.register_fake(_loop_output)
