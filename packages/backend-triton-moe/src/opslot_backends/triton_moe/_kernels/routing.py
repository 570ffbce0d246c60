"""A stable counting sort of the choices by expert, in three launches and without atomics.

S choices in chunks of BS, which are looked at BO at a time. E experts in EB lanes, a power of two above E: lane E
counts the choices that are no expert's of ours.
"""

import triton
import triton.language as tl


@triton.jit
def _experts(index, choices, S, E):
    """The expert of each choice, E where it is none of ours."""
    e = tl.load(index + choices, mask=choices < S, other=-1).to(tl.int64)
    return tl.where((e < 0) | (e > E), E, e).to(tl.int32)


@triton.jit
def count(index, counts, S, E, BS: tl.constexpr, BO: tl.constexpr, EB: tl.constexpr):
    """counts[chunk, e]: how many choices of the chunk go to e."""
    chunk = tl.program_id(0)
    lanes = tl.arange(0, EB)
    total = tl.zeros((EB,), tl.int32)
    for start in range(chunk * BS, chunk * BS + BS, BO):
        choices = start + tl.arange(0, BO)
        e = _experts(index, choices, S, E)
        found = (e[:, None] == lanes[None, :]) & (choices < S)[:, None]
        total += tl.sum(found.to(tl.int32), 0)
    tl.store(counts + chunk * EB + lanes, total)


@triton.jit
def layout(counts, first, size, tiles, CHUNKS, E, TILE: tl.constexpr, BC: tl.constexpr, EB: tl.constexpr):
    """counts[chunk, e] becomes how many choices of earlier chunks go to e.

    first is where the rows of an expert begin, each at a whole tile, size how many it has.
    """
    lanes = tl.arange(0, EB)
    before = tl.zeros((EB,), tl.int32)
    for start in range(0, CHUNKS, BC):
        chunks = start + tl.arange(0, BC)
        at = counts + chunks[:, None] * EB + lanes[None, :]
        there = (chunks < CHUNKS)[:, None]
        found = tl.load(at, mask=there, other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, 0) - found, mask=there)
        before += tl.sum(found, 0)
    padded = tl.where(lanes < E, (before + TILE - 1) // TILE * TILE, 0)
    last = tl.cumsum(padded, 0)
    tl.store(first + lanes, last - padded, mask=lanes < E)
    tl.store(size + lanes, before, mask=lanes < E)
    tl.store(tiles, tl.sum(padded, 0) // TILE)


@triton.jit
def place(
    index,
    counts,
    first,
    size,
    choice,
    place,
    expert,
    S,
    E,
    CHUNKS,
    TILE: tl.constexpr,
    BS: tl.constexpr,
    BO: tl.constexpr,
    EB: tl.constexpr,
):
    """Programs of a chunk put its choices in their rows; those of a tile say its expert and fill its padding."""
    program = tl.program_id(0)
    lanes = tl.arange(0, EB)
    if program < CHUNKS:
        choices = program * BS + tl.arange(0, BS)
        e = _experts(index, choices, S, E)
        ours = (e < E) & (choices < S)
        row = tl.load(first + e, mask=ours, other=0) + tl.load(counts + program * EB + e, mask=ours, other=0)
        for start in range(program * BS, program * BS + BS, BO):
            others = start + tl.arange(0, BO)
            earlier = (_experts(index, others, S, E)[None, :] == e[:, None]) & (others[None, :] < choices[:, None])
            row += tl.sum(earlier.to(tl.int32), 1)
        tl.store(choice + row, choices, mask=ours)
        tl.store(place + choices, tl.where(ours, row, -1), mask=choices < S)
    else:
        tile = program - CHUNKS
        # The last expert whose rows begin at or before the tile; any where there is none. Experts without rows begin
        # where the next one does.
        begin = tl.load(first + lanes, mask=lanes < E, other=2147483647)
        owner = tl.maximum(tl.sum((begin <= tile * TILE).to(tl.int32), 0) - 1, 0)
        tl.store(expert + tile, owner)
        filled = tl.load(first + owner) + tl.load(size + owner)
        at = tile * TILE + tl.arange(0, TILE)
        tl.store(choice + at, tl.full((TILE,), 0, tl.int32) + S, mask=at >= filled)
