"""docs/results.md, from the files in docs/results alone. --check: exit 1 if the page shows something else.

`*-verify.json` and `*-bench.json` hold what `opslot verify --json` and `opslot bench --json` print,
`*-liger-train.json` and `*-liger-overhead.json` what the benchmarks of these names write. Of every other file the page
says what made it.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, PAGE = DOCS / "results", DOCS / "results.md"
EAGER = "eager"
DTYPES = ("float32", "bfloat16", "float16")
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-[\w.-]+\.json")
_KINDS = {str: "a string", dict: "an object", list: "a list", float: "a number", int: "a number", type(None): "null"}
# What an environment holds besides versions does not belong among them.
_VERSIONS = ("python", "opslot", "torch", "cuda")
_PAGE = (
    "Which kernels were verified, and how fast they are. `scripts/results_page.py` writes this page from the files in "
    "[results](results). Of several results for a kernel in a dtype on a device, the newest is shown."
)
_VERIFIED = "Cells count the checks of `opslot verify` that a kernel passed, of those that were made."
_ERRORS = ("beside eager", "beside float64")
_SPEED = (
    "Medians that opslot bench measured, the fastest kernel of a shape first. In brackets: how many times as fast as "
    "eager in the same run. The floor is what the products of a pass, or reading its inputs and writing its results, "
    "take at rates that were measured in the same run; percentages are of forward / forward and backward. Memory is "
    "the peak without inputs, weights and their gradients. The last two columns are errors, the worst output / the "
    "worst gradient, beside eager and beside eager in float64. A kernel that `auto` would choose is marked so, where "
    "the data says it. More in [Use it](using.md)."
)


class Dated(Protocol):
    """Of several with the same key, the one of the largest age is shown."""

    @property
    def key(self) -> tuple[str, ...]: ...

    @property
    def age(self) -> tuple[str, str]: ...


T = TypeVar("T", bound=Dated)


class Malformed(Exception):
    """A result file that cannot be shown, and what is wrong with it."""


@dataclass(frozen=True)
class Node:
    """An object of a result file, which names the file and its place there when something is missing."""

    where: str
    value: Mapping[str, Any]

    @classmethod
    def of(cls, where: str, value: Any) -> "Node":
        if not isinstance(value, dict):
            raise Malformed(f"{where} is {_said(value)}, not an object")
        return cls(where, value)

    def take(self, name: str, *kinds: type) -> Any:
        if name not in self.value:
            raise Malformed(f"{self.where}: {name!r} is missing")
        value = self.value[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
            raise Malformed(f"{self.where}: {name!r} is {_said(value)}, not {wanted}")
        return value

    def text(self, name: str) -> str:
        return str(self.take(name, str))

    def number(self, name: str) -> float | None:
        value = self.take(name, int, float, type(None))
        return None if value is None else float(value)

    def child(self, name: str) -> "Node":
        return Node(f"{self.where}, {name}", self.take(name, dict))

    def maybe(self, name: str) -> "Node | None":
        return None if self.value.get(name) is None else self.child(name)

    def named(self, name: str) -> dict[str, "Node"]:
        child = self.child(name)
        return {key: Node.of(f"{child.where}, {key}", value) for key, value in child.value.items()}

    def children(self, name: str) -> list["Node"]:
        return [Node.of(f"{self.where}, {name}[{i}]", item) for i, item in enumerate(self.take(name, list))]

    def strings(self, name: str) -> list[str]:
        found: list[str] = self.take(name, list)
        for item in found:
            if not isinstance(item, str):
                raise Malformed(f"{self.where}: {name!r} holds {_said(item)}, not only strings")
        return found

    def median(self, name: str) -> float | None:
        spread = self.take(name, dict, type(None))
        return None if spread is None else self.child(name).number("median")


def _said(value: Any) -> str:
    return json.dumps(value)[:60]


@dataclass(frozen=True, eq=False)
class File:
    """A result file: its name, what it holds, and the charts beside it, whose names begin with its own."""

    name: str
    data: Any
    charts: tuple[str, ...] = ()

    @property
    def root(self) -> Node:
        return Node.of(self.name, self.data)

    @property
    def date(self) -> str:
        """The data's own, where it has one."""
        said = self.data.get("date") if isinstance(self.data, dict) else None
        return str(said or self.name[:10])

    @property
    def link(self) -> str:
        return f"[{self.name}](results/{self.name})"


@dataclass(frozen=True)
class Source:
    """One run of a command: the file that keeps it, its date, its command if that is known, and versions."""

    file: File
    date: str
    command: str
    versions: str

    @property
    def age(self) -> tuple[str, str]:
        """What sorts last is the newest. Of two files of a day it is the one whose name sorts last."""
        return self.date, self.file.name


@dataclass
class Verified:
    """The checks that one kernel went through in one dtype on one device, by one file."""

    device: str
    contract: str
    kernel: str
    dtype: str
    file: File
    sources: dict[Source, None] = field(default_factory=dict)
    checks: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.device, self.contract, self.kernel, self.dtype

    @property
    def age(self) -> tuple[str, str]:
        return max(source.age for source in self.sources)


@dataclass(frozen=True)
class NotRun:
    """A kernel that cannot run on a device."""

    device: str
    kernel: str
    reason: str
    source: Source

    @property
    def key(self) -> tuple[str, str]:
        return self.device, self.kernel

    @property
    def age(self) -> tuple[str, str]:
        return self.source.age


@dataclass(frozen=True)
class Measured:
    """A kernel at one shape. `shape` also has the floor, and `report` what the kernels at all shapes have in common."""

    report: Node
    shape: Node
    kernel: Node
    source: Source

    @property
    def name(self) -> str:
        return self.kernel.text("kernel")

    @property
    def key(self) -> tuple[str, ...]:
        return *group_of(self.report), self.shape.text("shape"), self.name

    @property
    def age(self) -> tuple[str, str]:
        return self.source.age

    @property
    def problem(self) -> str:
        """Why it has no figures; empty when it has."""
        texts = (self.kernel.take(name, str, type(None)) for name in ("verdict", "error"))
        return next((text for text in texts if text), "")


def read(folder: Path) -> list[File]:
    """All result files by name. Raises `Malformed` for one that is no result or chart."""
    paths = sorted(folder.iterdir())
    stems = [path.stem for path in paths if path.suffix == ".json"]
    charts: dict[str, list[str]] = {}
    for path in paths:
        if path.suffix == ".png":
            shown = max((stem for stem in stems if path.stem.startswith(stem)), key=len, default=None)
            if shown is None:
                raise Malformed(f"{path.name}: no JSON file has a name with which this chart's begins")
            charts.setdefault(shown, []).append(path.name)
        elif not _NAME.fullmatch(path.name):
            raise Malformed(f"{path.name}: not a result: expected YYYY-MM-DD-name.json, or a .png beside one")
    files = []
    for path in paths:
        if path.suffix == ".json":
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise Malformed(f"{path.name}: not JSON: {error}") from error
            files.append(File(path.name, data, tuple(charts.get(path.stem, ()))))
    return files


def runs_of(file: File) -> list[Node]:
    """The parts of a verify or bench file that are one run each."""
    if isinstance(file.data, list):
        return [Node.of(f"{file.name}, [{i}]", item) for i, item in enumerate(file.data)]
    return file.root.children("runs") if "runs" in file.root.value else [file.root]


def source_of(file: File, run: Node, also: Mapping[str, str]) -> Source:
    """`also` are versions that stand elsewhere."""
    whole = file.data if isinstance(file.data, dict) else {}
    found = dict(also)
    for node in (Node(file.name, whole), run):
        if versions := node.maybe("versions"):
            found |= versions.value
        if environment := node.maybe("environment"):
            found |= {name: environment.value[name] for name in _VERSIONS if environment.value.get(name)}
            libraries = environment.maybe("libraries")
            found |= libraries.value if libraries else {}
    said = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    command, date = (str(run.value.get(name) or "") for name in ("command", "date"))
    return Source(file, date or file.date, command, said or "versions not in the file")


def read_verify(file: File) -> tuple[list[Verified], list[NotRun]]:
    """Of several runs in one file, a check that failed in one of them failed."""
    found: dict[tuple[str, ...], Verified] = {}
    absent = []
    for run in runs_of(file):
        device, source = run.text("device"), source_of(file, run, {})
        for contract, kernel, dtype, checks, failed in outcomes_of(run):
            new = Verified(device, contract, kernel, dtype, file)
            known = found.setdefault(new.key, new)
            known.sources[source] = None
            known.checks |= checks
            known.failed |= failed
        if "not_run" in run.value:
            rows = run.children("not_run")
            absent += [NotRun(device, row.text("kernel"), row.text("reason"), source) for row in rows]
    return list(found.values()), absent


def outcomes_of(run: Node) -> Iterator[tuple[str, str, str, set[str], set[str]]]:
    """Contract, kernel, dtype, the checks that were made, and those that failed."""
    if "outcomes" in run.value:  # as `opslot verify --json` prints them
        for outcome in run.children("outcomes"):
            op, variant, kernel, dtype, check = map(outcome.text, ("op", "variant", "kernel", "dtype", "check"))
            yield f"{op}/{variant}", kernel, dtype, {check}, {check} if outcome.text("problem") else set()
    elif "kernels" in run.value:  # summed up, as in the older files
        checks = set(run.strings("checks"))
        for row in run.children("kernels"):
            failed = set(row.child("failed").value)
            if failed - checks:
                raise Malformed(f"{row.where}: 'failed' names {', '.join(sorted(failed - checks))}, not in 'checks'")
            yield row.text("op"), row.text("kernel"), row.text("dtype"), checks, failed
    else:
        raise Malformed(f"{run.where}: neither 'outcomes', which `opslot verify --json` prints, nor 'kernels'")


def read_bench(file: File) -> list[Measured]:
    found = []
    for report in runs_of(file):
        shapes = report.children("results")
        kernels = [(shape, kernel) for shape in shapes for kernel in shape.children("kernels")]
        offered = {k.text("distribution"): k.text("version") for _, k in kernels if k.text("distribution")}
        source = source_of(file, report, offered)
        found += [Measured(report, shape, kernel, source) for shape, kernel in kernels]
    return found


def group_of(report: Node) -> tuple[str, str, str]:
    """Device, contract and dtype."""
    return report.text("device"), f"{report.text('op')}/{report.text('variant')}", report.text("dtype")


def newest(items: Iterable[T]) -> list[T]:
    """One for each key; of several of the same age, the last."""
    kept: dict[tuple[str, ...], T] = {}
    for item in items:
        if item.key not in kept or item.age >= kept[item.key].age:
            kept[item.key] = item
    return list(kept.values())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines]


def by_device(device: str) -> tuple[bool, str]:
    return device.startswith("cpu"), device


def show_source(source: Source) -> str:
    charts = "".join(f", [{chart}](results/{chart})" for chart in source.file.charts)
    return f"{source.file.link}{charts}, {source.date}: {source.versions}"


def verified_page(rows: list[Verified], absent: list[NotRun], every: list[str]) -> list[str]:
    """`every` are all checks, so that a run of a few of them does not look like one of all."""
    lines = ["## Verified", "", prose(f"{_VERIFIED} All {len(every)}: {', '.join(every)}.")]
    for device in sorted({row.device for row in rows} | {each.device for each in absent}, key=by_device):
        here = [row for row in rows if row.device == device]
        lines += ["", f"### {device}", ""]
        # Runs of one file on one machine differ in their commands alone.
        commands: dict[str, dict[str, None]] = {}
        for source in sorted({s for row in here for s in row.sources}, key=lambda s: (s.age, s.command)):
            commands.setdefault(show_source(source), {})[source.command] = None
        for shown, given in commands.items():
            lines += [f"- {shown}", *(f"  - `{command}`" for command in given if command)]
        sections: dict[str, list[Verified]] = {}
        for row in sorted(here, key=lambda row: (row.kernel == EAGER, row.contract)):
            title = "Eager, by the same checks," if row.kernel == EAGER else row.contract.partition("/")[0]
            sections.setdefault(title, []).append(row)
        for title, its_rows in sections.items():
            lines += ["", f"#### {title} on {device.partition(' ')[0]}", ""]
            lines += verified_table(its_rows, len(every))
        gone = sorted((each for each in absent if each.device == device), key=lambda each: each.kernel)
        if gone:
            lines += ["", "Cannot run there:", "", *(f"- `{each.kernel}`: {each.reason}" for each in gone)]
    return lines


def verified_table(rows: list[Verified], every: int) -> list[str]:
    """A row for each kernel and file."""
    found = {row.dtype for row in rows}
    dtypes = [*(dtype for dtype in DTYPES if dtype in found), *sorted(found - set(DTYPES))]
    grouped: dict[tuple[str, str, str, str], dict[str, Verified]] = {}
    for row in rows:
        date, name = row.age
        grouped.setdefault((row.contract, row.kernel, date, name), {})[row.dtype] = row
    lines = []
    for (contract, kernel, date, name), cells in sorted(grouped.items()):
        shown = [verified_cell(cells[dtype], every) if dtype in cells else "-" for dtype in dtypes]
        lines.append([f"`{contract}`", f"`{kernel}`", *shown, f"[{date}](results/{name})"])
    return table(("contract", "kernel", *dtypes, "from"), lines)


def verified_cell(row: Verified, every: int) -> str:
    made = len(row.checks)
    missing = f", {every - made} not made" if made < every else ""
    if row.failed:
        return f"**{made - len(row.failed)} of {made} checks, failed: {', '.join(sorted(row.failed))}**{missing}"
    return f"{made} of {made} checks{missing}"


def speed_page(kept: list[Measured], everything: list[Measured]) -> list[str]:
    lines = ["## Speed", "", prose(_SPEED)]
    reports: dict[int, list[Measured]] = {}
    for item in kept:
        reports.setdefault(id(item.report), []).append(item)
    order = sorted(reports.values(), key=lambda items: items[0].age, reverse=True)
    order.sort(key=lambda items: (by_device(items[0].key[0]), items[0].key[:3]))
    last = ""
    for items in order:
        device, contract, dtype = group_of(items[0].report)
        if device != last:
            lines += ["", f"### Speed on {device}"]
            last = device
        lines += ["", f"#### {contract} in {dtype} on {device.partition(' ')[0]}", ""]
        lines += speed_table(items, [other for other in everything if other.report is items[0].report])
    return lines


def speed_table(kept: list[Measured], of_report: list[Measured]) -> list[str]:
    """The kernels of one run that no newer one has measured at their shape, and eager beside them."""
    report, source = kept[0].report, kept[0].source
    auto = report.maybe("auto")
    chosen = auto.text("kernel") if auto else None
    lines = [f"{show_source(source)}" + (f"; `{source.command}`" if source.command else "")]
    if auto:
        lines[0] += f". `auto` chooses `{chosen}`: {auto.text('reason').removeprefix('auto: ')}"
    rows, notes = [], []
    names = {item.key for item in kept}
    for shape in dict.fromkeys(item.shape.text("shape") for item in of_report):
        there = [item for item in of_report if item.shape.text("shape") == shape]
        shown = [item for item in there if item.key in names or item.name == EAGER]
        if not any(item.key in names for item in there):
            continue
        node = there[0].shape
        sizes = ", ".join(f"{name}={size}" for name, size in node.child("sizes").value.items())
        if failure := node.take("error", str, type(None)):
            notes.append(f"- {shape} ({sizes}): {first_line(failure)}")
            continue
        if node.take("floor_ms", dict, type(None)) is not None:
            floor = node.child("floor_ms")
            times = [digits(floor.number(which)) for which in ("forward", "forward_backward")]
            rows.append([shape if "=" in shape else f"{shape}: {sizes}", "floor", *times, "", "", "", ""])
        eager = next((item for item in there if item.name == EAGER and not item.problem), None)
        for item in sorted((item for item in shown if not item.problem), key=speed):
            rows.append([shape, *speed_cells(item, eager, chosen)])
        notes += [f"- `{i.name}` at {shape}, not ranked: {first_line(i.problem)}" for i in shown if i.problem]
    header = ("shape", "kernel", "forward ms", "forward + backward ms", "% of floor", "memory", *_ERRORS)
    if rows:
        lines += ["", *table(header, rows)]
    return [*lines, "", *notes] if notes else lines


def speed(item: Measured) -> tuple[float, str]:
    """Forward and backward, or forward alone where there is no backward."""
    both, forward = item.kernel.median("forward_backward_ms"), item.kernel.median("forward_ms")
    return next((time for time in (both, forward) if time is not None), math.inf), item.name


def speed_cells(item: Measured, eager: Measured | None, chosen: str | None) -> list[str]:
    kernel = item.kernel
    times = []
    for which in ("forward_ms", "forward_backward_ms"):
        time, beside = kernel.median(which), None if eager in (None, item) else factor(item, eager, which)
        slower = ", **slower than eager**" if beside is not None and is_slower(beside) else ""
        times.append(digits(time) + (f" ({times_as_fast(beside)}x{slower})" if beside is not None else ""))
    percents = kernel.child("percent_of_floor")
    of_floor = " / ".join(whole(percents.number(which)) for which in ("forward", "forward_backward"))
    errors = [error_cell(kernel.maybe(f"error_against_{which}")) for which in ("eager", "float64")]
    name = f"`{item.name}`" + (f" ({nested})" if (nested := kernel.value.get("nested")) else "")
    name += " `auto`" if item.name == chosen else ""
    return [name, *times, of_floor, size(kernel.number("extra_memory_bytes")), *errors]


def factor(item: Measured, eager: Measured | None, which: str) -> float | None:
    """How many times as fast as eager."""
    mine, theirs = item.kernel.median(which), eager.kernel.median(which) if eager else None
    return theirs / mine if mine and theirs else None


def error_cell(error: Node | None) -> str:
    """The worst of the outputs, and of the gradients if there are any."""
    if error is None:
        return "-"
    worst: dict[str, float] = {}
    for name in error.value:  # such as "output 0" and "gradient of weight"
        kind, number = name.partition(" ")[0], error.number(name)
        worst[kind] = max(worst.get(kind, 0.0), math.inf if number is None else number)  # null: it was not finite
    return " / ".join(map(scientific, worst.values()))


def times_as_fast(beside: float) -> str:
    return f"{beside:.2f}" if beside < 10 else digits(beside)


def is_slower(beside: float) -> bool:
    """By more than the digits that are shown: 0.997 is as fast as eager."""
    return round(beside, 2) < 1


def in_short(verified: list[Verified], kept: list[Measured], everything: list[Measured]) -> list[str]:
    lines = []
    for device in sorted({row.device for row in verified} | {group_of(m.report)[0] for m in kept}, key=by_device):
        rows = [row for row in verified if row.device == device and row.kernel != EAGER]
        kernels = {(row.contract, row.kernel) for row in rows}
        bad = sorted({(row.contract, row.kernel) for row in rows if row.failed})
        text = f"- {device}: {len(kernels) - len(bad)} of {len(kernels)} kernels passed every check that was made"
        lines.append(text + "".join(f"; **{kernel} of {contract} failed some**" for contract, kernel in bad))
        counts: dict[tuple[str, str, str], list[int]] = {}
        for item in (m for m in kept if group_of(m.report)[0] == device and m.name != EAGER and not m.problem):
            same = [m for m in everything if m.shape is item.shape and m.name == EAGER and not m.problem]
            beside = factor(item, same[0], "forward_backward_ms") if same else None
            if beside is not None:
                _, contract, dtype = group_of(item.report)
                slow = counts.setdefault((contract, item.name, dtype), [0, 0])
                slow[0] += is_slower(beside)
                slow[1] += 1
        for (contract, kernel, dtype), (slow_at, shapes) in sorted(counts.items()):
            if slow_at:
                what = f"`{kernel}` of `{contract}` in {dtype}"
                lines.append(f"  - slower than eager, forward and backward, at {slow_at} of {shapes} shapes: {what}")
    return lines


def train_page(file: File) -> list[str]:
    """What benchmarks/liger_train.py wrote."""
    root = file.root
    verdict = root.child("verdict")
    rows, notes = [], []
    for name, result in root.named("results").items():
        if error := result.take("error", str, type(None)):
            notes.append(f"- {result.text('title')}, failed: {first_line(error)}")
            continue
        gap = verdict.maybe(name)
        cells = [digits(result.number("step_ms")), whole(result.number("tokens_per_second"))]
        peak = result.number("peak_bytes")
        cells.append("-" if peak is None else f"{peak / 2**30:.1f}")
        cells.append("-" if gap is None else gap_cell(gap))
        rows.append([result.text("title"), *cells])
    last = whole(root.number("verdict_over_last_steps"))
    header = ("candidate", "step ms", "tokens/s", "peak GiB", f"mean gap to eager's loss, last {last} steps")
    return ["", *described(file), *(["", *table(header, rows)] if rows else []), *(["", *notes] if notes else [])]


def gap_cell(gap: Node) -> str:
    within = gap.value.get("within")
    limit = gap.child("limits").number("mean_of_differences")
    beyond = "" if within is True else ", **beyond a limit**"
    return f"{scientific(gap.number('mean_of_differences'))} (limit {scientific(limit)}){beyond}"


def overhead_page(file: File) -> list[str]:
    """What benchmarks/liger_overhead.py wrote."""
    rows, notes = [], []
    for contract, result in file.root.named("results").items():
        if error := result.take("error", str, type(None)):
            notes.append(f"- `{contract}`, failed: {first_line(error)}")
            continue
        candidates = result.child("candidates")
        for percents in result.children("percent_over"):
            names = percents.text("of"), percents.text("over")
            timed = [candidates.child(name) for name in names]
            times = [both(digits, each, "device_forward_ms", "device_forward_backward_ms") for each in timed]
            more = both(percent, percents, "device_forward", "device_forward_backward")
            rows.append([f"`{contract}`", result.text("shape"), names[0], times[0], names[1], times[1], more])
    header = ("op", "shape", "what", "ms, forward / both", "beside", "ms, forward / both", "percent more")
    return ["", *described(file), *(["", *table(header, rows)] if rows else []), *(["", *notes] if notes else [])]


def both(show: Callable[[float | None], str], node: Node, *names: str) -> str:
    return " / ".join(show(node.median(name)) for name in names)


def described(file: File) -> list[str]:
    """The line above a table of one file."""
    source = source_of(file, file.root, {})
    device = file.root.take("device", str, type(None)) or "an unknown device"
    return [f"{show_source(source)}; on {device}; `{file.root.text('command')}`"]


def index(files: list[File]) -> list[str]:
    rows = []
    for file in files:
        root = file.root
        device = root.value.get("device")
        where = device if isinstance(device, str) else "-"
        charts = "".join(f", [{chart}](results/{chart})" for chart in file.charts)
        rows.append([file.link + charts, root.text("date"), where, f"`{root.text('command')}`"])
    return table(("file", "date", "on", "command"), rows)


def digits(value: float | None) -> str:
    """Three digits, never an exponent."""
    if value is None or not math.isfinite(value):
        return "-"
    places = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, places)}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def whole(value: float | None) -> str:
    """Without a fraction, and below ten with two digits."""
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def scientific(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"


def prose(text: str) -> str:
    """No word of it in two, so that links stay whole."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else "no reason given"


def page(folder: Path) -> str:
    """The whole page. Raises `Malformed`, with the name of the file and what is missing there."""
    files = read(folder)

    def ending(text: str) -> list[File]:
        return [file for file in files if file.name.endswith(text)]

    kinds = {end: ending(f"-{end}.json") for end in ("verify", "bench", "liger-train", "liger-overhead")}
    shown = [file for kind in kinds.values() for file in kind]
    answers = [read_verify(file) for file in kinds["verify"]]
    judged = [row for rows, _ in answers for row in rows]
    verified = newest(judged)
    absent = newest(each for _, rows in answers for each in rows)
    everything = [item for file in kinds["bench"] for item in read_bench(file)]
    kept = newest(everything)
    used = {row.file for row in verified} | {m.source.file for m in kept} | {each.source.file for each in absent}
    older = [file for file in (*kinds["verify"], *kinds["bench"]) if file not in used]
    lines = [
        "# Results",
        "",
        prose(_PAGE),
        "",
        *in_short(verified, kept, everything),
        "",
        *verified_page(verified, absent, sorted({check for row in judged for check in row.checks})),
        "",
        *speed_page(kept, everything),
    ]
    for title, kind, render in (
        ("Training with Liger's kernels", "liger-train", train_page),
        ("What a slot adds to a call of Liger's kernels", "liger-overhead", overhead_page),
    ):
        if kinds[kind]:
            lines += ["", f"## {title}", *(line for file in reversed(kinds[kind]) for line in render(file))]
    if others := [file for file in files if file not in shown]:
        lines += ["", "## Other results", "", *index(others)]
    if older:
        lines += ["", f"Replaced by newer results: {', '.join(file.link for file in older)}."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    try:
        fresh = page(RESULTS)
    except Malformed as error:
        print(f"docs/results/{error}", file=sys.stderr)
        return 1
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    if options.check:
        print("docs/results.md is stale: run python scripts/results_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
