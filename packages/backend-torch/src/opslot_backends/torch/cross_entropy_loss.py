"""cross_entropy_loss/causal: head and loss over chunks of tokens, so that the logits of all tokens never exist.

Shapes: N rows (tokens), H hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from opslot.autograd import first_order, is_watched, matmul_dtype
from opslot.ops.cross_entropy_loss import cross_entropy_loss as plain_loss

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, pad

# Logits that exist at one time, in elements: on the CPU a chunk should stay in the cache. An accelerator gets 1 GiB in
# float32; each chunk reads and writes the gradient of the whole weight once, so it should not be much smaller.
_LOGITS_ON_CPU = 2**20
_LOGITS = 2**28
_LEAST_ROWS = 1024


def chunk_loss(
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
    """Linear head and cross entropy in chunks. Gradients are made in forward, while a chunk's logits are there.

    They are kept for a loss of weight 1 a token, so that half precision does not lose them in a small 1 / count, and
    scaled in backward. The gradient of the weight adds up over chunks in float32.
    """
    target = _targets(labels, shift_labels, ignore_index).to(hidden_states.device)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if target.shape[0] != rows.shape[0]:
        raise ValueError(
            f"cross_entropy_loss/causal: chunk_loss needs one label a row of hidden_states, "
            f"got {target.shape[0]} labels for {rows.shape[0]} rows"
        )
    dtype = matmul_dtype(hidden_states)
    for name, parameter in (("lm_head_weight", lm_head_weight), ("bias", bias)):
        if parameter is not None and matmul_dtype(parameter) != dtype:
            raise ValueError(
                f"cross_entropy_loss/causal: chunk_loss needs one dtype, got hidden_states {hidden_states.dtype} and "
                f"{name} {parameter.dtype}"
            )
    if rows.device.type == "cpu" and rows.shape[0] * lm_head_weight.shape[0] <= _LOGITS_ON_CPU:
        # One chunk holds them all: nothing to save, and gradients that backward does not have to scale are faster.
        return plain_loss(
            rows,
            lm_head_weight,
            None,
            shift_labels=target,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            logit_softcap=logit_softcap,
            logit_scale=logit_scale,
            bias=bias,
        )
    loss: Tensor = _Loss.apply(
        rows,
        lm_head_weight,
        bias,
        target,
        ignore_index,
        num_items_in_batch,
        dtype,
        logit_scale,
        logit_softcap,
        torch.is_grad_enabled(),
    )  # type: ignore[no-untyped-call]
    return loss


def _targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is not None:
        return shift_labels.reshape(-1)
    if labels is None:
        raise ValueError("cross_entropy_loss/causal: give labels, or shift_labels")
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        num_items: int | Tensor | None,
        dtype: torch.dtype,
        scale: float | None,
        softcap: float | None,
        recording: bool,
    ) -> Tensor:
        wanted = [recording and need for need in ctx.needs_input_grad[:3]]
        compute = _chunks_op if is_watched() else _chunks
        cast = None if bias is None else bias.to(dtype)
        total, *gradients = compute(
            rows.to(dtype), weight.to(dtype), cast, target, ignore_index, scale, softcap, *wanted
        )
        rows_counted = (target != ignore_index).sum()
        if num_items is None:
            count = rows_counted
        elif isinstance(num_items, Tensor):
            count = num_items.to(total.device)
        else:
            count = total.new_full((), num_items)  # as_tensor would compile anew for every number
        ctx.save_for_backward(*gradients, rows_counted, count)
        ctx.wanted = wanted
        ctx.dtypes = rows.dtype, weight.dtype, dtype if bias is None else bias.dtype
        return total / count

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, rows_counted, count = ctx.saved_tensors
        # With no row to count the loss may be 0 / 0; its gradient is zero all the same.
        factor = torch.where(rows_counted > 0, grad / count, 0.0)
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
    scale: float | None,
    softcap: float | None,
    want_rows: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss, and its gradients where wanted (empty tensors where not)."""
    total, d_rows, d_weight, d_bias = _outputs(rows, weight, want_rows, want_weight, want_bias)
    for tensor in (total, d_weight, d_bias):
        tensor.zero_()
    on_cpu = rows.device.type == "cpu"
    for chunk in _slices(rows, weight.shape[0]):
        x, wanted = rows[chunk], target[chunk]
        logits = _product(x, weight.t())
        if bias is not None:
            logits += bias
        if scale is not None:
            logits *= scale
        if softcap is not None:
            bent = logits.div_(softcap).tanh_()
            logits = bent * softcap
        log_probabilities = torch.log_softmax(logits, dim=-1)
        del logits
        total += nll_loss(log_probabilities, wanted, ignore_index=ignore_index, reduction="sum")
        if not (want_rows or want_weight or want_bias):
            continue
        ignored = wanted == ignore_index
        wanted = wanted.masked_fill(ignored, 0).unsqueeze(-1)
        # p - 1 of the target, before p is rounded: bfloat16 has no p between 0.9961 and 1.
        at_target = log_probabilities.gather(1, wanted).expm1_()
        linear = softcap is None and scale is None
        dtype = rows.dtype if linear else log_probabilities.dtype
        d_logits = torch.exp(log_probabilities, out=_like(log_probabilities, dtype))
        d_logits.scatter_(1, wanted, at_target.to(dtype))
        if softcap is not None:
            d_logits *= 1 - bent.square_()
        if scale is not None:
            d_logits *= scale
        d_logits = d_logits.to(rows.dtype)
        if on_cpu:
            d_logits.index_fill_(0, ignored.nonzero().squeeze(-1), 0)
        else:  # neither waiting for the device nor going over d_logits once more
            x = x.masked_fill(ignored.unsqueeze(-1), 0)
        if want_bias:
            d_bias += d_logits.masked_fill(ignored.unsqueeze(-1), 0).sum(0, dtype=d_bias.dtype)
        if want_rows:
            if d_rows.dtype == d_logits.dtype:
                torch.mm(d_logits, weight, out=d_rows[chunk])
            elif on_cpu:
                torch.mm(d_logits.to(d_rows.dtype), weight.to(d_rows.dtype), out=d_rows[chunk])
            else:
                torch.mm(d_logits, weight, out_dtype=d_rows.dtype, out=d_rows[chunk])
        if want_weight:
            _add_product(d_weight, d_logits.t(), x)
    if want_rows and not on_cpu:
        d_rows.masked_fill_((target == ignore_index).unsqueeze(-1), 0)
    return total, d_rows, d_weight, d_bias


def _outputs(
    rows: Tensor, weight: Tensor, want_rows: bool, want_weight: bool, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = torch.promote_types(rows.dtype, torch.float32)
    return (
        rows.new_empty((), dtype=exact),
        # Rounded to the dtype of the rows once, when backward knows the count.
        rows.new_empty(rows.shape if want_rows else 0, dtype=exact),
        weight.new_empty(weight.shape if want_weight else 0, dtype=exact),
        weight.new_empty(weight.shape[0] if want_bias else 0, dtype=exact),
    )


def _slices(rows: Tensor, vocabulary: int) -> Iterator[slice]:
    """As few chunks as the limits allow, of even size."""
    count = rows.shape[0]
    logits = _LOGITS_ON_CPU if rows.device.type == "cpu" else _LOGITS
    most = max(_LEAST_ROWS, logits // vocabulary)
    chunks = max(1, -(-count // most))
    size = -(-count // chunks)
    return (slice(start, min(start + size, count)) for start in range(0, count, max(1, size)))


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result of this dtype: that of `tensor` itself where it fits."""
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in at least float32. Devices that can add up half precision straight into float32 do."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


# A compiled graph would unroll the loop, for one number of tokens.
_chunks_op = torch.library.custom_op("opslot_torch::linear_cross_entropy", _chunks, mutates_args=())


@_chunks_op.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    scale: float | None,
    softcap: float | None,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(rows, weight, *wanted)
