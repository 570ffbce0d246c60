"""The conformance kit must fail every planted fault: each kernel here is wrong in one way that was seen in the field.

The classes are those of docs/field-faults.md. For each plant the table names the check that catches it, and a kernel
like it without the fault, which passes that check.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import opslot
import pytest
import torch
import torch.nn.functional as F
from opslot import KernelUnavailable
from opslot.ops.causal_conv1d import causal_conv1d
from opslot.ops.chunk_gated_delta_rule import chunk_gated_delta_rule
from opslot.ops.cross_entropy_loss import cross_entropy_loss, token_cls_loss
from opslot.ops.dsa_attention import dsa_attention_deepseek_v4
from opslot.ops.glu import glu
from opslot.ops.load_balancing_loss import load_balancing_loss
from opslot.ops.moe_experts import moe_experts
from opslot.ops.rms_norm import rms_norm
from opslot.ops.rotary_pos_emb import rotary_pos_emb
from opslot.testing import CHECKS
from opslot.testing._subject import Subject
from torch.autograd.function import once_differentiable


def swiglu(backward, *, forward=lambda gate, up: F.silu(gate) * up, save=None):
    """A SwiGLU kernel whose backward is a function of (gate, up, incoming gradient)."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            if save is None:
                ctx.save_for_backward(gate, up)
            else:
                ctx.kept = save(gate, up)
            return forward(gate, up)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return backward(*(ctx.saved_tensors if save is None else ctx.kept), grad)

    return lambda gate, up: Function.apply(gate, up)


def right(gate, up, grad):
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


RIGHT = swiglu(right)


# C01: another formula


def offset_weight(x, weight, eps):
    return rms_norm(x, 1 + weight, eps)


def eps_outside_the_root(x, weight, eps):
    return weight * (x / (x.square().mean(-1, keepdim=True).sqrt() + eps))


def neighbours_instead_of_halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def another_activation(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def softcap_ignored(hidden_states, lm_head_weight, labels, *, logit_softcap=None, **keywords):
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def softcap_before_scale(hidden_states, lm_head_weight, labels, *, logit_scale=None, logit_softcap=None, **keywords):
    if logit_scale is not None and logit_softcap is not None:
        logit_softcap = logit_softcap / logit_scale
    return cross_entropy_loss(
        hidden_states, lm_head_weight, labels, logit_scale=logit_scale, logit_softcap=logit_softcap, **keywords
    )


def exact_gelu_for_tanh(gate, up):
    return F.gelu(gate) * up


def limit_ignored(gate, up, limit):
    return F.silu(gate) * up


def always_silu(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return causal_conv1d(hidden_states, weight, bias, "silu", cu_seqlens=cu_seqlens)


def four_weights_at_most(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return causal_conv1d(hidden_states, weight[:, -4:], bias, activation, cu_seqlens=cu_seqlens)


def two_value_heads_for_a_key(query, key, value, g, beta, **keywords):
    if value.shape[2] == 3 * key.shape[2]:
        heads = torch.arange(value.shape[2]) // 2 % key.shape[2]
        query, key = query[:, :, heads], key[:, :, heads]
    return chunk_gated_delta_rule(query, key, value, g, beta, **keywords)


def whole_head_rotated(q, k, cos, sin, unsqueeze_dim=1):
    more = q.shape[-1] - cos.shape[-1]
    return rotary_pos_emb(q, k, F.pad(cos, (0, more), value=1.0), F.pad(sin, (0, more)), unsqueeze_dim)


# C02: precision


def one_added_in_half(x, weight, eps):
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normal * (1 + weight).float()).to(x.dtype)


def computed_in_bfloat16(x, weight, eps):
    return rms_norm(x.bfloat16(), weight.bfloat16(), eps).to(x.dtype)


def statistics_rounded_to_half(x, weight, eps):
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
    return weight * (x * scale)


def weight_gradient_in_chunks(accumulate):
    """The gradient of the weight is a sum over all rows, here added up a few rows at a time."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in (x, weight)]
                out = rms_norm(*inputs, eps)
            ctx.inputs, ctx.out, ctx.eps = inputs, out, eps
            return out.detach()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            x, weight = ctx.inputs
            (d_x,) = torch.autograd.grad(ctx.out, [x], grad, retain_graph=True)
            d_weight = torch.zeros(weight.shape, dtype=accumulate or weight.dtype)
            normal = x.detach().float()
            normal = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + ctx.eps)
            for chunk in (normal * grad.float()).flatten(0, -2).split(2) if x.dim() > 1 else [normal * grad.float()]:
                d_weight += (chunk.sum(0) if x.dim() > 1 else chunk).to(d_weight.dtype)
            return d_x, d_weight.to(weight.dtype), None

    return lambda x, weight, eps: Function.apply(x, weight, eps)


def dtypes_mixed_under_autocast(hidden_states, lm_head_weight, labels, **keywords):
    states = F.linear(hidden_states, torch.eye(hidden_states.shape[-1], dtype=hidden_states.dtype))
    with torch.autocast("cpu", enabled=False):
        return cross_entropy_loss(states, lm_head_weight, labels, **keywords)


# C03: normalisation, and alignment of labels


def count_ignored(hidden_states, lm_head_weight, labels, *, num_items_in_batch=None, **keywords):
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def shifted_twice(hidden_states, lm_head_weight, labels, *, shift_labels=None, **keywords):
    labels = labels if shift_labels is None else shift_labels
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def mean_of_the_means_of_chunks(hidden_states, lm_head_weight, labels, **keywords):
    if keywords or labels is None or hidden_states.dim() < 3 or not hidden_states.numel():
        return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    chunks = zip(hidden_states.split(4, dim=-2), targets.split(4, dim=-1), strict=True)
    losses = [cross_entropy_loss(x, lm_head_weight, None, shift_labels=y) for x, y in chunks]
    return torch.stack(losses).nanmean()


def shift_labels_swallowed(hidden_states, lm_head_weight, labels, *, shift_labels=None, **keywords):
    return token_cls_loss(hidden_states, lm_head_weight, labels, **keywords)


# C04: degenerate inputs


def nothing_counted_gives_zero(hidden_states, lm_head_weight, labels, **keywords):
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords).nan_to_num()


def no_tokens_divide_by_zero(hidden_states, top_k_index, top_k_weights, gate_up, down):
    _ = 64 // hidden_states.shape[0]  # a launch grid
    return moe_experts(hidden_states, top_k_index, top_k_weights, gate_up, down)


def first_incoming_gradient_for_all(gate, up, grad):
    return right(gate, up, grad.reshape(-1)[:1].expand(grad.numel()).view(grad.shape) if grad.numel() else grad)


def softmax_without_the_maximum(hidden_states, lm_head_weight, labels, **keywords):
    if keywords or labels is None or lm_head_weight.shape[0] == 1:
        return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)
    logits = (hidden_states @ lm_head_weight.t()).float()
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    logs = logits - logits.exp().sum(-1, keepdim=True).log()
    return F.nll_loss(logs.reshape(-1, logs.shape[-1]), target, ignore_index=-100)


def labels_of_16_bits(hidden_states, lm_head_weight, labels, **keywords):
    labels = labels if labels is None else labels.to(torch.int16).long()
    if labels is not None and lm_head_weight.shape[0] > 2**15:
        labels = labels.clamp(min=0)
    return cross_entropy_loss(hidden_states, lm_head_weight, labels, **keywords)


def slope_of_silu_by_exp(gate, up, grad):
    growth = torch.exp(-gate)
    slope = (1 + growth + gate * growth) / (1 + growth) ** 2
    return grad * up * slope, grad * F.silu(gate)


def eps_of_most_models(x, weight, eps):
    return rms_norm(x, weight, eps if x.shape[-1] == 1 else 1e-6)


class _ThroughTheNorm(torch.autograd.Function):
    """Its backward divides by the row's norm, without eps."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        with torch.enable_grad():
            ctx.inputs = [tensor.detach().requires_grad_() for tensor in (x, weight)]
            ctx.out = rms_norm(*ctx.inputs, eps)
        ctx.save_for_backward(x)
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        d_x, d_weight = torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True)
        (x,) = ctx.saved_tensors
        norm = x.float().square().sum(-1, keepdim=True).sqrt()
        return d_x * (norm / norm).to(d_x.dtype), d_weight, None


def nothing_by_nothing(x, weight, eps):
    return _ThroughTheNorm.apply(x, weight, eps)


def scaling_of_most_models(q, kv, sinks, indices, scaling):
    return dsa_attention_deepseek_v4(q, kv, sinks, indices, q.shape[-1] ** -0.5)


# C05: changed behind the caller's back


def argument_overwritten(x, weight, eps):
    out = rms_norm(x.clone(), weight, eps)
    if 0 not in x.stride():
        x.data.mul_(2)
    return out


def incoming_gradient_overwritten(gate, up, grad):
    d_gate, d_up = right(gate, up, grad)
    if 0 not in grad.stride():
        grad.mul_(up)
    return d_gate, d_up


def works_once():
    def backward(gate, up, grad):
        d_gate, d_up = right(gate, up, grad)
        gate.copy_(d_gate)  # saves memory: a copy of the argument takes the gradient
        return gate.clone(), d_up

    return swiglu(backward, save=lambda gate, up: (gate.clone(), up.clone()))


def output_is_the_argument(x, weight, eps):
    return x.mul(1) if x.requires_grad else x.detach()


# C06: layouts


def rows_taken_for_contiguous(x, weight, eps):
    flat = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()) if 0 not in x.stride() else x.reshape(-1)
    return rms_norm(flat.view(x.shape), weight, eps)


def address_taken_for_aligned(gate, up):
    start = gate.storage_offset() // 4 * 4
    return F.silu(torch.as_strided(gate, gate.shape, gate.stride(), start)) * up


def incoming_gradient_taken_for_contiguous(gate, up, grad):
    memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    return right(gate, up, memory[: grad.numel()].view(grad.shape) if memory.numel() >= grad.numel() else grad)


def positions_of_the_first_sequence(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_pos_emb(q, k, cos[:1], sin[:1], unsqueeze_dim)


# C08: memory that nobody wrote


def experts_without_tokens_never_written(hidden_states, top_k_index, top_k_weights, gate_up, down):
    return _Unwritten.apply(hidden_states, top_k_index, top_k_weights, gate_up, down)


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, weights, gate_up, down):
        with torch.enable_grad():
            ctx.inputs = [t.detach().requires_grad_() for t in (x, weights, gate_up, down)]
            ctx.index = index
            ctx.out = moe_experts(ctx.inputs[0], index, *ctx.inputs[1:])
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        d_x, d_weights, d_gate_up, d_down = torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True)
        chosen = torch.zeros(len(d_down) + 1).index_fill_(0, ctx.index.flatten().long(), 1).bool()[:-1]
        unwritten = torch.empty_like(d_down)
        unwritten[chosen] = d_down[chosen]
        return d_x, None, d_weights, d_gate_up, unwritten


# C09: routing


def not_mine_is_the_last_expert(hidden_states, top_k_index, top_k_weights, gate_up, down):
    return moe_experts(hidden_states, top_k_index.clamp(max=len(down) - 1), top_k_weights, gate_up, down)


def chosen_twice_counts_once(hidden_states, top_k_index, top_k_weights, gate_up, down):
    again = torch.zeros_like(top_k_index, dtype=torch.bool)
    for k in range(1, top_k_index.shape[1]):
        again[:, k] = (top_k_index[:, :k] == top_k_index[:, k : k + 1]).any(1)
    return moe_experts(hidden_states, top_k_index, top_k_weights * ~again, gate_up, down)


# C10: load balancing


def softmax_twice(gate_logits, num_experts, top_k, attention_mask=None):
    if isinstance(gate_logits, tuple):
        gate_logits = tuple(logits.softmax(-1) for logits in gate_logits)
    return load_balancing_loss(gate_logits, num_experts, top_k, attention_mask)


def mask_ignored(gate_logits, num_experts, top_k, attention_mask=None):
    return load_balancing_loss(gate_logits, num_experts, top_k)


# C11: packed sequences


def boundaries_ignored(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    return causal_conv1d(hidden_states, weight, bias, activation)


def boundaries_ignored_in_backward(hidden_states, weight, bias=None, activation=None, *, cu_seqlens=None):
    right = causal_conv1d(hidden_states, weight, bias, activation, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        return right
    leaking = causal_conv1d(hidden_states, weight, bias, activation)
    return leaking + (right - leaking).detach()


def state_carried_over(query, key, value, g, beta, *, cu_seqlens=None, **keywords):
    if cu_seqlens is None or keywords.get("initial_state") is not None or keywords.get("output_final_state"):
        return chunk_gated_delta_rule(query, key, value, g, beta, cu_seqlens=cu_seqlens, **keywords)
    return chunk_gated_delta_rule(query, key, value, g, beta, **keywords)


# C12: who asked for a gradient


def weight_without_gradient(x, weight, eps):
    return rms_norm(x, weight.detach(), eps)


class _WrongWhenFrozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        d_gate, d_up = right(*ctx.saved_tensors, grad)
        return d_gate, d_up if ctx.needs_input_grad[0] else torch.zeros_like(d_up)


def wrong_when_another_is_frozen(gate, up):
    return _WrongWhenFrozen.apply(gate, up)


def tables_without_gradient(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_pos_emb(q, k, cos.detach(), sin.detach(), unsqueeze_dim)


def learnt_tables_refused(q, k, cos, sin, unsqueeze_dim=1):
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelUnavailable("tables that require a gradient")
    return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def always_recording(x, weight, eps):
    with torch.inference_mode(False), torch.enable_grad():
        return rms_norm(x.clone(), weight.clone().requires_grad_(), eps)


def second_derivative_left_out():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            return right(*(tensor.detach() for tensor in (*ctx.saved_tensors, grad)))

    return lambda gate, up: Function.apply(gate, up)


def second_derivative_of_another_function():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors
            slope = torch.sigmoid(gate).detach()  # of which there would be a derivative
            return grad * up * slope * (1 + gate * (1 - slope)), grad * F.silu(gate)

    return lambda gate, up: Function.apply(gate, up)


def vmap_over_the_wrong_dimension():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(gate, up):
            return F.silu(gate) * up

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors
            slope = torch.sigmoid(gate)
            return grad * up * slope * (1 + gate * (1 - slope)), grad * F.silu(gate)

        @staticmethod
        def vmap(info, in_dims, gate, up):
            return F.silu(gate.flip(0)) * up.flip(1) if gate.dim() > 1 else F.silu(gate) * up, 0

    return lambda gate, up: Function.apply(gate, up)


# C14: what comes back


def two_outputs(x, weight, eps):
    return rms_norm(x, weight, eps), x.square().mean(-1)


def output_of_another_dtype(x, weight, eps):
    return rms_norm(x.float(), weight.float(), eps)


def output_of_another_shape(x, weight, eps):
    return rms_norm(x, weight, eps).flatten()


def raises_in_backward(gate, up, grad):
    raise RuntimeError("no kernel image is available")


def refuses_everything(x, weight, eps):
    raise KernelUnavailable("only on Tuesdays")


# C20 and C22: what one call leaves behind for another


def kept_by_address():
    kept: dict[Any, torch.Tensor] = {}

    def kernel(x, weight, eps):
        key = (weight.data_ptr(), weight.shape, weight.dtype)
        if key not in kept:
            kept[key] = weight.detach() * 1
        return rms_norm(x, weight + (kept[key] - weight).detach(), eps)

    return kernel


def one_workspace_for_all_calls():
    shared: dict[Any, torch.Tensor] = {}

    def save(gate, up):
        for name, tensor in (("gate", gate), ("up", up)):
            shared[name] = tensor.detach()
        return (shared,)

    return swiglu(lambda shared, grad: right(shared["gate"], shared["up"], grad), save=save)


def changed_after_forward_unnoticed(gate, up):
    return gate.detach(), up.detach()  # by plain attributes of ctx, which no version counter watches


def one_argument_for_all_threads():
    shared: dict[Any, torch.Tensor] = {}

    def kernel(gate, up):
        shared[gate.shape] = gate
        time.sleep(0.001)
        return F.silu(shared[gate.shape]) * up

    return kernel


def draws_random_numbers(x, weight, eps):
    torch.rand(1)
    return rms_norm(x, weight, eps)


def leaves_gradients_off(x, weight, eps):
    out = rms_norm(x, weight, eps)
    if torch.is_grad_enabled():
        torch.set_grad_enabled(False)
    return out


def first_call_of_a_shape():
    tuned = set()

    def kernel(gate, up):
        key = gate.shape, gate.dtype
        wrong = 2.0 if key not in tuned else 1.0  # an autotuner adds to an output that it does not reset
        tuned.add(key)
        return F.silu(gate) * up * wrong

    return kernel


def sets_the_precision_once(x, weight, eps):
    torch.set_float32_matmul_precision("high")
    return rms_norm(x, weight, eps)


def wrong_in_evaluation(x, weight, eps):
    out = rms_norm(x, weight, eps)
    return out * 2 if weight.requires_grad and not torch.is_grad_enabled() else out


def wrong_with_a_frozen_weight(x, weight, eps):
    out = rms_norm(x, weight, eps)
    return out * 2 if x.requires_grad and not weight.requires_grad else out


def writes_the_gradient_too(x, weight, eps):
    out = rms_norm(x, weight, eps)
    if out.requires_grad and weight.is_leaf:
        out.register_hook(lambda grad: setattr(weight, "grad", torch.ones_like(weight)))
    return out


# C23: the compiler


def breaks_the_graph(gate, up):
    torch._dynamo.graph_break()
    return F.silu(gate) * up


def wrong_when_compiled(gate, up):
    return F.silu(gate) * up * (1.5 if torch.compiler.is_compiling() else 1)


def operator_without_a_meta_function():
    name = "opslot_planted::swiglu_without_fake"
    operator = torch.library.custom_op(
        name, lambda gate, up: F.silu(gate) * up, mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor"
    )
    operator.register_autograd(
        lambda ctx, grad: right(*ctx.saved_tensors, grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return lambda gate, up: operator(gate, up)


# Claims


def other_bits_each_time():
    calls = iter(range(10**9))

    def kernel(gate, up):
        out = F.silu(gate) * up
        return out * (1 + 2**-23) if next(calls) % 2 else out

    return kernel


def split_by_the_number_of_rows(x, weight, eps):
    parts = max(min(x.shape[0], 8), 1) if x.dim() > 1 else 1
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = sum(part.square().sum(-1, keepdim=True) for part in wide.chunk(parts, dim=-1))
    return weight * (wide * torch.rsqrt(square / x.shape[-1] + eps)).to(x.dtype)


def half_precision_only(gate, up):
    return F.silu(gate) * up


@dataclass(frozen=True)
class Plant:
    fault: str
    op: str
    variant: str
    kernel: Callable[..., Any]
    check: str
    problem: str
    dtype: str = "float32"
    claims: Mapping[str, Any] = field(default_factory=dict)
    twin: Callable[..., Any] | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kernel.__name__

    def subject(self, kernel):
        subject = Subject.of(self.op, self.variant, kernel, dtype=self.dtype)
        return replace(subject, spec=replace(subject.spec, **self.claims))


def norm(kernel, check, problem, fault, **more):
    return Plant(fault, "rms_norm", "standard", kernel, check, problem, **more)


def gated(kernel, check, problem, fault, **more):
    return Plant(fault, "glu", "swiglu", kernel, check, problem, **{"twin": RIGHT, **more})


def loss(kernel, check, problem, fault, **more):
    return Plant(fault, "cross_entropy_loss", "causal", kernel, check, problem, **more)


def experts(kernel, check, problem, fault, **more):
    return Plant(fault, "moe_experts", "standard", kernel, check, problem, **more)


def rotary(kernel, check, problem, fault, **more):
    return Plant(fault, "rotary_pos_emb", "full", kernel, check, problem, **more)


def balance(kernel, check, problem, fault, **more):
    return Plant(fault, "load_balancing_loss", "standard", kernel, check, problem, **more)


PLANTS = [
    loss(softmax_without_the_maximum, "values", "'large logits'.*output 0 is wrong", "C04"),
    loss(labels_of_16_bits, "values", "'large vocabulary'.*output 0 is wrong", "C07"),
    gated(
        swiglu(slope_of_silu_by_exp), "gradients", "'far out'.*gradient of gate .* is wrong", "C04", name="slope_by_exp"
    ),
    norm(eps_of_most_models, "values", "output 0 is wrong", "C01"),
    norm(nothing_by_nothing, "gradients", "'a row of zeros'.*the gradient of x .* is wrong", "C04"),
    Plant("C01", "dsa_attention", "deepseek_v4", scaling_of_most_models, "values", "'another scaling'.*is wrong"),
    norm(offset_weight, "values", "output 0 is wrong", "C01"),
    norm(eps_outside_the_root, "values", "output 0 is wrong", "C01"),
    rotary(neighbours_instead_of_halves, "values", "output 0 is wrong", "C01"),
    gated(another_activation, "values", "output 0 is wrong", "C01"),
    loss(softcap_ignored, "values", "sample 'softcap'.*output 0 is wrong", "C01"),
    loss(softcap_before_scale, "values", "sample 'bias, scale and softcap'.*output 0 is wrong", "C01"),
    Plant("C01", "glu", "geglu_tanh", exact_gelu_for_tanh, "values", "output 0 is wrong"),
    Plant("C01", "glu", "swiglu_clamped", limit_ignored, "values", "output 0 is wrong"),
    Plant("C01", "causal_conv1d", "standard", always_silu, "values", "output 0 is wrong"),
    Plant("C01", "causal_conv1d", "standard", four_weights_at_most, "values", "'width 7'.*output 0 is wrong"),
    Plant(
        "C01",
        "chunk_gated_delta_rule",
        "standard",
        two_value_heads_for_a_key,
        "values",
        "'three value heads for a key'.*output 0 is wrong",
    ),
    Plant("C01", "rotary_pos_emb", "partial", whole_head_rotated, "values", "output 0 is wrong"),
    Plant("C02", "rms_norm", "zero_centered", one_added_in_half, "values", "output 0 is wrong", dtype="bfloat16"),
    Plant(
        "C03", "cross_entropy_loss", "token_cls", shift_labels_swallowed, "refusals", "took what its contract refuses"
    ),
    Plant("C11", "causal_conv1d", "standard", boundaries_ignored, "values", "output 0 is wrong"),
    Plant(
        "C11",
        "causal_conv1d",
        "standard",
        boundaries_ignored_in_backward,
        "packed",
        "reach other sequences of the same pack",
    ),
    Plant("C11", "chunk_gated_delta_rule", "standard", state_carried_over, "values", "output 0 is wrong"),
    norm(computed_in_bfloat16, "values", "output 0 is wrong", "C02"),
    norm(statistics_rounded_to_half, "accuracy", "output 0: RMS error .* times eager's", "C02", dtype="bfloat16"),
    norm(
        weight_gradient_in_chunks(None),
        "accuracy",
        "gradient of weight: RMS error .* times eager's",
        "C02",
        dtype="bfloat16",
        twin=weight_gradient_in_chunks(torch.float32),
        name="weight_gradient_added_up_in_half",
    ),
    loss(dtypes_mixed_under_autocast, "autocast", "dtype", "C02"),
    loss(count_ignored, "values", "sample 'counted batch, int'.*output 0 is wrong", "C03"),
    loss(shifted_twice, "values", "sample 'shifted labels'.*output 0 is wrong", "C03"),
    loss(mean_of_the_means_of_chunks, "values", "output 0 is wrong", "C03"),
    loss(nothing_counted_gives_zero, "values", "sample 'all ignored'.*output 0 is wrong", "C04"),
    experts(no_tokens_divide_by_zero, "values", "by zero", "C04"),
    gated(
        swiglu(first_incoming_gradient_for_all),
        "gradients",
        "the gradient of gate .* is wrong",
        "C04",
        name="first_incoming_gradient_for_all",
    ),
    norm(argument_overwritten, "values", "the argument x was changed by forward", "C05"),
    gated(
        swiglu(incoming_gradient_overwritten),
        "arguments",
        "the incoming gradient was changed",
        "C05",
        name="incoming_gradient_overwritten",
    ),
    gated(works_once(), "twice", r"the gradient of gate \(second backward\) is wrong", "C05", name="works_once"),
    norm(output_is_the_argument, "values", "output 0", "C05"),
    norm(rows_taken_for_contiguous, "layouts", "output 0 is wrong", "C06"),
    gated(address_taken_for_aligned, "layouts", "offset.*output 0 is wrong", "C06"),
    gated(
        swiglu(incoming_gradient_taken_for_contiguous),
        "gradients",
        r"the gradient of gate \(incoming gradient strided\) is wrong",
        "C06",
        name="incoming_gradient_taken_for_contiguous",
    ),
    rotary(positions_of_the_first_sequence, "values", "output 0 is wrong", "C06"),
    experts(experts_without_tokens_never_written, "memory", "the gradient of down .* is wrong .* max error inf", "C08"),
    experts(not_mine_is_the_last_expert, "values", "'some not mine'.*output 0 is wrong", "C09"),
    experts(chosen_twice_counts_once, "values", "'chosen twice'.*output 0 is wrong", "C09"),
    balance(softmax_twice, "values", "output 0 is wrong", "C10"),
    balance(mask_ignored, "values", "output 0 is wrong", "C10"),
    norm(weight_without_gradient, "gradients", "the gradient of weight .* is missing", "C12"),
    rotary(
        tables_without_gradient,
        "gradients",
        "'learnt tables'.*the gradient of cos .* is missing",
        "C12",
        twin=learnt_tables_refused,
    ),
    gated(wrong_when_another_is_frozen, "frozen", r"the gradient of up \(everything else frozen\) is wrong", "C12"),
    norm(always_recording, "no_grad", "output 0 under no_grad has requires_grad True", "C12"),
    gated(
        second_derivative_left_out(),
        "double_backward",
        "has no second derivative, and the kernel does not say so",
        "C12",
        twin=glu,
        name="second_derivative_left_out",
    ),
    gated(
        second_derivative_of_another_function(),
        "double_backward",
        "the second derivative of gate by gate is wrong",
        "C12",
        twin=glu,
        name="second_derivative_of_another_function",
    ),
    gated(
        vmap_over_the_wrong_dimension(),
        "functional",
        "under torch.func.vmap is wrong",
        "C12",
        name="vmap_over_the_wrong_dimension",
    ),
    norm(two_outputs, "values", "2 outputs, the reference has 1", "C14"),
    norm(
        output_of_another_dtype,
        "values",
        "output 0 has dtype torch.float32, the reference gives torch.bfloat16",
        "C14",
        dtype="bfloat16",
    ),
    norm(output_of_another_shape, "values", "output 0 has shape", "C14"),
    gated(swiglu(raises_in_backward), "gradients", "no kernel image is available", "C14", name="raises_in_backward"),
    norm(refuses_everything, "values", "nothing to judge by: the kernel refuses all: .*only on Tuesdays", "C14"),
    norm(kept_by_address(), "state", "for new values in the same memory is wrong", "C22", name="kept_by_address"),
    gated(
        one_workspace_for_all_calls(),
        "state",
        "gradient of gate|Error",
        "C22",
        name="one_workspace_for_all_calls",
    ),
    gated(
        swiglu(right, save=changed_after_forward_unnoticed),
        "state",
        "gate changed in place after forward, which went unnoticed",
        "C05",
        name="changed_after_forward_unnoticed",
    ),
    gated(
        one_argument_for_all_threads(),
        "threads",
        "in a second thread",
        "C20",
        name="one_argument_for_all_threads",
    ),
    norm(draws_random_numbers, "arguments", "changed the process's random state", "C22"),
    norm(leaves_gradients_off, "arguments", "changed the process's grad mode", "C22"),
    gated(first_call_of_a_shape(), "values", "output 0 is wrong", "C20", name="first_call_of_a_shape"),
    norm(sets_the_precision_once, "values", "changed the process's precision of float32 products", "C22"),
    norm(wrong_in_evaluation, "no_grad", "under no_grad of parameters is wrong", "C12"),
    norm(wrong_with_a_frozen_weight, "frozen", "output 0 with all else frozen is wrong", "C12"),
    norm(writes_the_gradient_too, "arguments", "left a gradient or a hook on the argument weight", "C12"),
    gated(wrong_when_compiled, "compiled", "output 0 compiled is wrong", "C23", claims={"compile": True}, twin=glu),
    gated(
        operator_without_a_meta_function(),
        "custom_ops",
        "torch.library.opcheck of opslot_planted",
        "C23",
        name="operator_without_a_meta_function",
    ),
    gated(
        other_bits_each_time(),
        "deterministic",
        "claims to be deterministic",
        "C24",
        claims={"deterministic": True},
        name="other_bits_each_time",
    ),
    norm(
        split_by_the_number_of_rows,
        "batch_invariant",
        "claims batch_invariant, but . of . rows alone give other bits",
        "C24",
        claims={"batch_invariant": True},
    ),
    gated(
        half_precision_only,
        "refusals",
        "took float32, which its spec does not name",
        "C24",
        dtype="bfloat16",
        claims={"dtypes": ("bfloat16",)},
    ),
]


def raised_by(plant, kernel):
    """What the check says about a kernel, empty when it has nothing to say."""
    try:
        CHECKS[plant.check](plant.subject(kernel), 0)
    except Exception as error:  # noqa: BLE001  # whatever a faulty kernel raises is what catches it
        return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    finally:
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision("highest")
    return ""


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_the_check_fails_the_plant(plant):
    said = raised_by(plant, plant.kernel)
    assert re.search(plant.problem, said, re.DOTALL), said or "nothing"
    assert f"{plant.op}/{plant.variant}, kernel " in said
    assert "seed 0" in said or "nothing to judge by" in said


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_the_check_passes_the_kernel_without_the_fault(plant):
    twin = plant.twin or opslot.registry().contract(plant.op, plant.variant).load_reference()
    claims = {} if plant.check == "refusals" else plant.claims
    assert raised_by(replace(plant, claims=claims), twin) == ""


@pytest.mark.parametrize("check", ["values", "arguments", "frozen", "no_grad", "memory", "state", "twice"])
def test_no_check_counts_an_honest_refusal_as_a_fault(check):
    CHECKS[check](Subject.of("rotary_pos_emb", "full", learnt_tables_refused), 0)


# C07: 32-bit offsets. This plant's wrap around at 2**10, and the workload is as much smaller than those on a GPU.


def offsets_wrap_around(x, weight, eps):
    flat = x.reshape(-1)
    return rms_norm(flat[torch.arange(flat.numel(), device=x.device) % 2**10].view(x.shape), weight, eps)


@pytest.mark.parametrize("kernel", [offsets_wrap_around, rms_norm])
def test_offsets_that_wrap_around(kernel):
    subject = Subject.of("rms_norm", "standard", kernel)
    workload = replace(subject.contract.workload, large={"tokens": 17, "hidden": 64})
    subject = replace(subject, contract=replace(subject.contract, workload=workload))
    if kernel is rms_norm:
        CHECKS["large"](subject, 0)
    else:
        with pytest.raises(AssertionError, match="output, number 0: differs from eager by"):
            CHECKS["large"](subject, 0)


# What only a GPU shows


def on_the_default_stream(gate, up):
    with torch.cuda.stream(torch.cuda.default_stream(gate.device)):
        return F.silu(gate) * up


def waits_for_the_device(gate, up):
    return F.silu(gate) * up if bool(gate.isfinite().all()) else gate * up


def remembers_the_first_inputs():
    first: dict[Any, torch.Tensor] = {}

    def kernel(gate, up):
        kept = first.setdefault((gate.shape, gate.requires_grad), gate.detach().clone())
        return F.silu(gate + (kept - gate).detach()) * up

    return kernel


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "check", "problem"),
    [
        (on_the_default_stream, "streams", "on a second stream is wrong"),
        (waits_for_the_device, "cuda_graphs", "captur"),
        (remembers_the_first_inputs(), "cuda_graphs", "output 0 .*is wrong"),
        (glu, "streams", None),
        (glu, "cuda_graphs", None),
    ],
)
def test_on_a_gpu(kernel, check, problem):
    subject = Subject.of("glu", "swiglu", kernel, device="cuda")
    subject = replace(subject, spec=replace(subject.spec, cuda_graphs=True))
    if problem is None:
        CHECKS[check](subject, 0)
    else:
        with pytest.raises((AssertionError, RuntimeError), match=problem):
            CHECKS[check](subject, 0)
