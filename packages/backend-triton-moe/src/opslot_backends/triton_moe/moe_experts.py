"""moe_experts/standard: the choices sorted by expert on the device, and persistent grouped products in Triton.

Forward keeps the product of gate and up alone. Backward computes the activation from it again and writes its gradient
over it; a second backward through the same graph computes it anew.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from opslot.autograd import first_order, matmul_dtype
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._kernels import experts as _kernels
from ._route import TILE, Route, route


class _Blocks(NamedTuple):
    """Columns and depth of a tile, with the warps and the stages of its pipeline."""

    columns: int
    depth: int
    warps: int
    stages: int
    rows: int = TILE


# Measured on an H200 in bfloat16. What float32 takes fills the same shared memory.
_UP = {2: _Blocks(128, 64, 8, 3), 4: _Blocks(64, 32, 8, 3)}
_PRODUCT = {2: _Blocks(256, 64, 8, 3), 4: _Blocks(128, 32, 8, 3)}
_GRADIENT = {2: _Blocks(256, 64, 8, 3), 4: _Blocks(128, 32, 8, 3)}
_GROUP = 8


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed SwiGLU experts. Products of float32 are three of TF32 each, which is as exact."""
    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            "moe_experts/standard: triton needs top_k_index and top_k_weights of one shape [T, K], "
            f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )
    dtype = matmul_dtype(hidden_states)
    if dtype != hidden_states.dtype:  # autocast
        gate_up, down = gate_up.to(dtype), down.to(dtype)
    if gate_up.dtype != dtype or down.dtype != dtype:
        raise ValueError(
            f"moe_experts/standard: triton needs one dtype, got hidden_states {dtype}, gate_up {gate_up.dtype} and "
            f"down {down.dtype}"
        )
    x = hidden_states.to(dtype)
    tokens, width = x.shape
    experts, inner = down.shape[0], down.shape[2]
    # Rows that descriptors read begin at a multiple of 16 bytes.
    unit = 16 // dtype.itemsize
    if width % unit or inner % unit:
        more, further = -width % unit, -inner % unit
        gate_up = F.pad(gate_up.view(experts, 2, inner, width), (0, more, 0, further)).flatten(1, 2)
        x, down = F.pad(x, (0, more)), F.pad(down, (0, further, 0, more))
    if tokens == 0:  # as one token that no expert serves
        x, top_k_weights = F.pad(x, (0, 0, 0, 1)), F.pad(top_k_weights, (0, 0, 0, 1))
        top_k_index = F.pad(top_k_index, (0, 0, 0, 1), value=experts)
    out: Tensor = _Experts.apply(x, top_k_index, top_k_weights, gate_up, down)  # type: ignore[no-untyped-call]
    return out[:tokens, :width].to(hidden_states.dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        x, weights, gate_up, down = _aligned(x), weights.contiguous(), _aligned(gate_up), _aligned(down)
        plan = route(index, down.shape[0])
        hidden, active = _up(x, weights, gate_up, plan, keep=any(ctx.needs_input_grad))
        rows = _product(active, down, plan, transposed=True)
        ctx.save_for_backward(x, weights, gate_up, down, hidden, *plan)
        ctx.spent = False
        return _combine(rows, plan, x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, hidden, *parts = ctx.saved_tensors
        plan = Route(*parts)
        want_x, _, want_weights, want_gate_up, want_down = ctx.needs_input_grad
        d_x = d_weights = d_gate_up = d_down = None
        if ctx.spent:  # by an earlier backward through this graph, which wrote its gradient over it
            hidden, _ = _up(x, weights, gate_up, plan, keep=True)
        ctx.spent = True
        rows = _gather(_aligned(grad), plan, weights.shape[1])
        d_active = _product(rows, down, plan, transposed=False)
        active, d_routing = _activation_gradient(d_active, hidden, weights, plan)
        del d_active
        if want_weights:
            d_weights = d_routing.view(weights.shape).to(weights.dtype)
        if want_down:
            d_down = _weight_gradient(rows, active, plan, down)
        del rows, active
        if want_gate_up:
            d_gate_up = _weight_gradient(hidden.flatten(1), _gather(x, plan, weights.shape[1]), plan, gate_up)
        if want_x:
            d_x = _combine(_product(hidden.flatten(1), gate_up, plan, transposed=False), plan, x)
        return d_x, None, d_weights, d_gate_up, d_down


def _up(x: Tensor, weights: Tensor, gate_up: Tensor, plan: Route, *, keep: bool) -> tuple[Tensor, Tensor]:
    rows, (experts, twice, width) = plan.choice.shape[0], gate_up.shape
    inner = twice // 2
    hidden = x.new_empty(rows if keep else TILE, 2, inner)
    active = x.new_empty(rows, inner)
    blocks = _UP[x.element_size()]
    _kernels.up[(_programs(x),)](
        x,
        _tiles(gate_up.view(experts, 2, inner, width), 1, 2, blocks.columns, blocks.depth),
        _tiles(hidden, TILE, 1, blocks.columns),
        _tiles(active, TILE, blocks.columns),
        plan.choice,
        weights,
        plan.expert,
        plan.tiles,
        weights.numel(),
        width,
        inner,
        weights.shape[1],
        TILE,
        blocks.columns,
        blocks.depth,
        _GROUP,
        _precision(x),
        keep,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return hidden, active


def _product(rows: Tensor, weight: Tensor, plan: Route, *, transposed: bool) -> Tensor:
    size = weight.shape[1] if transposed else weight.shape[2]
    out = rows.new_empty(rows.shape[0], size)
    blocks = _PRODUCT[rows.element_size()]
    part = (blocks.columns, blocks.depth) if transposed else (blocks.depth, blocks.columns)
    _kernels.product[(_programs(rows),)](
        _tiles(rows, TILE, blocks.depth),
        _tiles(weight, 1, *part),
        _tiles(out, TILE, blocks.columns),
        plan.expert,
        plan.tiles,
        size,
        rows.shape[1],
        TILE,
        blocks.columns,
        blocks.depth,
        _GROUP,
        _precision(rows),
        transposed,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def _weight_gradient(left: Tensor, right: Tensor, plan: Route, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    blocks = _GRADIENT[left.element_size()]
    experts, height, width = like.shape
    _kernels.weight_gradient[(_programs(left),)](
        _tiles(left, blocks.depth, blocks.rows),
        _tiles(right, blocks.depth, blocks.columns),
        _tiles(out, 1, blocks.rows, blocks.columns),
        plan.first,
        plan.rows,
        experts,
        height,
        width,
        blocks.rows,
        blocks.columns,
        blocks.depth,
        _precision(left),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def _activation_gradient(grad: Tensor, hidden: Tensor, weights: Tensor, plan: Route) -> tuple[Tensor, Tensor]:
    """What the second product was given, and the gradient of the routing weights; that of `hidden` in its place."""
    active = torch.empty_like(grad)
    d_weights = torch.zeros(weights.numel(), device=weights.device)  # a choice that is nobody's has none
    inner = grad.shape[1]
    _kernels.activation_gradient[(plan.choice.shape[0] // 8,)](
        grad, hidden, active, d_weights, plan.choice, weights, plan.tiles, weights.numel(), inner, TILE, 8, 256
    )
    return active, d_weights


def _gather(x: Tensor, plan: Route, choices: int) -> Tensor:
    out = x.new_empty(plan.choice.shape[0], x.shape[1])
    _kernels.gather[(out.shape[0] // 8,)](
        x, out, plan.choice, plan.tiles, plan.place.shape[0], x.shape[1], choices, TILE, 8, 1024, num_warps=8
    )
    return out


def _combine(rows: Tensor, plan: Route, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    tokens, width = like.shape
    block = min(2048, triton.next_power_of_2(width))
    choices = plan.place.shape[0] // tokens
    _kernels.combine[(tokens, triton.cdiv(width, block))](rows, plan.place, out, width, choices, block)
    return out


def _tiles(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from an address that descriptors take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _programs(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _precision(tensor: Tensor) -> str:
    return "tf32x3" if tensor.dtype is torch.float32 else "tf32"
