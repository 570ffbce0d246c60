"""load_balancing_loss/standard: all layers in one launch forward and one backward, and a small one for the total.

Neighbouring layers of one number of tokens and one dtype are launched together. Backward computes the softmax again,
from the logits.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
from opslot import KernelUnavailable
from opslot.autograd import first_order, has_addresses
from torch import Tensor

from ._kernels import balance as _kernels
from ._launch import device_of

# Layers a launch: their addresses are its parameters, for which CUDA has 4 KB.
_LAYERS = 64
# Programs of a launch forward, each of which leaves sums of its own: all run at once on an H200, of whose 132
# multiprocessors each has registers for five.
_PROGRAMS = 660
_WARPS = 4
# Of the columns of a row, what lies in one thread comes in parts of 16 bytes.
_PARTS = 2
# Of a program backward: 32 a thread.
_ELEMENTS = 4096
# Experts: a row has to fit in the registers of a warp, with what is kept of it.
_LARGEST = 4096


def load_balancing_loss(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor | int:
    """Keeps the logits, not their softmax. Of equal logits a token chooses the first; 0 is more than -0."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    shape, dtype, device = gate_logits[0].shape, gate_logits[0].dtype, gate_logits[0].device
    # One look at each: with a layer in five microseconds, Python would take as long as the device.
    alike = all(x.shape == shape and x.dtype == dtype and x.device == device for x in gate_logits)
    different = gate_logits[:1] if alike else gate_logits
    if not 1 <= top_k <= num_experts or any(x.dim() != 2 or x.shape[1] != num_experts for x in different):
        raise ValueError(
            "load_balancing_loss/standard: triton needs layers of [T, num_experts] and 1 <= top_k <= num_experts, got "
            f"{[list(x.shape) for x in different]} with num_experts={num_experts} and top_k={top_k}"
        )
    if num_experts > _LARGEST:
        raise KernelUnavailable(
            f"load_balancing_loss/standard: triton takes up to {_LARGEST} experts, got {num_experts}: choose eager"
        )
    weights = None
    if attention_mask is not None:
        if attention_mask.requires_grad:
            raise KernelUnavailable(
                "load_balancing_loss/standard: triton gives attention_mask no gradient, and it wants one: choose eager"
            )
        tokens = attention_mask.numel()
        if attention_mask.dim() > 2 or any(x.shape[0] != tokens for x in different):
            raise ValueError(
                "load_balancing_loss/standard: triton needs attention_mask as [B, S] or [B * S], one weight a token of "
                f"every layer, got {list(attention_mask.shape)} for layers of {[x.shape[0] for x in different]} tokens"
            )
        weights = attention_mask.detach().to(device).reshape(-1).contiguous()
    layers = gate_logits if alike else tuple([x.to(device) for x in gate_logits])
    loss: Tensor = _Balance.apply(top_k, weights, _groups(layers, alike), *layers)  # type: ignore[no-untyped-call]
    return loss


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # Not by name: torch 2.13's compiler, without gradients, counts parameters to tell whether there is a ctx, and
        # named ones before `*layers` are as many as the arguments when there is one layer.
        top_k, weights, groups, *layers = arguments
        plain = has_addresses(weights, *layers)
        loss, slope = (_forward if plain else _forward_op)(layers, groups, weights, top_k)
        ctx.save_for_backward(slope, weights, *layers)
        ctx.groups, ctx.plain = groups, plain
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, weights, *layers = ctx.saved_tensors
        wanted, groups = ctx.needs_input_grad[3:], ctx.groups
        if not all(wanted):
            layers = [x for x, want in zip(layers, wanted, strict=True) if want]
            groups = _groups(layers, False)
        compute = _backward if ctx.plain and has_addresses(grad) else _backward_op
        stacks = compute(grad, slope, layers, groups, weights)
        gradients = iter([gradient for stack in stacks for gradient in stack.unbind()])
        return None, None, None, *[next(gradients) if want else None for want in wanted]


def _forward(layers: list[Tensor], groups: list[int], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """The loss, and its slope by the sum of each expert's probabilities."""
    experts = layers[0].shape[1]
    launches = [(group, *_shares(group, _PROGRAMS)) for group in _split(layers, groups)]
    programs = sum([len(group) * chunks for group, _, chunks in launches])
    partial = torch.empty((programs, 2, experts), dtype=torch.float32, device=layers[0].device)
    loss, slope = partial.new_empty(()), partial.new_empty(experts)
    first = 0
    with device_of(partial):
        for group, share, chunks in launches:
            _kernels.sums[(chunks, len(group))](
                tuple([x.contiguous() for x in group]),
                weights,
                partial[first:] if first else partial,
                group[0].shape[0],
                share,
                len(group),
                experts,
                top_k,
                *_tile(group[0]),
                num_warps=_WARPS,
            )
            first += len(group) * chunks
        columns = triton.next_power_of_2(experts)
        rows = max(1, 8192 // columns)
        _kernels.total[(1,)](partial, loss, slope, programs, experts, top_k, rows, columns, num_warps=16)
    return loss, slope


def _backward(
    grad: Tensor, slope: Tensor, layers: list[Tensor], groups: list[int], weights: Tensor | None
) -> list[Tensor]:
    """The gradients of each group of layers, [layers, T, E]."""
    stacks = []
    with device_of(grad):
        for group in _split(layers, groups):
            tokens, experts = group[0].shape
            columns = triton.next_power_of_2(experts)
            rows = max(1, _ELEMENTS // columns)
            stacks.append(group[0].new_empty(len(group), tokens, experts))
            _kernels.gradient[(triton.cdiv(tokens, rows), len(group))](
                tuple([x.contiguous() for x in group]),
                weights,
                slope,
                grad,
                stacks[-1],
                tokens,
                len(group),
                experts,
                rows,
                columns,
                num_warps=_WARPS,
            )
    return stacks


_forward_op = torch.library.custom_op("opslot_triton_moe::load_balancing_loss", _forward, mutates_args=())
_backward_op = torch.library.custom_op("opslot_triton_moe::load_balancing_loss_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(layers: list[Tensor], groups: list[int], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    loss = layers[0].new_empty((), dtype=torch.float32)
    return loss, loss.new_empty(layers[0].shape[1])


@_backward_op.register_fake
def _(grad: Tensor, slope: Tensor, layers: list[Tensor], groups: list[int], weights: Tensor | None) -> list[Tensor]:
    return [group[0].new_empty(len(group), *group[0].shape) for group in _split(layers, groups)]


def _groups(layers: Sequence[Tensor], alike: bool) -> list[int]:
    """How many neighbours each launch takes: of one number of tokens and one dtype, as `alike` says that all are."""
    if alike:
        return [min(_LAYERS, len(layers) - first) for first in range(0, len(layers), _LAYERS)]
    groups = [1]
    for before, x in pairwise(layers):
        if groups[-1] < _LAYERS and x.shape[0] == before.shape[0] and x.dtype == before.dtype:
            groups[-1] += 1
        else:
            groups.append(1)
    return groups


def _split(layers: list[Tensor], groups: list[int]) -> list[list[Tensor]]:
    ends = list(accumulate(groups))
    return [layers[end - size : end] for end, size in zip(ends, groups, strict=True)]


def _shares(group: Sequence[Tensor], programs: int) -> tuple[int, int]:
    """Tokens a program, and programs a layer, of about so many for all."""
    tokens = group[0].shape[0]
    rows = _tile(group[0])[1]
    share = triton.cdiv(triton.cdiv(tokens, max(1, programs // len(group))), rows) * rows
    return share, triton.cdiv(tokens, max(1, share))


def _tile(logits: Tensor) -> tuple[int, int, int]:
    """Parts, rows and columns of a tile: a row lies within a warp, and each thread has one row."""
    unit = 16 // logits.element_size()
    columns = triton.next_power_of_2(logits.shape[1])
    parts = min(max(_PARTS, columns // (32 * unit)), max(1, columns // unit))
    width = columns // parts
    return parts, max(1, 32 * _WARPS * unit // max(width, unit)), width
