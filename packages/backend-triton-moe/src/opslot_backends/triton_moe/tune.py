"""Measure how the products of the experts are best cut into blocks on this GPU, and keep it for later runs.

    python -m opslot_backends.triton_moe.tune --tokens 8192 --hidden 2048 --inner 768 --experts 128 --top-k 8

`--tokens` are those of one call: of a micro-batch on one rank. Every product of forward and backward is run with each
candidate that the device holds; one whose result differs from the first one's is left out, and the fastest is kept. The
result goes into the user's cache (OPSLOT_CACHE), where the next process on such a device finds it; copy the file, whose
path is printed, to the other hosts of a job, or put the cache where all of them see it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from . import _grouped, _tiling
from ._grouped import Maths, Routed
from ._route import route
from ._tiling import Blocks, Problem, Table

Launch = Callable[[Blocks], Tensor]
Timer = Callable[[Callable[[], object]], float]

_SIZES = {
    "tokens": "of a micro-batch on one rank",
    "hidden": "hidden size of the model",
    "inner": "intermediate size of an expert",
    "experts": "experts of a layer on one rank",
    "top-k": "experts of a token",
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def candidates(problem: Problem, limit: int, *, hopper: bool) -> list[Blocks]:
    """Those that fit into `limit` bytes of shared memory, and whose sums fit into registers, the largest first."""
    heights = (128, 256) if problem.kernel == "weight_gradient" else (problem.tile,)
    # Where `up` makes two products of so many columns, gate and up.
    twice = 2 if problem.kernel.startswith("up") else 1
    depth = 128 // problem.itemsize  # the widest rows that shared memory swizzles
    found = [
        Blocks(rows, columns // twice, depth, warps, stages, beside)
        for rows in heights
        for columns in (256, 128)
        for warps in (8, 4)
        for beside in (1, 2)
        for stages in (4, 3, 2)
        # A thread has 255 registers, a multiprocessor 65,536: half of either may hold sums.
        if 64 <= rows * columns // (32 * warps) <= 128 and rows * columns * beside <= 2**15
    ]
    taken = [_tiling.shared_memory(problem.kernel, b, problem.itemsize, hopper=hopper) * b.beside for b in found]
    fitting = [blocks for blocks, size in zip(found, taken, strict=True) if size <= limit]
    deep = [blocks for blocks in fitting if blocks.stages > 2 or blocks.beside > 1]
    return deep or fitting or [_tiling.fitted(problem.kernel, min(found), problem.itemsize, limit, hopper=hopper)]


def launches(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, dtype: torch.dtype, device: str, paired: bool
) -> Iterator[tuple[Problem, Launch, Tensor | slice]]:
    """Every product of forward and backward, of random numbers and a balanced random routing.

    With each, which rows of its result are anybody's: those of padding hold what memory held.
    """
    index = torch.rand(tokens, experts, device=device).topk(top_k).indices
    weights = torch.rand(tokens, top_k, device=device).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    tile = _tiling.tile(x, index.numel(), experts)
    routed = Routed(route(index, experts, tile), weights, tile)

    def weight(*shape: int) -> Tensor:
        return torch.randn(experts, *shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    gate_up = weight(hidden, 2 * inner) if paired else weight(2 * inner, hidden)
    down = weight(inner, hidden) if paired else weight(hidden, inner)
    bias = torch.zeros(experts, 2 * inner, device=device, dtype=dtype) if paired else None
    maths = Maths(1.0, inf, 0.0, paired)
    gathered = _grouped.dispatch(x, routed)
    first, active = _grouped.up(x, gate_up, bias, routed, maths, keep=True)

    rows_of_choices, all_rows = routed.route.place.long(), slice(None)

    def problem(kernel: str, columns: int, depth: int) -> Problem:
        return Problem(kernel, dtype.itemsize, tile, routed.rows, columns, depth)

    yield (
        problem("up_paired" if paired else "up", inner, hidden),
        lambda blocks: _grouped.up(x, gate_up, bias, routed, maths, keep=True, blocks=blocks)[1],
        rows_of_choices,
    )
    for rows, matrix, transposed in (
        (active, down, not paired),
        (gathered, down, paired),
        (first, gate_up, paired),
    ):
        yield (
            problem("product", matrix.shape[1 if transposed else 2], rows.shape[1]),
            lambda blocks, rows=rows, matrix=matrix, transposed=transposed: _grouped.product(  # type: ignore[misc]
                rows, matrix, None, routed, transposed=transposed, blocks=blocks
            ),
            rows_of_choices,
        )
    for left, right in ((gathered, active), (first, gathered)):
        left, right = (right, left) if paired else (left, right)
        yield (
            problem("weight_gradient", right.shape[1], left.shape[1]),
            lambda blocks, left=left, right=right: _grouped.weight_gradient(  # type: ignore[misc]
                left, right, routed, blocks=blocks
            ),
            all_rows,
        )


def best(launch: Launch, rows: Tensor | slice, tried: Sequence[Blocks], timer: Timer) -> Blocks:
    """The fastest whose result has the first one's `rows`. Prints the time of each."""
    expected: Tensor | None = None
    found: list[tuple[float, Blocks]] = []
    for blocks in tried:
        try:
            result = launch(blocks)[rows]
        except OutOfResources as error:  # more than was reckoned
            print(f"  {blocks} does not fit: {error}")
            continue
        if expected is None:
            expected = result
        # Sums of other partial sums: a few roundings of the largest number.
        tolerance = 8 * torch.finfo(result.dtype).eps * float(expected.abs().max())
        if not float((result - expected).abs().max()) <= tolerance:
            print(f"  {blocks} gives other results: left out")
            continue
        found.append((timer(lambda blocks=blocks: launch(blocks)), blocks))  # type: ignore[misc]
        print(f"  {found[-1][0]:.3f} ms {blocks}")
    if not found:
        raise ValueError(f"none of {len(tried)} candidates runs on this device")
    return min(found)[1]


def measured(shapes: Sequence[dict[str, int]], dtype: str, device: str, paired: bool, timer: Timer) -> Table:
    """A table of the products of all shapes."""
    name, limit = _tiling.describe(torch.device(device))
    table = Table(name, _tiling.minor_version(), _tiling.source(), ())
    for shape in shapes:
        for problem, launch, rows in launches(**shape, dtype=_DTYPES[dtype], device=device, paired=paired):
            print(problem)
            tried = candidates(problem, limit, hopper=_tiling.is_hopper(torch.device(device)))
            table = _tiling.merged(table, ((problem, best(launch, rows, tried, timer)),))
    return table


def save(table: Table, path: Path) -> None:
    """Into a file, with what it has of the same device, Triton and source. No other process sees half of it."""
    # For their owner alone, as opslot-models, which keeps code beside it, wants the cache.
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    old = _tiling.own_table(table.device)
    whole = table if old is None else _tiling.merged(old, table.entries)
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(whole.dump())
    Path(file.name).replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--gpt-oss", action="store_true", help="weights as gpt-oss stores them")
    options = vars(parser.parse_args(arguments))
    dtype, paired = options.pop("dtype"), options.pop("gpt_oss")
    if min(options.values()) < 1 or options["top_k"] > options["experts"]:
        parser.error("sizes are positive, and no token chooses more experts than there are")
    unit = 16 // _DTYPES[dtype].itemsize
    if options["hidden"] % unit or options["inner"] % unit:
        parser.error(f"hidden and inner are padded to multiples of {unit} in {dtype}: give what they are padded to")
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    from triton.testing import do_bench

    def timer(run: Callable[[], object]) -> float:
        return float(do_bench(run, warmup=10, rep=40, return_mode="median"))

    table = measured([options], dtype, "cuda", paired, timer)
    path = _tiling.cache_path(table.device)
    save(table, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
