"""How the products are cut into blocks: as was measured for the nearest problem.

A table holds what `tune` measured on one device, with one minor version of Triton and one source of the kernels. The
user's own table, if there is one for this device, Triton and source, goes before the one that ships. So nothing is
measured while a model trains, every rank with the same tables takes the same blocks, and `implementation` puts the
tables into the fingerprint of a binding, which the ranks compare.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

# `up_paired` is `up` where gate and up alternate.
KERNELS = ("up", "up_paired", "product", "weight_gradient")

_SHIPPED = Path(__file__).with_name("h200.json")
_SOURCE = Path(__file__).with_name("_kernels") / "experts.py"
_TUNE = "python -m opslot_backends.triton_moe.tune --help"
_log = logging.getLogger(__name__)


class Blocks(NamedTuple):
    """Rows, columns and depth of a block, the warps that share it and the stages of its loads.

    `beside`: how many such programs a multiprocessor runs side by side.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    beside: int = 1


class Problem(NamedTuple):
    """A grouped product: the rows of a tile, those of an expert on average, and the other two sizes of a product."""

    kernel: str
    itemsize: int
    tile: int
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class Table:
    """What was measured, and where."""

    device: str
    triton: str
    source: str
    entries: tuple[tuple[Problem, Blocks], ...]

    @staticmethod
    def parse(text: str) -> "Table":
        """Raises `ValueError` for what `dump` did not write."""
        try:
            data = json.loads(text)
            entries = tuple((Problem(**entry["problem"]), Blocks(**entry["blocks"])) for entry in data["entries"])
            table = Table(data["device"], data["triton"], data["source"], entries)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a table of blocks: {error!r}") from error
        for problem, blocks in entries:
            sizes = (*problem[1:], *blocks)
            if problem.kernel not in KERNELS or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
                raise ValueError(f"not a problem and its blocks: {problem}, {blocks}")
            if any(size & (size - 1) for size in (*blocks[:4], blocks.beside, problem.tile)):
                raise ValueError(f"blocks and tiles are powers of two, got {blocks} for {problem}")
            if min(blocks[:3]) < 16 or max(blocks[:3]) > 256 or blocks.warps > 16:
                raise ValueError(f"blocks of 16 to 256 on a side and at most 16 warps, got {blocks} for {problem}")
            if blocks.rows != problem.tile and problem.kernel != "weight_gradient":
                raise ValueError(f"rows of a block are those of a tile, got {blocks} for {problem}")
            if problem.kernel == "weight_gradient" and blocks.depth > padding(problem.tile):
                raise ValueError(f"a block reaches past the padding: {blocks} for {problem}")
        return table

    def dump(self) -> str:
        entries = [{"problem": p._asdict(), "blocks": b._asdict()} for p, b in sorted(self.entries)]
        return json.dumps({**asdict(self), "entries": entries}, indent=1) + "\n"


# In Triton's interpreter, where a program takes a moment however small its blocks are.
_INTERPRETED = {
    "up": Blocks(16, 32, 32, 1, 1),
    "up_paired": Blocks(16, 32, 32, 1, 1),
    "product": Blocks(16, 32, 32, 1, 1),
    "weight_gradient": Blocks(32, 32, 16, 1, 1),
}


def tile(x: Tensor, choices: int, experts: int) -> int:
    """Rows of a tile, to multiples of which the rows of an expert are padded."""
    if x.device.type != "cuda":
        return 16
    return 64 if choices <= 64 * experts else 128


def padding(tile: int) -> int:
    """Rows behind those of an expert are zeros up to the next multiple of this: products of rows read no further."""
    return min(tile, 64)


def blocks(kernel: str, x: Tensor, tile: int, rows: int, columns: int, depth: int) -> Blocks:
    """For a product of `rows` rows of an expert on average, all of them in tiles."""
    if x.device.type != "cuda":
        return _INTERPRETED[kernel]
    return _nearest(Problem(kernel, x.element_size(), tile, rows, columns, depth), x.device)


def programs(x: Tensor, blocks: Blocks) -> int:
    """As many as run at once."""
    if x.device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count * blocks.beside


def precision(x: Tensor) -> str:
    """How products of float32 are made: as PyTorch is told to, where TF32 is not allowed by three products of it."""
    if x.dtype is not torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def shared_memory(kernel: str, blocks: Blocks, itemsize: int, *, hopper: bool) -> int:
    """Bytes that a block takes at most: the stages of its loads, and half of what it stores.

    Elsewhere than on Hopper sums may pass through it in float32, and rows be padded by an eighth.
    """
    columns = blocks.columns * (2 if kernel.startswith("up") else 1)
    staged = blocks.stages * (blocks.rows + columns) * blocks.depth * itemsize
    if not hopper:
        return (staged + blocks.rows * columns * 4) * 9 // 8 + 256
    # Gate and up in alternating columns come apart in shared memory.
    eighths = 4 if kernel != "up_paired" else 6 if itemsize == 2 else 9
    return staged + blocks.rows * columns * itemsize * eighths // 8 + 256


def fitted(kernel: str, blocks: Blocks, itemsize: int, limit: int, *, hopper: bool) -> Blocks:
    """The blocks, cut down to a device's shared memory. Raises `ValueError` where none fit."""
    while (taken := shared_memory(kernel, blocks, itemsize, hopper=hopper) * blocks.beside) > limit:
        if blocks.beside > 1:
            blocks = blocks._replace(beside=1)
        elif blocks.stages > 2:
            blocks = blocks._replace(stages=blocks.stages - 1)
        elif kernel == "weight_gradient" and blocks.rows > 128:  # the only one whose rows are not those of a tile
            blocks = blocks._replace(rows=blocks.rows // 2)
        elif blocks.columns > 64:
            blocks = blocks._replace(columns=blocks.columns // 2)
        elif blocks.depth > 32:
            blocks = blocks._replace(depth=blocks.depth // 2)
        elif blocks.columns > 32:
            blocks = blocks._replace(columns=blocks.columns // 2)
        elif blocks.depth > 16:
            blocks = blocks._replace(depth=blocks.depth // 2)
        else:
            raise ValueError(
                f"moe_experts: {limit} bytes of shared memory hold no blocks of triton's, which take {taken}: "
                "choose another kernel for moe_experts"
            )
    return blocks


@lru_cache(maxsize=4096)
def _nearest(problem: Problem, device: torch.device) -> Blocks:
    name, limit = describe(device)
    known = [entry for table in tables(name) for entry in table.entries]
    alike = [(p, b) for p, b in known if (p.kernel, p.itemsize, p.tile) == problem[:3]]
    assert alike, f"the table that ships has no {problem}"
    # The first of the nearest, so that the user's own go before those that ship.
    found, measured = min(alike, key=lambda entry: _distance(entry[0], problem))
    fitting = fitted(problem.kernel, measured, problem.itemsize, limit, hopper=is_hopper(device))
    if found != problem:
        text = "%s of %d columns and depth %d takes %s, measured for %s. To measure: %s"
        _say(logging.INFO, text, problem.kernel, problem.columns, problem.depth, fitting, found, _TUNE)
    if fitting != measured:
        text = "%s: %s takes too much shared memory here, %s fits. To measure: %s"
        _say(logging.WARNING, text, problem.kernel, measured, fitting, _TUNE)
    return fitting


@lru_cache(maxsize=1024)
def _say(level: int, text: str, *what: object) -> None:
    """Once: where every step has another number of tokens, each is another problem."""
    _log.log(level, text, *what)


def _distance(one: Problem, other: Problem) -> float:
    return sum(abs(log2(a / b)) for a, b in zip(one[3:], other[3:], strict=True))


@lru_cache(maxsize=64)
def tables(device: str) -> tuple[Table, ...]:
    """What is looked up for a device: the user's table, where there is one that was measured on such, and ours."""
    shipped = Table.parse(_SHIPPED.read_text(encoding="utf-8"))
    key = (device, minor_version(), source())
    if (shipped.device, shipped.triton, shipped.source) != key:
        _log.warning(
            "blocks of the experts were measured on %s with triton %s%s; here are %s and triton %s. To measure: %s",
            shipped.device,
            shipped.triton,
            "" if shipped.source == key[2] else " for other kernels",
            *key[:2],
            _TUNE,
        )
    own = own_table(device)
    return (shipped,) if own is None else (own, shipped)


def own_table(device: str) -> Table | None:
    """What the user measured on such a device, with this Triton and these kernels."""
    if _base() is None:
        return None
    path = cache_path(device)
    try:
        own = Table.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s is ignored: %s", path, error)
        return None
    if (own.device, own.triton, own.source) != (device, minor_version(), source()):
        _log.warning("%s is ignored: it was measured on %s, triton %s, %s", path, own.device, own.triton, own.source)
        return None
    return own


def is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def describe(device: torch.device) -> tuple[str, int]:
    """The name of a GPU, and how many bytes of shared memory a program may take, which Triton knows on ROCm too."""
    index = torch.cuda.current_device() if device.index is None else device.index
    limit: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return torch.cuda.get_device_name(index), limit


def cache_path(device: str) -> Path:
    """Where `tune` keeps what it measured: one file for a device, a minor version of Triton and a source."""
    base = _base()
    if base is None:
        raise ValueError("this user has no home folder, where the cache would be: set OPSLOT_CACHE to an absolute path")
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return base / "triton-moe" / f"{name}-triton-{minor_version()}-{source()}.json"


def _base() -> Path | None:
    """The cache of opslot's packages: none for a user without a home, as in a container."""
    if told := os.environ.get("OPSLOT_CACHE"):
        if not Path(told).is_absolute():
            raise ValueError(f"OPSLOT_CACHE={told!r}: write an absolute path")
        return Path(told)
    # A relative one is to be ignored, says the XDG base directory specification.
    for home in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(home):
            return Path(home) / "opslot"
    return None


def minor_version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


@lru_cache(maxsize=1)
def source() -> str:
    """The kernels, by their text."""
    return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]


def implementation() -> str:
    """For reports and fingerprints: the tables that are looked up on this device."""
    if not torch.cuda.is_available():
        return "no device"
    found = tables(torch.cuda.get_device_name())
    text = "".join(table.dump() for table in found)
    return f"{'tuned' if len(found) > 1 else 'shipped'} blocks {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def merged(table: Table, more: tuple[tuple[Problem, Blocks], ...]) -> Table:
    """With more entries, in the place of those for the same problems."""
    return replace(table, entries=tuple(sorted({**dict(table.entries), **dict(more)}.items())))
