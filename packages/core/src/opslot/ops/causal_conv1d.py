"""causal_conv1d/standard: the short convolution before the delta rule of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances
from ._packed import segments

if TYPE_CHECKING:
    import torch


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each channel convolved with its own weights, from its past alone; then SiLU, if asked for.

        out[b, c, t] = act(bias[c] + sum over w of weight[c, w] * hidden_states[b, c, t - W + 1 + w])

    hidden_states is [B, C, L], weight [C, W], bias [C]; what lies before the first token is 0. The layout is that of
    torch's convolutions, a transposed view in most models, whose channels lie next to each other. Convolution and
    activation are computed in the dtype of the weight, the result has that of hidden_states. `activation` is None,
    "silu" or "swish", which are the same; others are refused.

    With `cu_seqlens`, N + 1 integers (int32 or int64, on the device of the tokens) from 0 to L, the single row of
    the batch (B = 1) holds N sequences one after the other, and none sees another: values and gradients are those of N
    separate calls. A sequence may be empty.

    There is no state: a model that decodes puts the past in front of hidden_states and drops what comes out for it.

    Source: transformers 5.24.0, models/qwen3_next, causal_conv1d_fn, which has no packed sequences and refuses them.
    """
    import torch

    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d/standard: activation must be None, 'silu' or 'swish', got {activation!r}")
    if cu_seqlens is None:
        return _sequence(hidden_states, weight, bias, activation)
    spans = segments("causal_conv1d/standard", cu_seqlens, hidden_states.shape[0], hidden_states.shape[-1])
    parts = [_sequence(hidden_states[..., start:end], weight, bias, activation) for start, end in spans]
    return torch.cat(parts, dim=-1)


def _sequence(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    from torch.nn.functional import conv1d, pad, silu

    channels, width = weight.shape
    length = hidden_states.shape[-1]
    x = hidden_states.to(weight.dtype)
    if length == 0:  # torch refuses an empty sequence
        x = pad(x, (0, 1))
    out = conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=channels)[..., :length]
    if activation is not None:
        out = silu(out)
    return out.to(hidden_states.dtype)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    wide = torch.promote_types(dtype, torch.float32)

    def case(name: str, batch: int, channels: int, length: int, width: int, **keywords: Any) -> Sample:
        # The channels of a token lie next to each other, as a projection gives them.
        x = draw.normal(batch, length, channels).transpose(1, 2)
        return Sample(name, (leaf(x), leaf(draw.normal(channels, width, scale=width**-0.5))), keywords)

    def packed(name: str, *ends: int, width: int = 4, dtype: torch.dtype = torch.int64, **keywords: Any) -> Sample:
        cu_seqlens = torch.tensor((0, *ends), dtype=dtype, device=device)
        return case(name, 1, 8, ends[-1], width, cu_seqlens=cu_seqlens, **keywords)

    def bias(channels: int) -> torch.Tensor:
        return leaf(draw.normal(channels))

    yield case("ordinary", 2, 24, 33, 4, activation="silu")
    yield case("swish", 2, 24, 9, 4, activation="swish")
    yield case("no activation", 2, 24, 9, 4)
    yield case("bias", 2, 24, 9, 4, bias=bias(24), activation="silu")
    yield case("bias, no activation", 2, 24, 9, 4, bias=bias(24))
    yield case("width 1, which has no past", 2, 8, 9, 1, activation="silu", bias=bias(8))
    yield case("width 2", 2, 8, 9, 2, activation="silu")
    yield case("width 7", 2, 8, 9, 7, activation="silu")
    yield case("odd sizes", 3, 3, 1025, 3, activation="silu", bias=bias(3))
    yield case("many channels", 1, 1025, 5, 4, activation="silu")
    yield case("shorter than the weights", 2, 8, 2, 4, activation="silu")
    yield case("one token", 1, 8, 1, 4, activation="silu", bias=bias(8))
    yield case("one channel", 1, 1, 7, 4, activation="silu")
    yield case("no tokens", 2, 8, 0, 4, activation="silu", bias=bias(8))
    yield case("no sequences", 0, 8, 5, 4, activation="silu")
    yield packed("packed", 3, 6, activation="silu", bias=bias(8))
    yield packed("packed, no activation", 5, 11, 18)
    yield packed("packed, int32", 64, 65, 130, dtype=torch.int32, activation="silu")
    yield packed("packed, width 7", 5, 6, 17, width=7, activation="silu")
    yield packed("packed, one empty", 3, 3, 6, activation="silu", bias=bias(8))
    yield packed("packed, single tokens", 1, 2, 3, 4, 5, activation="silu")
    yield packed("packed, one sequence", 9, activation="silu")
    yield packed("packed, no tokens", 0, 0, activation="silu", bias=bias(8))

    weight = leaf(draw.normal(8, 4, scale=0.5))
    yield Sample("contiguous", (leaf(draw.normal(2, 8, 9)), weight, bias(8), "silu"))
    yield Sample(
        "strided",
        (leaf(strided(draw.normal(2, 8, 9))), leaf(strided(draw.normal(8, 4))), leaf(strided(draw.normal(8)))),
    )
    yield Sample("transposed weights", (leaf(draw.normal(2, 8, 9)), leaf(draw.normal(4, 8).t()), None, "silu"))
    yield Sample(
        "expanded", (leaf(draw.normal(1, 8, 1).expand(3, 8, 9)), weight, leaf(draw.normal(1).expand(8)), "silu")
    )
    yield Sample(
        "float32 weights",
        (leaf(draw.normal(2, 8, 9)), leaf(draw.normal(8, 4, dtype=wide)), leaf(draw.normal(8, dtype=wide)), "silu"),
    )
    yield Sample("saturated", (leaf(draw.normal(2, 8, 9, scale=30)), weight), {"activation": "silu"})


def problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    batch: int,
    length: int,
    channels: int,
    width: int,
    packed: int = 0,
) -> Sample:
    """`packed` is how many sequences of about one length the row holds, 0 where there is one a row."""
    import torch

    draw = Draw(device, dtype, seed, in_place=True)
    x = draw.normal(batch, length, channels).transpose(1, 2)
    keywords: dict[str, Any] = {"activation": "silu"}
    if packed:
        ends = [length * number // packed for number in range(packed + 1)]
        keywords["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return Sample("problem", (leaf(x), leaf(draw.normal(channels, width, scale=width**-0.5))), keywords)


def refused(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    import torch

    draw = Draw(device, dtype, seed)
    x, weight = draw.normal(2, 8, 6), draw.normal(8, 4)
    yield Sample("another activation", (x, weight, None, "gelu"))
    yield Sample("packed in a batch of two", (x, weight), {"cu_seqlens": torch.tensor((0, 3, 6), device=device)})
    one = x[:1]
    yield Sample("sequences that end early", (one, weight), {"cu_seqlens": torch.tensor((0, 3, 5), device=device)})


CONTRACTS = (
    OpContract(
        op="causal_conv1d",
        variant="standard",
        summary="short depthwise convolution over the past, then SiLU; packed sequences stay apart",
        reference=causal_conv1d,
        samples=samples,
        refused=refused,
        # Forward rounds the convolution and SiLU; backward SiLU's derivative, taken at the rounded convolution, and
        # each gradient. The derivative multiplies its cancelling 1 - sigmoid(x) by x: up to 100 roundings in float32,
        # as a sum of 1025 terms has.
        tolerances=tolerances(roundings=5, terms=1025),
        rows={"hidden_states": 0},
        packed={"hidden_states": -1},
        workload=Workload(
            problem=problem,
            shapes={
                "qwen3-next-80b-a3b": {"batch": 2, "length": 8192, "channels": 8192, "width": 4},
                "qwen3-next-80b-a3b, packed": {"batch": 1, "length": 16384, "channels": 8192, "width": 4, "packed": 16},
                "qwen3.5-4b": {"batch": 4, "length": 4096, "channels": 8192, "width": 4},
            },
            # Packed, since torch's own convolution takes no more than 2**31 elements a call.
            large={"batch": 1, "length": 2**18 + 8, "channels": 8192, "width": 4, "packed": 8},
        ),
    ),
)
