"""cross_entropy_loss in Liger's kernel, which turns a chunk of logits into losses and their gradients in one pass.

The loop over chunks is not Liger's: its own divides by the number of counted tokens alone, knows no scale of the
logits, adds up the gradient of the head in the head's dtype, computes none where only the head is trained, scales
saved gradients in place in backward, and waits for the device.

Shapes: N rows (tokens), H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from opslot.autograd import first_order, has_addresses, matmul_dtype
from torch import Tensor
from torch.nn.functional import pad

from ._function import on_device_of
from ._implementation import chosen

IMPLEMENTATION = chosen(
    "cross_entropy_loss", "liger_kernel.ops.cross_entropy", ("cross_entropy_forward",), also=("cutedsl",)
)[0]

# Elements of the logits that exist at one time, 512 MiB in bfloat16. Each chunk reads and writes the gradient of the
# whole head once, in float32: 8 V H bytes beside products of 6 rows V H operations. A device that does 174 operations
# while it moves a byte, as an H200 does, spends on it a ninth of the products' time at 2048 rows, twice that at 1024.
_LOGITS = 2**28
_LEAST_ROWS = 2048

_Primitive = Callable[..., tuple[Tensor, Any, Any, Any, Tensor]]


def implementation() -> str:
    return IMPLEMENTATION


def causal(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    *,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Head and cross entropy with the next token. Gradients are made in forward, while a chunk's logits are there."""
    if shift_labels is not None:
        target = shift_labels
    elif labels is not None:
        target = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    else:
        raise ValueError("cross_entropy_loss/causal: give labels, or shift_labels")
    return _loss(
        hidden_states, lm_head_weight, target, num_items_in_batch, ignore_index, logit_softcap, logit_scale, bias
    )


def token_cls(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Head and cross entropy with each row's own label. Gradients are made in forward."""
    if shift_labels is not None:
        raise ValueError(
            "cross_entropy_loss/token_cls: shift_labels are those of a model that predicts the next token; pass "
            "labels, or choose cross_entropy_loss/causal"
        )
    if labels is None:
        raise ValueError("cross_entropy_loss/token_cls: give labels, one a row of hidden_states")
    return _loss(
        hidden_states, lm_head_weight, labels, num_items_in_batch, ignore_index, logit_softcap, logit_scale, bias
    )


def _loss(
    hidden_states: Tensor,
    weight: Tensor,
    target: Tensor,
    num_items: int | Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    bias: Tensor | None,
) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    target = target.reshape(-1).to(rows.device)
    if target.shape[0] != rows.shape[0]:
        raise ValueError(
            f"cross_entropy_loss: liger needs one label a row of hidden_states, got {target.shape[0]} labels for "
            f"{rows.shape[0]} rows"
        )
    dtype = matmul_dtype(rows)
    for name, parameter in (("lm_head_weight", weight), ("bias", bias)):
        if parameter is not None and matmul_dtype(parameter) != dtype:
            raise ValueError(
                f"cross_entropy_loss: liger needs one dtype, got hidden_states {hidden_states.dtype} and {name} "
                f"{parameter.dtype}"
            )
    loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, target, num_items, ignore_index, softcap, scale, dtype, torch.is_grad_enabled()
    )
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        num_items: int | Tensor | None,
        ignore_index: int,
        softcap: float | None,
        scale: float | None,
        dtype: torch.dtype,
        recording: bool,
    ) -> Tensor:
        wanted = [recording and need for need in ctx.needs_input_grad[:3]]
        compute = _chunks if has_addresses(rows, weight, bias, target) else _chunks_op
        cast = None if bias is None else bias.to(dtype)
        total, *gradients = compute(
            rows.to(dtype), weight.to(dtype), cast, target, ignore_index, softcap, scale, *wanted
        )
        counted = (target != ignore_index).sum()
        if num_items is None:
            count = counted
        elif isinstance(num_items, Tensor):
            count = num_items.to(total.device)
        else:
            count = total.new_full((), num_items)  # as_tensor would compile anew for every number
        ctx.save_for_backward(*gradients, counted, count)
        ctx.wanted = wanted
        ctx.dtypes = rows.dtype, weight.dtype, dtype if bias is None else bias.dtype
        return total / count

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, counted, count = ctx.saved_tensors
        # With no row to count the loss may be 0 / 0; its gradient is zero all the same.
        factor = torch.where(counted > 0, grad / count, 0.0)
        # The gradients of a loss of weight 1 a token are rounded once, here: half precision would lose them in a small
        # 1 / count, and rounding before and after the factor costs accuracy.
        scaled = [
            torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype)) if wanted else None
            for gradient, wanted, dtype in zip(gradients, ctx.wanted, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None, None, None


def _chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    want_rows: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss, and its gradients where wanted (empty tensors where not), in float32."""
    total, d_rows, d_weight, d_bias = _outputs(rows, weight, want_rows, want_weight, want_bias)
    for tensor in (total, d_weight, d_bias):
        tensor.zero_()
    # Liger would read past the logits.
    inside = ((target >= 0) & (target < weight.shape[0])) | (target == ignore_index)
    torch._assert_async(inside.all(), "cross_entropy_loss: a label is neither a class nor ignore_index")
    wanted = want_rows or want_weight or want_bias
    for chunk in _slices(rows.shape[0], weight.shape[0]):
        x = rows[chunk]
        logits = torch.nn.functional.linear(x, weight, bias)
        if scale is not None:
            logits *= scale
        losses, d_logits = _losses(logits, target[chunk].contiguous(), ignore_index, softcap, wanted)
        del logits  # else they are there until the next ones are: two chunks at one time
        total += losses.sum()
        if not wanted:
            del d_logits
            continue
        if scale is not None:
            d_logits *= scale
        if want_bias:
            d_bias += d_logits.sum(0, dtype=d_bias.dtype)
        if want_rows:
            _product(d_logits, weight, out=d_rows[chunk])
        if want_weight:
            _add_product(d_weight, d_logits.t(), x)
        del d_logits
    return total, d_rows, d_weight, d_bias


def _outputs(
    rows: Tensor, weight: Tensor, want_rows: bool, want_weight: bool, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = torch.promote_types(rows.dtype, torch.float32)
    return (
        rows.new_empty((), dtype=exact),
        rows.new_empty(rows.shape if want_rows else 0, dtype=exact),
        weight.new_empty(weight.shape if want_weight else 0, dtype=exact),
        weight.new_empty(weight.shape[0] if want_bias else 0, dtype=exact),
    )


def _slices(rows: int, vocabulary: int) -> Iterator[slice]:
    """As few chunks as the limits allow, of even size."""
    chunks = max(1, -(-rows // max(_LEAST_ROWS, _LOGITS // vocabulary)))
    size = -(-rows // chunks)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, max(1, size)))


def _losses(
    logits: Tensor, target: Tensor, ignore_index: int, softcap: float | None, wanted: bool
) -> tuple[Tensor, Tensor]:
    """One loss a row in float32, and the gradient of their sum, written over the logits."""
    with on_device_of(logits):
        loss, _, _, _, d_logits = _primitive()(
            logits, target, None, ignore_index, 0.0, 0.0, "sum", softcap, 1, 1.0, 0.0, False, False, False, wanted
        )
    return loss, d_logits


def _primitive() -> _Primitive:
    # Imported here: each import registers an implementation with Liger, and CuTe's needs CUTLASS.
    if IMPLEMENTATION == "cutedsl":
        from liger_kernel.ops.backends._cutedsl.cross_entropy import cross_entropy_loss_and_grad_cutedsl

        cute: _Primitive = cross_entropy_loss_and_grad_cutedsl
        return cute
    from liger_kernel.ops.backends._triton.cross_entropy import cross_entropy_loss_and_grad_triton

    triton: _Primitive = cross_entropy_loss_and_grad_triton
    return triton


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a @ b, added up in the dtype of `out`."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# A compiled graph would unroll the loop, for one number of tokens.
_chunks_op = torch.library.custom_op("opslot_liger::linear_cross_entropy", _chunks, mutates_args=())


@_chunks_op.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(rows, weight, *wanted)
