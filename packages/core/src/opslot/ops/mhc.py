"""mhc/pre, mhc/post, mhc/head: the hyper-connections of DeepSeek V4, which carry several residual streams at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Tolerance, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    sinkhorn_iters: int,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the N streams of every token into the input of a block, and give the weights that lead back.

        f = flat(streams32) / sqrt(mean(flat(streams32) ** 2) + norm_eps)
        a, b, c = (f @ fn.T) split into N, N and N * N
        pre  = sigmoid(a * scale[0] + base[:N]) + hc_eps
        post = 2 * sigmoid(b * scale[1] + base[N:2N])
        comb = softmax over the last dimension of (c * scale[2] + base[2N:]) as N x N, + hc_eps
        comb = its columns divided by (their sum + hc_eps), then sinkhorn_iters - 1 times rows and columns so divided
        collapsed = (sum over n of pre[n] * streams[n]).to(streams.dtype)

    streams is [B, S, N, H], zero tokens too. fn [(2 + N) * N, N * H] is the projection, scale [3] and base
    [(2 + N) * N] its scales and offsets, of any floating dtype (models keep them in float32). norm_eps is the epsilon
    of the norm, hc_eps that of everything else; sinkhorn_iters is at least 1. The result is (post, comb, collapsed):
    post [B, S, N] and comb [B, S, N, N] are what `mhc/post` takes and stay in float32, collapsed is [B, S, H] in the
    dtype of streams.
    comb is not symmetric: comb[i, j] is how much of old stream i goes into new stream j.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4HyperConnection.forward.
    """
    import torch

    if sinkhorn_iters < 1:
        raise ValueError(f"mhc/pre: sinkhorn_iters must be at least 1, got {sinkhorn_iters}")
    count = streams.shape[-2]
    sizes = [count, count, count * count]
    pre_w, post_w, comb_w = torch.split(_projected(streams, fn, norm_eps), sizes, dim=-1)
    pre_b, post_b, comb_b = torch.split(base, sizes)
    pre_scale, post_scale, comb_scale = scale.unbind(0)

    pre = torch.sigmoid(pre_w * pre_scale + pre_b) + hc_eps
    post = 2 * torch.sigmoid(post_w * post_scale + post_b)
    comb_w = comb_w.view(*comb_w.shape[:-1], count, count)
    comb = torch.softmax(comb_w * comb_scale + comb_b.view(count, count), dim=-1) + hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    return post, comb, _collapsed(streams, pre)


def mhc_post(output: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Spread the output of a block over the N streams, and mix the old streams into the new ones.

        out[j] = post[j] * output + sum over i of comb[i, j] * residual[i]

    output [B, S, H] is what the block (attention or MLP) returned, residual [B, S, N, H] the streams that `mhc/pre` had
    collapsed for it, both of one dtype; post [B, S, N] and comb [B, S, N, N] are what `mhc/pre` returned, in float32,
    and are rounded to the dtype of residual before they multiply. The result is [B, S, N, H] in that dtype. comb is
    summed over its first stream dimension: it is not symmetric, and its transpose is a different function.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4DecoderLayer.forward, both of its residual updates.
    """
    import torch

    dtype = residual.dtype
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), residual)
    return post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed


def mhc_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """Collapse the N streams of every token into one after the last layer.

        f = flat(streams32) / sqrt(mean(flat(streams32) ** 2) + norm_eps)
        pre = sigmoid((f @ fn.T) * scale + base) + hc_eps
        out = (sum over n of pre[n] * streams[n]).to(streams.dtype)

    streams is [B, S, N, H], zero tokens too; fn [N, N * H], scale [1] and base [N] are of any floating dtype (models
    keep them in float32). The result is [B, S, H] in the dtype of streams.

    Source: transformers 5.24.0, models/deepseek_v4, DeepseekV4HyperHead.forward.
    """
    import torch

    mixes = _projected(streams, fn, norm_eps)
    pre = torch.sigmoid(mixes * scale.to(mixes.dtype) + base.to(mixes.dtype)) + hc_eps
    return _collapsed(streams, pre)


def _projected(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    import torch

    flat = streams.flatten(-2).to(torch.promote_types(streams.dtype, torch.float32))
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return torch.nn.functional.linear(flat, fn.to(flat.dtype))


def _collapsed(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return (pre.unsqueeze(-1) * streams).sum(dim=-2).to(streams.dtype)


def _parameters(
    draw: Draw, outputs: int, width: int, scales: int, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn, scale and base: the projection of a normalised row has about unit size."""
    return (
        leaf(draw.normal(outputs, width, scale=width**-0.5, dtype=dtype)),
        leaf(1 + draw.normal(scales, scale=0.3, dtype=dtype)),
        leaf(draw.normal(outputs, scale=0.5, dtype=dtype)),
    )


def _stream_cases(
    draw: Draw, parameters: Callable[[int, int, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Streams and parameters for pre and head. `parameters(streams, hidden, wide)` makes the latter."""

    def case(name: str, streams: torch.Tensor, wide: bool = True) -> tuple[str, tuple[torch.Tensor, ...]]:
        return name, (leaf(streams), *parameters(streams.shape[2], streams.shape[3], wide))

    yield case("ordinary", draw.normal(2, 9, 4, 32))
    yield case("parameters in the dtype of the streams", draw.normal(2, 5, 4, 16), wide=False)
    yield case("two streams", draw.normal(2, 5, 2, 16))
    yield case("three streams", draw.normal(1, 7, 3, 24))
    yield case("eight streams", draw.normal(1, 5, 8, 16))
    yield case("one stream", draw.normal(1, 5, 1, 16))
    yield case("odd sizes", draw.normal(1, 3, 4, 1025))
    yield case("many tokens", draw.normal(1, 1025, 4, 3))
    yield case("one token", draw.normal(1, 1, 4, 16))
    # The embedding, repeated for every stream, is what the first layer gets.
    yield case("expanded", draw.normal(2, 5, 1, 16).expand(2, 5, 4, 16))
    yield case("strided", strided(draw.normal(2, 3, 4, 16)))
    yield case("transposed", draw.normal(4, 2, 3, 16).permute(1, 2, 0, 3))
    yield case("tiny and huge tokens", draw.normal(1, 4, 4, 16) * _token_scales(draw))
    yield case("no tokens", draw.normal(2, 0, 4, 16))


def _token_scales(draw: Draw) -> torch.Tensor:
    import torch

    return torch.tensor([1e-2, 1.0, 30.0, 1e3], dtype=draw.dtype, device=draw.device).view(1, 4, 1, 1)


def pre_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def parameters(count: int, hidden: int, wide: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = torch.promote_types(dtype, torch.float32) if wide else None
        return _parameters(draw, (2 + count) * count, count * hidden, 3, stored)

    for name, tensors in _stream_cases(draw, parameters):
        yield Sample(name, (*tensors, 1e-6, 20, 1e-6))
    streams, *rest = leaf(draw.normal(2, 5, 4, 16)), *parameters(4, 16, True)
    yield Sample("one iteration", (streams, *rest, 1e-6, 1, 1e-6))
    # Where an epsilon is missing or stands in the wrong place, these tell.
    yield Sample("large epsilons", (streams, *rest, 0.5, 3, 0.1))


def post_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)

    def weights(batch: int, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        post = 2 * draw.normal(batch, length, count, dtype=wide).sigmoid()
        return post, draw.normal(batch, length, count, count, dtype=wide).sigmoid() / count

    def case(name: str, output: torch.Tensor, residual: torch.Tensor) -> Sample:
        post, comb = weights(*residual.shape[:3])
        return Sample(name, (leaf(output), leaf(residual), leaf(post), leaf(comb)))

    yield case("ordinary", draw.normal(2, 9, 32), draw.normal(2, 9, 4, 32))
    yield case("two streams", draw.normal(2, 5, 16), draw.normal(2, 5, 2, 16))
    yield case("three streams", draw.normal(1, 7, 24), draw.normal(1, 7, 3, 24))
    yield case("eight streams", draw.normal(1, 5, 16), draw.normal(1, 5, 8, 16))
    yield case("one stream", draw.normal(1, 5, 16), draw.normal(1, 5, 1, 16))
    yield case("odd sizes", draw.normal(1, 3, 1025), draw.normal(1, 3, 4, 1025))
    yield case("many tokens", draw.normal(1, 1025, 3), draw.normal(1, 1025, 4, 3))
    yield case("one token", draw.normal(1, 1, 16), draw.normal(1, 1, 4, 16))
    yield case("expanded", draw.normal(1, 1, 16).expand(2, 5, 16), draw.normal(2, 5, 1, 16).expand(2, 5, 4, 16))
    yield case("transposed", draw.normal(5, 2, 16).transpose(0, 1), draw.normal(4, 2, 5, 16).permute(1, 2, 0, 3))
    post, comb = weights(2, 3, 4)
    yield Sample(
        "strided",
        (
            leaf(strided(draw.normal(2, 3, 16))),
            leaf(strided(draw.normal(2, 3, 4, 16))),
            leaf(strided(post)),
            leaf(comb.transpose(-1, -2)),
        ),
    )
    post, comb = weights(2, 3, 4)
    weights_rounded = leaf(post.to(dtype)), leaf(comb.to(dtype))
    yield Sample(
        "weights in the dtype", (leaf(draw.normal(2, 3, 16)), leaf(draw.normal(2, 3, 4, 16)), *weights_rounded)
    )
    yield case("no tokens", draw.normal(2, 0, 16), draw.normal(2, 0, 4, 16))


def head_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)

    def parameters(count: int, hidden: int, wide: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = torch.promote_types(dtype, torch.float32) if wide else None
        return _parameters(draw, count, count * hidden, 1, stored)

    for name, tensors in _stream_cases(draw, parameters):
        yield Sample(name, (*tensors, 1e-6, 1e-6))
    yield Sample("large epsilons", (leaf(draw.normal(2, 5, 4, 16)), *parameters(4, 16, True), 0.5, 0.1))


# DeepSeek V4 has four streams.
_STREAMS = 4
_SHAPES = {
    "deepseek-v4-flash": {"tokens": 8192, "hidden": 4096},
    "deepseek-v4-pro": {"tokens": 8192, "hidden": 7168},
}
_LARGE = {"tokens": 2**17 + 3, "hidden": 4097}


def pre_problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    wide = torch.promote_types(dtype, torch.float32)
    parameters = _parameters(draw, (2 + _STREAMS) * _STREAMS, _STREAMS * hidden, 3, wide)
    return Sample("problem", (leaf(draw.normal(1, tokens, _STREAMS, hidden)), *parameters, 1e-6, 20, 1e-6))


def post_problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    wide = torch.promote_types(dtype, torch.float32)
    post = 2 * draw.normal(1, tokens, _STREAMS, dtype=wide).sigmoid()
    comb = draw.normal(1, tokens, _STREAMS, _STREAMS, dtype=wide).softmax(-1)
    output, residual = draw.normal(1, tokens, hidden), draw.normal(1, tokens, _STREAMS, hidden)
    return Sample("problem", (leaf(output), leaf(residual), leaf(post), leaf(comb)))


def head_problem(device: torch.device | str, dtype: torch.dtype, seed: int, *, tokens: int, hidden: int) -> Sample:
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    wide = torch.promote_types(dtype, torch.float32)
    parameters = _parameters(draw, _STREAMS, _STREAMS * hidden, 1, wide)
    return Sample("problem", (leaf(draw.normal(1, tokens, _STREAMS, hidden)), *parameters, 1e-6, 1e-6))


def pre_flops(*, tokens: int, hidden: int) -> int:
    return 2 * tokens * _STREAMS * hidden * (2 + _STREAMS) * _STREAMS


def post_flops(*, tokens: int, hidden: int) -> int:
    return 2 * tokens * _STREAMS * _STREAMS * hidden


def head_flops(*, tokens: int, hidden: int) -> int:
    return 2 * tokens * _STREAMS * hidden * _STREAMS


def _limits() -> Mapping[str, Tolerance]:
    """For pre and head.

    The collapsed stream is rounded once; its gradient meets that of the projection, each rounded, in one more rounded
    sum. Parameters of the streams' dtype are rounded once more. The projection sums 4 * 1025 terms. Two gradients can
    cancel to nothing, in float32 whatever the dtype: that of a scale, one number for all tokens, and that of comb's
    part for one stream, which Sinkhorn makes constant. What remains is the rounding of some terms of size 1.
    """
    limits = tolerances(roundings=5, terms=4 * 1025, noise=16)
    return {dtype: Tolerance(limit.rtol, min(limit.atol, limits["float32"].atol)) for dtype, limit in limits.items()}


CONTRACTS = (
    OpContract(
        op="mhc",
        variant="pre",
        summary="streams collapsed into the input of a block, with the weights that lead back",
        reference=mhc_pre,
        samples=pre_samples,
        tolerances=_limits(),
        rows={"streams": 1},
        workload=Workload(problem=pre_problem, shapes=_SHAPES, flops=pre_flops, large=_LARGE),
    ),
    OpContract(
        op="mhc",
        variant="post",
        summary="the block's output spread over the streams, and the old streams mixed into the new",
        reference=mhc_post,
        samples=post_samples,
        # Both weights, both products and their sum are rounded, in the backward both terms and the gradient.
        tolerances=tolerances(roundings=5, terms=1025),
        rows={"output": 1, "residual": 1, "post": 1, "comb": 1},
        workload=Workload(problem=post_problem, shapes=_SHAPES, flops=post_flops, large=_LARGE),
    ),
    OpContract(
        op="mhc",
        variant="head",
        summary="streams collapsed into one after the last layer",
        reference=mhc_head,
        samples=head_samples,
        tolerances=_limits(),
        rows={"streams": 1},
        workload=Workload(problem=head_problem, shapes=_SHAPES, flops=head_flops, large=_LARGE),
    ),
)
