"""rotary_pos_emb in Liger's kernel, which rotates queries and keys of a token at once.

Liger's kernel writes over what it is given and reads the first half of each table, so here it gets copies, and tables
whose halves agree.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from opslot import KernelUnavailable
from opslot.autograd import first_order, has_addresses
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ._function import on_device_of
from ._implementation import chosen

# Other implementations know neither partial nor half tables, and keep the addresses of tables they have seen.
IMPLEMENTATION, (rope_forward, rope_backward) = chosen(
    "rotary_pos_emb", "liger_kernel.ops.rope", ("rope_forward", "rope_backward")
)

_Pair = tuple[Tensor, Tensor]
_HALVES = (
    "rotary_pos_emb: liger reads the first half of cos and sin, and here the second is another: choose "
    "rotary_pos_emb: eager"
)


def implementation() -> str:
    return IMPLEMENTATION


def rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotation of the two halves of every head, by tables that hold each angle twice."""
    return _apply(q, k, cos, sin, unsqueeze_dim, q.shape[-1], twice=True)


def rotary_pos_emb_partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotation of the first cos.shape[-1] elements of every head, by tables that hold each angle twice."""
    return _apply(q, k, cos, sin, unsqueeze_dim, cos.shape[-1], twice=True)


def rotary_pos_emb_half_table(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotation of the two halves of every head, by tables that hold each angle once."""
    return _apply(q, k, cos, sin, unsqueeze_dim, q.shape[-1], twice=False)


def _apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, width: int, *, twice: bool
) -> tuple[Tensor, Tensor]:
    """`width` is how many elements of a head are rotated, `twice` whether the tables hold each angle twice."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"rotary_pos_emb: unsqueeze_dim is 1 for [B, heads, S, D] or 2 for [B, S, heads, D], got {unsqueeze_dim}"
        )
    # The kernel takes the sizes of q for those of k, and would read past k.
    if q.dim() != 4 or _without_heads(q, unsqueeze_dim) != _without_heads(k, unsqueeze_dim):
        raise ValueError(
            f"rotary_pos_emb: liger needs q and k of four dimensions that differ in their number of heads alone, got "
            f"{tuple(q.shape)} and {tuple(k.shape)} with unsqueeze_dim={unsqueeze_dim}"
        )
    batch, tokens, _ = _without_heads(q, unsqueeze_dim)
    wanted = (tokens, width if twice else width // 2)
    if cos.shape != sin.shape or cos.shape[1:] != wanted or cos.shape[0] not in (1, batch) or width > q.shape[-1]:
        raise ValueError(
            f"rotary_pos_emb: cos and sin must both be [B or 1, S, {wanted[1]}], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)} for {tokens} tokens in {batch} sequences with heads of {q.shape[-1]}"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelUnavailable("rotary_pos_emb: liger gives no gradient of cos and sin; to learn them choose eager")
    if twice and has_addresses(cos, sin):
        _require_equal_halves(cos, sin)
    # A table in a wider dtype widens the result, as the plain product does.
    dtype = torch.promote_types(cos.dtype, sin.dtype)
    q, k = (x.to(torch.promote_types(x.dtype, dtype)) for x in (q, k))
    # The kernel computes in the dtype of sin: in a narrower one than theirs, it would round q and k first.
    dtype = torch.promote_types(q.dtype, k.dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    if unsqueeze_dim == 2:
        return _rotated(q, k, cos, sin, width)
    q, k = _rotated(q.transpose(1, 2), k.transpose(1, 2), cos, sin, width)
    return q.transpose(1, 2), k.transpose(1, 2)


def _without_heads(x: Tensor, unsqueeze_dim: int) -> tuple[int, ...]:
    """B, S and D of [B, heads, S, D] or [B, S, heads, D]."""
    return *x.shape[:unsqueeze_dim], *x.shape[unsqueeze_dim + 1 :]


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int) -> _Pair:
    pair: _Pair = _Rotation.apply(q, k, cos, sin, width)  # type: ignore[no-untyped-call]
    return pair


class _Rotation(torch.autograd.Function):
    """q and k are [B, S, heads, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int) -> _Pair:
        ctx.save_for_backward(cos, sin)
        ctx.width = width
        pair = _rotate(q, k, cos, sin, width, False)
        ctx.mark_non_differentiable(*(out for out, need in zip(pair, ctx.needs_input_grad, strict=False) if not need))
        return pair

    @staticmethod
    @first_order
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        pair = _rotate(d_q, d_k, cos, sin, ctx.width, True)
        wanted = ctx.needs_input_grad[:2]
        return *(d if want else None for d, want in zip(pair, wanted, strict=True)), None, None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, back: bool) -> _Pair:
    compute = _launch if has_addresses(q, k, cos, sin) else _launch_op
    return compute(q, k, cos, sin, width, back)


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, back: bool) -> tuple[Tensor, Tensor]:
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    # Liger wants [B, heads, S, D] and transposes it back.
    rotate = rope_backward if back else rope_forward
    with on_device_of(q):
        rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=width)
    return q, k


def _assert_and_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, back: bool) -> tuple[Tensor, Tensor]:
    if width == cos.shape[-1] and not back:
        _assert_equal_halves(cos, sin)
    return _launch(q, k, cos, sin, width, back)


_launch_op = torch.library.custom_op("opslot_liger::rotary_pos_emb", _assert_and_launch, mutates_args=())


@_launch_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, back: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


# Tables that were found to agree, by the version and address at which they did. A model makes its tables once for all
# layers, so the device is asked, and waited for, once in a forward pass. Writes that torch does not count, through
# `.data` or in the replay of a graph, are not seen.
_agreeing: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()


def _require_equal_halves(*tables: Tensor) -> None:
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _assert_equal_halves(*tables)  # a graph cannot wait, and each replay has other tables
        return
    for table in tables:
        counted = not table.is_inference()
        seen = (table._version if counted else 0, table.data_ptr())
        if counted and _agreeing.get(table) == seen:
            continue
        if not torch.equal(*table.detach().chunk(2, dim=-1)):
            raise KernelUnavailable(_HALVES)
        if counted:
            _agreeing[table] = seen


def _assert_equal_halves(*tables: Tensor) -> None:
    """Without waiting: the device stops where they differ."""
    for table in tables:
        first, second = table.detach().chunk(2, dim=-1)
        torch._assert_async((first == second).all(), _HALVES)
