"""moe_experts: the choices sorted by expert on the device, and persistent grouped products in Triton.

Forward keeps the product of gate and up alone. Backward computes the activation from it again and writes its gradient
over it; a second backward through the same graph computes it anew.

E experts, T tokens of K choices each, H hidden, I intermediate; P rows in the order of the experts (`_route`).
"""

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from opslot import KernelUnavailable
from opslot.autograd import first_order, has_addresses, matmul_dtype
from torch import Tensor

from . import _grouped, _tiling
from ._grouped import Maths, Routed
from ._launch import device_of
from ._route import Route, check, is_checking, route, rows_of


def moe_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed SwiGLU experts."""
    maths = Maths(1.0, inf, 0.0, paired=False)
    return _experts("standard", maths, hidden_states, top_k_index, top_k_weights, gate_up, None, down, None)


def moe_experts_clamped(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Routed SwiGLU experts, gate and up clamped in the epilogue of their product."""
    maths = Maths(1.0, _positive("clamped", limit), 0.0, paired=False)
    return _experts("clamped", maths, hidden_states, top_k_index, top_k_weights, gate_up, None, down, None)


def moe_experts_gpt_oss(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Routed experts of gpt-oss, whose weights are read as they are stored."""
    maths = Maths(float(alpha), _positive("gpt_oss", limit), 1.0, paired=True)
    return _experts("gpt_oss", maths, hidden_states, top_k_index, top_k_weights, gate_up, gate_up_bias, down, down_bias)


def _positive(variant: str, limit: float) -> float:
    if limit is None or not limit > 0:
        raise ValueError(
            f"moe_experts/{variant}: limit must be a positive number, got {limit!r}; moe_experts/standard has none"
        )
    return float(limit)


def _experts(
    variant: str,
    maths: Maths,
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    _check(variant, maths, hidden_states, index, weights, gate_up, gate_up_bias, down, down_bias)
    dtype = matmul_dtype(hidden_states)
    named = {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}
    # Each for itself: under autocast the tokens may have its dtype already, and the weights not.
    parameters = {name: None if given is None else given.to(matmul_dtype(given)) for name, given in named.items()}
    apart = None
    if down_bias is not None and parameters["down_bias"] is not down_bias:  # autocast
        apart, parameters["down_bias"] = down_bias, torch.zeros_like(down_bias, dtype=dtype)
    others = {name: given.dtype for name, given in parameters.items() if given is not None and given.dtype != dtype}
    if others:
        raise ValueError(
            f"moe_experts/{variant}: triton needs one dtype, got hidden_states of {dtype} and "
            f"{', '.join(f'{name} of {other}' for name, other in others.items())}"
        )
    x, (tokens, width) = hidden_states.to(dtype), hidden_states.shape
    experts = down.shape[0]
    inner = down.shape[1] if maths.paired else down.shape[2]
    more, further = -width % (16 // dtype.itemsize), -inner % (16 // dtype.itemsize)
    if more or further:  # rows that descriptors read begin at multiples of 16 bytes
        x, parameters = F.pad(x, (0, more)), _padded(maths, parameters, more, further)
    if tokens == 0:  # as one token that no expert serves
        x, weights, index = (
            F.pad(x, (0, 0, 0, 1)),
            F.pad(weights, (0, 0, 0, 1)),
            F.pad(index.long(), (0, 0, 0, 1), value=experts),
        )
    given = x, weights, *parameters.values()
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    out: Tensor = _Experts.apply(index, keep, *maths, *given)  # type: ignore[no-untyped-call]
    out = out[:tokens, :width].contiguous().to(hidden_states.dtype)
    return out if apart is None else out + _routed_bias(index[:tokens], weights[:tokens], apart).to(out.dtype)


def _routed_bias(index: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """What the biases of the chosen experts [E, H] add to each token: autocast leaves a bias and its gradient exact."""
    chosen = index.unsqueeze(-1) == torch.arange(bias.shape[0], device=bias.device)
    with torch.autocast(bias.device.type, enabled=False):
        return torch.where(chosen, weights.unsqueeze(-1), 0).sum(1).to(bias.dtype) @ bias


def _check(
    variant: str,
    maths: Maths,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> None:
    """The kernels take each size from one tensor, and would read past the others."""
    if index.dim() != 2 or index.shape != weights.shape:
        raise ValueError(
            f"moe_experts/{variant}: top_k_index and top_k_weights must both be [T, K], got {list(index.shape)} and "
            f"{list(weights.shape)}"
        )
    if index.is_floating_point() or index.dtype is torch.bool:
        raise ValueError(f"moe_experts/{variant}: top_k_index must be of integers, got {index.dtype}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelUnavailable(
            f"moe_experts/{variant}: triton takes float32, bfloat16 and float16, got {x.dtype}: choose eager"
        )
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"moe_experts/{variant}: hidden_states must be [T, H], gate_up and down of three dimensions, got "
            f"{list(x.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    experts, width = gate_up.shape[0], x.shape[1]
    inner = down.shape[1] if maths.paired else down.shape[2]
    expected: list[tuple[int, ...]]
    text, expected = "gate_up [E, 2I, H] and down [E, H, I]", [(experts, 2 * inner, width), (experts, width, inner)]
    given = [gate_up, down]
    if gate_up_bias is not None and down_bias is not None:
        text = "gate_up [E, H, 2I], down [E, I, H], gate_up_bias [E, 2I] and down_bias [E, H]"
        expected = [(experts, width, 2 * inner), (experts, inner, width), (experts, 2 * inner), (experts, width)]
        given += [gate_up_bias, down_bias]
    if (
        x.shape[0] != index.shape[0]
        or [tuple(tensor.shape) for tensor in given] != expected
        or 0 in (experts, inner, width)
    ):
        raise ValueError(
            f"moe_experts/{variant}: hidden_states must be [T, H], {text}, got "
            f"{', '.join(str(list(tensor.shape)) for tensor in (x, *given))} for choices of {index.shape[0]} tokens"
        )
    others = {tensor.device for tensor in (index, weights, *given)} - {x.device}
    if others:
        raise ValueError(
            f"moe_experts/{variant}: hidden_states are on {x.device}, other arguments on "
            f"{', '.join(sorted(map(str, others)))}"
        )


def _padded(maths: Maths, parameters: dict[str, Tensor | None], more: int, further: int) -> dict[str, Tensor | None]:
    """Of H + more and I + further, with zeros, which add nothing."""
    gate_up, gate_up_bias, down, down_bias = parameters.values()
    assert gate_up is not None
    assert down is not None
    if maths.paired:
        assert gate_up_bias is not None
        assert down_bias is not None
        return {
            "gate_up": F.pad(gate_up, (0, 2 * further, 0, more)),
            "gate_up_bias": F.pad(gate_up_bias, (0, 2 * further)),
            "down": F.pad(down, (0, more, 0, further)),
            "down_bias": F.pad(down_bias, (0, more)),
        }
    halves = F.pad(gate_up.reshape(gate_up.shape[0], 2, -1, gate_up.shape[2]), (0, more, 0, further))
    return {**parameters, "gate_up": halves.flatten(1, 2), "down": F.pad(down, (0, further, 0, more))}


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index: Tensor,
        keep: bool,
        alpha: float,
        limit: float,
        offset: float,
        paired: bool,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        given = x, weights, gate_up, gate_up_bias, down, down_bias
        arguments: list[Any] = [*given, index, alpha, limit, offset, paired, keep]
        plain = has_addresses(index, *given)
        out, *kept = _forward(False, *arguments) if plain else _forward_op(*arguments)
        if keep:
            ctx.save_for_backward(*given, *kept)
        # What an operator returned may be kept by whoever watched, so that backward does not write over it.
        ctx.maths, ctx.written, ctx.plain = (alpha, limit, offset, paired), False, plain
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, want = ctx.saved_tensors, list(ctx.needs_input_grad[6:])
        arguments: list[Any] = [grad, *saved, *ctx.maths, want]
        written = ctx.written
        if has_addresses(grad, *saved):
            # The graph of a backward alone may be replayed several times, whatever was written before.
            overwrite = ctx.plain and not (grad.is_cuda and torch.cuda.is_current_stream_capturing())
            ctx.written |= overwrite  # also where what follows fails halfway, and is called again
            gradients = _backward(overwrite, written, *arguments)
        else:
            gradients = _backward_op(written, *arguments)
        found = iter(gradients)
        return *(None,) * 6, *(next(found) if wanted else None for wanted in want)


def _forward(
    defined: bool,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    index: Tensor,
    alpha: float,
    limit: float,
    offset: float,
    paired: bool,
    keep: bool,
) -> list[Tensor]:
    """The result, the first product, and the route. `defined`: all memory of what is returned."""
    maths, experts = Maths(alpha, limit, offset, paired), down.shape[0]
    with device_of(x):
        if is_checking():
            check(index, experts)
        x, weights, gate_up, down = _aligned(x), weights.contiguous(), _aligned(gate_up), _aligned(down)
        gate_up_bias, down_bias = _contiguous(gate_up_bias), _contiguous(down_bias)
        tile = _tiling.tile(x, index.numel(), experts)
        routed = Routed(route(index, experts, tile), weights, tile)
        hidden, active = _grouped.up(x, gate_up, gate_up_bias, routed, maths, keep=keep, defined=defined)
        rows = _grouped.product(active, down, down_bias, routed, transposed=not paired)
        return [_grouped.combine(rows, routed), hidden, *routed.route]


def _backward(
    overwrite: bool,
    written: bool,
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    hidden: Tensor,
    choice: Tensor,
    place: Tensor,
    expert: Tensor,
    tiles: Tensor,
    first: Tensor,
    size: Tensor,
    alpha: float,
    limit: float,
    offset: float,
    paired: bool,
    want: list[bool],
) -> list[Tensor]:
    """Those gradients of the first six tensors behind `grad` that are wanted.

    `overwrite` writes the gradient of `hidden` over it; it is `written` where an earlier backward did.
    """
    maths = Maths(alpha, limit, offset, paired)
    want_x, want_weights, want_gate_up, want_gate_up_bias, want_down, want_down_bias = want
    found: dict[int, Tensor] = {}
    with device_of(x):
        grad, x, gate_up, down = _aligned(grad), _aligned(x), _aligned(gate_up), _aligned(down)
        weights, gate_up_bias, down_bias = weights.contiguous(), _contiguous(gate_up_bias), _contiguous(down_bias)
        tile = choice.shape[0] // expert.shape[0]
        routed = Routed(Route(choice, place, expert, tiles, first, size), weights, tile)
        if written:
            hidden, _ = _grouped.up(x, gate_up, gate_up_bias, routed, maths, keep=True)
        # A choice that is nobody's has the gradient zero.
        d_weights = torch.zeros(weights.numel(), device=x.device, dtype=torch.float32)
        given = _grouped.dispatch(grad, routed, down_bias, d_weights)
        d_active = _grouped.product(given, down, None, routed, transposed=paired)
        d_hidden = hidden if overwrite else torch.empty_like(hidden)
        active = _grouped.activation_gradient(d_active, hidden, d_hidden, d_weights, routed, maths)
        del d_active, hidden
        if want_weights:
            found[1] = d_weights.view(weights.shape).to(weights.dtype)
        if want_down:
            found[4] = _grouped.weight_gradient(*((active, given) if paired else (given, active)), routed)
        if want_down_bias:
            found[5] = _grouped.bias_gradient(given, routed, weighted=True)
        del given, active
        if want_gate_up:
            tokens = _grouped.dispatch(x, routed)
            found[2] = _grouped.weight_gradient(*((tokens, d_hidden) if paired else (d_hidden, tokens)), routed)
            del tokens
        if want_gate_up_bias:
            found[3] = _grouped.bias_gradient(d_hidden, routed, weighted=False)
        if want_x:
            found[0] = _grouped.combine(_grouped.product(d_hidden, gate_up, None, routed, transposed=paired), routed)
    return [found[number] for number in sorted(found)]


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from an address that descriptors take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_forward_op = torch.library.custom_op(
    "opslot_triton_moe::experts",
    lambda *arguments: _forward(True, *arguments),
    mutates_args=(),
    schema="(Tensor x, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
    "Tensor index, float alpha, float limit, float offset, bool paired, bool keep) -> Tensor[]",
)
_backward_op = torch.library.custom_op(
    "opslot_triton_moe::experts_backward",
    lambda *arguments: _backward(False, *arguments),
    mutates_args=(),
    schema="(bool written, Tensor grad, Tensor x, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, Tensor hidden, Tensor choice, Tensor place, Tensor expert, Tensor tiles, Tensor first, "
    "Tensor size, float alpha, float limit, float offset, bool paired, bool[] want) -> Tensor[]",
)


@_forward_op.register_fake
def _(x: Tensor, *arguments: Any) -> list[Tensor]:
    _, gate_up, _, down, _, index, *_, paired, keep = arguments
    experts, choices = down.shape[0], index.shape[0] * index.shape[1]
    tile = _tiling.tile(x, choices, experts)
    rows = rows_of(choices, experts, tile)

    def integers(size: int) -> Tensor:
        return x.new_empty(size, dtype=torch.int32)

    return [
        x.new_empty(x.shape),
        x.new_empty(rows if keep else tile, gate_up.shape[2 if paired else 1]),
        integers(rows),
        integers(choices),
        integers(rows // tile),
        integers(1),
        integers(experts),
        integers(experts),
    ]


@_backward_op.register_fake
def _(written: bool, grad: Tensor, *arguments: Any) -> list[Tensor]:
    return [given.new_empty(given.shape) for given, wanted in zip(arguments, arguments[-1], strict=False) if wanted]
