"""rotary_pos_emb/interleaved: queries and keys in one launch, from where they lie; keeps the tables alone."""

from typing import Any

import torch
import triton
from opslot import KernelUnavailable
from opslot.autograd import first_order, has_addresses
from torch import Tensor

from ._kernels import rotation as _kernels
from ._launch import device_of

# Heads for which a program reads the tables once, and elements of its tile: 16 a thread.
_HEADS = 4
_TILE = 2048

_Pair = tuple[Tensor, Tensor]


def rotary_pos_emb_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> _Pair:
    """Rotation of neighbours, whose results lie half a head apart; in float32, rounded once."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"rotary_pos_emb/interleaved: unsqueeze_dim is 1 for [B, heads, S, D] or 2 for [B, S, heads, D], got "
            f"{unsqueeze_dim}"
        )
    sizes = [(*x.shape[:unsqueeze_dim], *x.shape[unsqueeze_dim + 1 :]) for x in (q, k)]
    if q.dim() != 4 or k.dim() != 4 or sizes[0] != sizes[1] or q.shape[-1] % 2:
        raise ValueError(
            "rotary_pos_emb/interleaved: triton needs q and k of four dimensions, the last an even one, that differ in "
            f"their number of heads alone, got {list(q.shape)} and {list(k.shape)} with unsqueeze_dim={unsqueeze_dim}"
        )
    batch, tokens, width = sizes[0]
    for table in (cos, sin):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (tokens, width):
            raise ValueError(
                f"rotary_pos_emb/interleaved: cos and sin must be [B or 1, S, {width}], got {list(cos.shape)} and "
                f"{list(sin.shape)} for {tokens} tokens in {batch} sequences"
            )
    if len({x.device for x in (q, k, cos, sin)}) > 1:
        raise ValueError(
            f"rotary_pos_emb/interleaved: q is on {q.device}, k on {k.device}, cos on {cos.device}, sin on {sin.device}"
        )
    wide = [name for name, x in (("k", k), ("cos", cos), ("sin", sin)) if x.dtype is torch.float64]
    if wide:
        raise KernelUnavailable(
            f"rotary_pos_emb/interleaved: triton computes in float32, got {' and '.join(wide)} of torch.float64: "
            "choose eager"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelUnavailable(
            "rotary_pos_emb/interleaved: triton gives no gradient of cos and sin; to learn them choose eager"
        )
    pair: _Pair = _Rotation.apply(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-untyped-call]
    return pair


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> _Pair:
        ctx.save_for_backward(cos, sin)
        ctx.unsqueeze_dim, ctx.dtypes = unsqueeze_dim, (q.dtype, k.dtype)
        # A table in a wider dtype widens the result, as the plain product does.
        tables = torch.promote_types(cos.dtype, sin.dtype)
        q_dtype, k_dtype = torch.promote_types(q.dtype, tables), torch.promote_types(k.dtype, tables)
        pair = _rotate(q, k, cos, sin, unsqueeze_dim, q_dtype, k_dtype, False)
        ctx.mark_non_differentiable(*(out for out, need in zip(pair, ctx.needs_input_grad, strict=False) if not need))
        return pair

    @staticmethod
    @first_order
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        q_dtype, k_dtype = ctx.dtypes
        pair = _rotate(d_q, d_k, cos, sin, ctx.unsqueeze_dim, q_dtype, k_dtype, True)
        wanted = ctx.needs_input_grad[:2]
        return *(d if want else None for d, want in zip(pair, wanted, strict=True)), None, None, None


def _rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    back: bool,
) -> _Pair:
    compute = _launch if has_addresses(q, k, cos, sin) else _launch_op
    return compute(q, k, cos, sin, unsqueeze_dim, q_dtype, k_dtype, back)


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    back: bool,
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty(q.shape, dtype=q_dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k_dtype, device=k.device)
    if not q_out.numel() + k_out.numel():
        return q_out, k_out
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    heads, tokens = unsqueeze_dim, 3 - unsqueeze_dim
    strides = [s for x in (q, k, q_out, k_out) for s in (x.stride(0), x.stride(heads), x.stride(tokens))]
    for table in (cos, sin):
        strides += [table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)]
    width = q.shape[-1]
    columns = triton.next_power_of_2(width)
    rows = max(1, _TILE // (columns * _HEADS))
    groups = triton.cdiv(q.shape[heads], _HEADS) + triton.cdiv(k.shape[heads], _HEADS)
    with device_of(q):
        _kernels.rotate[(q.shape[0] * triton.cdiv(q.shape[tokens], rows), groups)](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            q.shape[tokens],
            q.shape[heads],
            k.shape[heads],
            *strides,
            width,
            _HEADS,
            rows,
            columns,
            back,
        )
    return q_out, k_out


_launch_op = torch.library.custom_op("opslot_triton_moe::rotary_pos_emb_interleaved", _launch, mutates_args=())


@_launch_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    back: bool,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=q_dtype), k.new_empty(k.shape, dtype=k_dtype)
