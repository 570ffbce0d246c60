"""rotary_pos_emb: rotary position embedding of queries and keys, by how a head's pairs and the tables are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .._contract import OpContract, Sample, Workload
from ._draw import Draw, leaf, strided, tolerances

if TYPE_CHECKING:
    import torch


def rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (x[i], x[i + D/2]) of every head of q and k by the angles in cos and sin.

        out = x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin

    q is [B, heads, S, D] and k [B, kv_heads, S, D] with unsqueeze_dim=1, or [B, S, heads, D] with unsqueeze_dim=2.
    cos and sin are [B, S, D], or [1, S, D] for every sequence alike, and may hold different values in their two
    halves. D is even. cos and sin are tables: a kernel may refuse ones that require a gradient, never drop it.

    Source: transformers 5.24.0, models/qwen3_moe, apply_rotary_pos_emb.
    """
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def partial_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R = cos.shape[-1] elements of every head of q and k as `full` does; the others stay.

        out = cat(rotate(x[..., :R]), x[..., R:])

    q is [B, heads, S, D] and k [B, kv_heads, S, D] with unsqueeze_dim=1, or [B, S, heads, D] with unsqueeze_dim=2.
    cos and sin are [B, S, R] or [1, S, R], R even and at most D. The pairs are (x[i], x[i + R/2]). cos and sin are
    tables: a kernel may refuse ones that require a gradient, never drop it.

    Source: transformers 5.24.0, models/qwen3_next, apply_rotary_pos_emb; the same in qwen3_5, glm4_moe, gpt_neox and
    phi3. Not that of glm and glm4, which rotate neighbours.
    """
    import torch

    width = cos.shape[-1]
    rotated = rotary_pos_emb(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((rotated[0], q[..., width:]), dim=-1), torch.cat((rotated[1], k[..., width:]), dim=-1)


def interleaved_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate neighbours (x[2i], x[2i + 1]) of every head of q and k, and put them at (i, i + D/2) of the output.

        a, b = x[..., 0::2], x[..., 1::2]
        out = cat(a * cos - b * sin, b * cos + a * sin)

    q is [B, heads, S, D] and k [B, kv_heads, S, D] with unsqueeze_dim=1, or [B, S, heads, D] with unsqueeze_dim=2.
    cos and sin are [B, S, D] or [1, S, D], D even; only their first halves count. The output's order is another than
    the input's, which attention does not see as long as q and k share it: kernels that leave the pairs where they were
    (as cohere, glm4 and deepseek_v4 do) compute another function. cos and sin are tables: a kernel may refuse ones
    that require a gradient, never drop it.

    Source: transformers 5.24.0, models/deepseek_v3, apply_rotary_pos_emb_interleave; the same in glm_moe_dsa,
    mistral4 and longcat_flash.
    """
    import torch

    half = cos.shape[-1] // 2
    cos = cos[..., :half].unsqueeze(unsqueeze_dim)
    sin = sin[..., :half].unsqueeze(unsqueeze_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotate(q), rotate(k)


def half_table_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (x[i], x[i + D/2]) of every head of q and k by angles that the tables hold once.

        a, b = x[..., :D/2], x[..., D/2:]
        out = cat(a * cos - b * sin, b * cos + a * sin)

    q is [B, heads, S, D] and k [B, kv_heads, S, D] with unsqueeze_dim=1, or [B, S, heads, D] with unsqueeze_dim=2.
    cos and sin are [B, S, D/2] or [1, S, D/2], D even. They are tables: a kernel may refuse ones that require a
    gradient, never drop it.

    Source: transformers 5.24.0, models/gpt_oss, apply_rotary_pos_emb and _apply_rotary_emb.
    """
    import torch

    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotate(q), rotate(k)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    import torch

    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    return _samples(Draw(device, dtype, seed), lambda dim: dim)


def partial_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield from _samples(draw, lambda dim: max(2, dim // 8 * 2))
    # What the field met: rotated widths that are no power of two, no half of the head, or all of it.
    for dim, width in ((80, 20), (128, 32), (6, 4), (16, 16)):
        q, k = _heads(draw, 2, 5, 2, dim), _heads(draw, 2, 5, 1, dim)
        yield Sample(f"{width} of {dim}", (leaf(q), leaf(k), *_tables(draw, 2, 5, width)))


def interleaved_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    draw = Draw(device, dtype, seed)
    yield from _samples(draw, lambda dim: dim)
    # As latent attention splits them: q is the last part of every head, k a part of what all heads share.
    q, k = _heads(draw, 2, 7, 4, 24)[..., 8:], draw.normal(2, 7, 40)[..., 24:].view(2, 1, 7, 16)
    yield Sample("parts of wider heads", (leaf(q), leaf(k), *_tables(draw, 2, 7, 16)))


def half_table_samples(device: torch.device | str, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    return _samples(Draw(device, dtype, seed), lambda dim: dim // 2, once=True)


def _samples(draw: Draw, width: Callable[[int], int], *, once: bool = False) -> Iterator[Sample]:
    """`width` gives that of the tables for a head's; `once` says that they hold every angle once."""
    import torch

    wide = torch.promote_types(draw.dtype, torch.float32)

    def tables(batch: int, length: int, dim: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        return _tables(draw, batch, length, width(dim), dtype, once=once)

    def heads(batch: int, length: int, count: int, dim: int) -> torch.Tensor:
        return leaf(_heads(draw, batch, length, count, dim))

    yield Sample("grouped heads", (heads(2, 7, 4, 16), heads(2, 7, 2, 16), *tables(2, 7, 16)))
    yield Sample("one table for all", (heads(3, 5, 2, 8), heads(3, 5, 2, 8), *tables(1, 5, 8)))
    expanded = (table.expand(3, -1, -1) for table in tables(1, 5, 8))
    yield Sample("expanded tables", (heads(3, 5, 2, 8), heads(3, 5, 1, 8), *expanded))
    after = leaf(draw.normal(2, 7, 4, 16)), leaf(draw.normal(2, 7, 2, 16))
    yield Sample("heads after sequence", (*after, *tables(2, 7, 16)), {"unsqueeze_dim": 2})
    contiguous = leaf(draw.normal(2, 3, 9, 32)), leaf(draw.normal(2, 1, 9, 32))
    yield Sample("contiguous", (*contiguous, *tables(2, 9, 32)))
    yield Sample("pairs of 1", (heads(1, 3, 1, 2), heads(1, 3, 1, 2), *tables(1, 3, 2)))
    yield Sample("real heads", (heads(1, 3, 33, 128), heads(1, 3, 3, 128), *tables(1, 3, 128)))
    yield Sample("odd sizes", (heads(1, 1025, 1, 6), heads(1, 1025, 3, 6), *tables(1, 1025, 6)))
    apart = leaf(strided(draw.normal(2, 2, 4, 8))), leaf(strided(draw.normal(2, 1, 4, 8)))
    yield Sample("strided", (*apart, *(strided(table) for table in tables(2, 4, 8))))
    # Nothing says that both halves of a table agree.
    free = draw.normal(2, 4, width(8)), draw.normal(2, 4, width(8))
    yield Sample("tables of any numbers", (heads(2, 4, 2, 8), heads(2, 4, 2, 8), *free))
    yield Sample("float32 tables", (heads(2, 4, 2, 8), heads(2, 4, 1, 8), *tables(2, 4, 8, wide)))
    # Which a kernel may refuse: angles are seldom learnt.
    yield Sample("learnt tables", (heads(2, 4, 2, 8), heads(2, 4, 1, 8), *map(leaf, tables(2, 4, 8))))
    yield Sample("no tokens", (heads(2, 0, 2, 8), heads(2, 0, 1, 8), *tables(2, 0, 8)))


def _tables(
    draw: Draw, batch: int, length: int, width: int, dtype: torch.dtype | None = None, *, once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    angle = draw.normal(batch, length, width if once else width // 2, scale=3.0, dtype=torch.float64)
    angle = angle if once else angle.repeat(1, 1, 2)
    return angle.cos().to(dtype or draw.dtype), angle.sin().to(dtype or draw.dtype)


def _heads(draw: Draw, batch: int, length: int, count: int, dim: int) -> torch.Tensor:
    # As attention makes them: projected to [B, S, heads, D], then transposed.
    return draw.normal(batch, length, count, dim).transpose(1, 2)


def problem(
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    table: int,
) -> Sample:
    """`table` is the width of cos and sin, whose halves agree as a model's do: there are kernels that need it."""
    draw = Draw(device, dtype, seed, in_place=True)
    q, k = _heads(draw, batch, tokens, heads, dim), _heads(draw, batch, tokens, kv_heads, dim)
    angle = draw.normal(batch, tokens, table // 2, scale=3.0).repeat(1, 1, 2)
    return Sample("problem", (leaf(q), leaf(k), angle.cos(), angle.sin()))


def _shape(heads: int, kv_heads: int, dim: int, table: int, *, batch: int = 2, tokens: int = 8192) -> dict[str, int]:
    return {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "dim": dim, "table": table}


def _contract(
    variant: str,
    summary: str,
    reference: Callable[..., object],
    samples: Callable[..., Iterator[Sample]],
    shapes: dict[str, dict[str, int]],
    table: int,
) -> OpContract:
    return OpContract(
        op="rotary_pos_emb",
        variant=variant,
        summary=summary,
        reference=reference,
        samples=samples,
        # Two products and their sum, and the rounding of a gradient that passes through both.
        tolerances=tolerances(roundings=4, terms=2),
        aliases=(f"apply_rotary_pos_emb/{variant}",),
        # Whole sequences: where the tokens lie depends on unsqueeze_dim. A table of one sequence serves all rows.
        rows={"q": 0, "k": 0, "cos": 0, "sin": 0},
        workload=Workload(problem=problem, shapes=shapes, large=_shape(32, 1, 128, table, batch=1, tokens=2**19 + 3)),
    )


CONTRACTS = (
    _contract(
        "full",
        "rotary position embedding over the whole head, halves split",
        rotary_pos_emb,
        samples,
        {
            "qwen3-30b-a3b": _shape(32, 4, 128, 128),
            "llama3-8b": _shape(32, 8, 128, 128),
            "gemma3-27b": _shape(32, 16, 128, 128),
        },
        table=128,
    ),
    _contract(
        "partial",
        "rotary position embedding over the first cos.shape[-1] elements of a head, halves split",
        partial_rotary_pos_emb,
        partial_samples,
        {
            "qwen3-next-80b-a3b": _shape(16, 2, 256, 64),
            "glm-4.5": _shape(96, 8, 128, 64),
        },
        table=64,
    ),
    _contract(
        "interleaved",
        "rotary position embedding of neighbours, whose output has its halves split",
        interleaved_rotary_pos_emb,
        interleaved_samples,
        {
            "deepseek-v3": _shape(128, 1, 64, 64),
            "glm-5": _shape(64, 1, 64, 64),
        },
        table=128,
    ),
    _contract(
        "half_table",
        "rotary position embedding over the whole head, halves split, each angle once in the tables",
        half_table_rotary_pos_emb,
        half_table_samples,
        {"gpt-oss-120b": _shape(64, 8, 64, 32)},
        table=64,
    ),
)
