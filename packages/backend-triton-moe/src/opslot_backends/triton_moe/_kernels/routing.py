"""A stable counting sort of the choices by expert, in three launches and without atomics.

S choices in chunks of BS, E experts of which there are EB lanes, a power of two above E: lane E counts the choices that
are no expert's of ours.
"""

import triton
import triton.language as tl


@triton.jit
def _experts(index, choices, S, E):
    """The expert of each choice, E where it is none of ours."""
    e = tl.load(index + choices, mask=choices < S, other=-1).to(tl.int64)
    return tl.where((e < 0) | (e > E), E, e).to(tl.int32)


@triton.jit
def count(index, counts, S, E, BS: tl.constexpr, EB: tl.constexpr):
    """counts[chunk, e]: how many choices of the chunk go to e."""
    chunk = tl.program_id(0)
    choices = chunk * BS + tl.arange(0, BS)
    e = _experts(index, choices, S, E)
    lanes = tl.arange(0, EB)
    found = (e[:, None] == lanes[None, :]) & (choices < S)[:, None]
    tl.store(counts + chunk * EB + lanes, tl.sum(found.to(tl.int32), 0))


@triton.jit
def layout(counts, first, rows, tiles, CHUNKS, E, TILE: tl.constexpr, BC: tl.constexpr, EB: tl.constexpr):
    """counts[chunk, e] becomes how many choices of earlier chunks go to e; row CHUNKS, how many of all.

    first and rows are where the rows of an expert begin and how many there are, with the padding to whole tiles.
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
    tl.store(counts + CHUNKS * EB + lanes, before)
    padded = tl.where(lanes < E, (before + TILE - 1) // TILE * TILE, 0)
    last = tl.cumsum(padded, 0)
    tl.store(first + lanes, last - padded, mask=lanes < E)
    tl.store(rows + lanes, padded, mask=lanes < E)
    tl.store(tiles, tl.sum(padded, 0) // TILE)


@triton.jit
def place(
    index,
    counts,
    first,
    rows,
    choice,
    place,
    expert,
    S,
    E,
    CHUNKS,
    TILE: tl.constexpr,
    BS: tl.constexpr,
    EB: tl.constexpr,
):
    """Programs of a chunk put its choices in their rows; those of a tile say its expert and fill its padding."""
    program = tl.program_id(0)
    lanes = tl.arange(0, EB)
    if program < CHUNKS:
        choices = program * BS + tl.arange(0, BS)
        e = _experts(index, choices, S, E)
        others = program * BS + tl.arange(0, BS)
        earlier = (_experts(index, others, S, E)[None, :] == e[:, None]) & (others[None, :] < choices[:, None])
        ours = (e < E) & (choices < S)
        row = tl.load(first + e, mask=ours, other=0) + tl.load(counts + program * EB + e, mask=ours, other=0)
        row += tl.sum(earlier.to(tl.int32), 1)
        tl.store(choice + row, choices, mask=ours)
        tl.store(place + choices, tl.where(ours, row, -1), mask=choices < S)
    else:
        tile = program - CHUNKS
        begin = tl.load(first + lanes, mask=lanes < E, other=0)
        size = tl.load(rows + lanes, mask=lanes < E, other=0)
        # The expert whose rows hold the tile; any where there is none.
        e = tl.sum(((begin + size <= tile * TILE) & (lanes < E)).to(tl.int32), 0)
        e = tl.minimum(e, E - 1)
        tl.store(expert + tile, e)
        filled = tl.load(first + e) + tl.load(counts + CHUNKS * EB + e)
        at = tile * TILE + tl.arange(0, TILE)
        tl.store(choice + at, tl.full((TILE,), 0, tl.int32) + S, mask=at >= filled)
