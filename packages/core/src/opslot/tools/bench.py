"""`opslot bench`: the kernels of an op side by side, and how far each is from what the machine can do."""

import argparse
import datetime
import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opslot import AUTO, EAGER, Device, Offer, OpContract, OpslotError, Registry, Workload
from opslot._attempt import Failure, attempt
from opslot._errors import nearest
from opslot._provenance import Provenance
from opslot._target import load_target
from opslot.testing._accuracy import RMS, largest_allowed
from opslot.testing._suite import ALL
from opslot.tools import chart
from opslot.tools.measure import NOT_MEASURED, Candidate, Setting, device_to_measure, environment, measure
from opslot.tools.output import command_of, print_json, print_table, quiet_registry, stdout_as_stderr
from opslot.tools.verify import Job, verify

Sizes = Mapping[str, int]
# Findings by contract, kernel, dtype and source.
_Key = tuple[str, str, str, str]
Verified = Mapping[_Key, list[str]]

_REPEATS = 20
_FEWEST = 3
# What a report calls its command: all but the folder that it is written to.
_FLAGS = ("shape", "shapes", "dtype", "device", "kernel", "repeats", "seed")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("op", metavar="OP[/VARIANT]", help="an op, all its variants, or one of them")
    command.add_argument(
        "--shape",
        action="append",
        metavar="NAME",
        help="a shape by its name, or its sizes, tokens=8192,hidden=2048; repeatable; all shapes by default",
    )
    command.add_argument("--shapes", metavar="FILE", help='a JSON file of shapes: {"name": {"tokens": 8192, ...}, ...}')
    command.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    command.add_argument("--device", help="cuda:0, cpu, ...; default: the present accelerator, else the CPU")
    command.add_argument(
        "--kernel", action="append", metavar="NAME", help="repeatable; by default eager and every usable kernel"
    )
    command.add_argument("--repeats", type=int, default=_REPEATS, help=f"default: {_REPEATS}")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--verified",
        type=Path,
        metavar="FILE",
        help="what `opslot verify --json` printed here, not to do it again",
    )
    command.add_argument("--output", type=Path, metavar="FOLDER", help="write the results as JSON, and a chart as PNG")


@dataclass(frozen=True)
class _Plan:
    """What is measured for one contract: shapes by name, eager (None) and kernels, and why others cannot run here."""

    contract: OpContract
    shapes: Mapping[str, Sizes]
    kernels: Mapping[str, Offer | None]
    unusable: Mapping[str, str]


def run(options: argparse.Namespace) -> int:
    if options.repeats < _FEWEST:
        raise OpslotError(f"--repeats {options.repeats}: a median with quartiles takes at least {_FEWEST}")
    if options.output is not None:
        chart.require_matplotlib()
        if options.output.exists() and not options.output.is_dir():
            raise OpslotError(f"--output {options.output} is a file; it must be a folder")
    known = quiet_registry()
    contracts = _contracts(known, options.op)
    if find_spec("torch") is None:
        raise OpslotError("bench runs kernels, and torch is not installed (see `opslot doctor`)")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts a CPU's memory, talks on stderr
    if options.device is not None:
        known.describe(options.device)  # raises for a device that is not here
    name = device_to_measure(options.device)
    device = known.describe(name)
    dtype = options.dtype or ("float32" if name == "cpu" else "bfloat16")
    setting = Setting(name, dtype, options.seed, options.repeats)
    verified = _read_verified(options.verified, device)
    plans = [_plan(known, contract, device, options, dtype) for contract in contracts]

    reports = []
    for plan in plans:
        report = _report(known, plan, device, setting, verified, options)
        reports.append(report)
        if options.output is not None:
            _write(options.output, report)
    if options.json:
        print_json(_finite(reports))
    return int(any(_has_failure(result) for report in reports for result in report["results"]))


def verdict(offer: Offer, source: str, contract: OpContract, device: str, dtype: str, verified: Verified) -> str:
    """The first finding of `opslot verify` against a kernel; empty when it passes."""
    names = offer.selector, offer.spec.name
    keys = [(str(contract), name, dtype, source) for name in names]
    problems = next((verified[key] for key in keys if key in verified), None)
    if problems is None:
        jobs = [Job(*contract.key, offer.selector, device, dtype, check, 0) for check in ALL]
        problems = [f"{outcome.job.check}: {outcome.problem}" for outcome in verify(jobs) if outcome.problem]
    return problems[0].splitlines()[0] if problems else ""


def _read_verified(path: Path | None, device: Device) -> Verified:
    """What `opslot verify --json` found on this device in all of its checks."""
    if path is None:
        return {}
    found: dict[_Key, list[str]] = {}
    done: dict[_Key, set[str]] = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        there = data["device"]
        for outcome in data["outcomes"]:
            key = f"{outcome['op']}/{outcome['variant']}", outcome["kernel"], outcome["dtype"], outcome["source"]
            done.setdefault(key, set()).add(outcome["check"])
            found.setdefault(key, [])
            if outcome["problem"]:
                found[key].append(f"{outcome['check']}: {outcome['problem']}")
    except OSError as error:
        raise OpslotError(f"--verified {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise OpslotError(f"--verified {path}: not what `opslot verify --json` prints: {error!r}") from error
    if there != str(device):
        raise OpslotError(f"--verified {path}: is of {there}, and this is {device}")
    return {key: problems for key, problems in found.items() if done[key] >= set(ALL)}


def _contracts(known: Registry, text: str) -> list[OpContract]:
    op, _, variant = text.partition("/")
    if variant:
        found = [known.contract(op, variant)]
    else:
        found = [c for c in known.contracts() if op in (c.op, *(alias.partition("/")[0] for alias in c.aliases))]
        if not found:
            known.contract(op)  # raises, and lists what there is
    able = [contract for contract in found if contract.workload is not None]
    if not able:
        others = [str(contract) for contract in known.contracts() if contract.workload is not None]
        raise OpslotError(
            f"{text}: the contract brings no workload to measure; these do: {', '.join(others) or 'none'}"
        )
    for contract in (contract for contract in found if contract.workload is None):
        print(f"opslot: {contract} brings no workload and is left out", file=sys.stderr)
    return able


def _plan(known: Registry, contract: OpContract, device: Device, options: argparse.Namespace, dtype: str) -> _Plan:
    if dtype not in contract.tolerances:
        default = " (the default here)" if options.dtype is None else ""
        raise OpslotError(
            f"--dtype {dtype}{default}: {contract} has no tolerance for it, so nothing could be verified"
            f"{nearest(dtype, contract.tolerances)}; it has: {', '.join(sorted(contract.tolerances))}"
        )
    key = contract.key
    unusable = {}
    if options.kernel is None:
        usable = known.list_available(*key, device, (dtype,))
        for offer in known.offers(*key):
            reasons = offer.spec.unmet(device, (dtype,))
            if reasons:
                unusable[offer.selector] = "; ".join(reasons)
    else:
        usable = options.kernel
    kernels: dict[str, Offer | None] = {}
    names = [offer.spec.name for offer in known.offers(*key)]
    for name in usable:
        chosen = known.choose(*key, name, device, (dtype,)).offer
        if chosen is None:
            kernels[EAGER] = None
        else:
            kernels[chosen.spec.name if names.count(chosen.spec.name) == 1 else chosen.selector] = chosen
    return _Plan(contract, _shapes(contract, options.shape, options.shapes), kernels, unusable)


def _shapes(contract: OpContract, asked: list[str] | None, file: str | None) -> dict[str, Sizes]:
    workload = contract.workload
    assert workload is not None
    extra = _read(file) if file is not None else {}
    valid = {**workload.shapes, **extra}
    if asked is None:
        chosen: Mapping[str, Any] = extra or workload.shapes
    else:
        chosen = {}
        for text in asked:
            if text not in valid and "=" not in text:
                raise OpslotError(
                    f"--shape {text!r}: {contract} has no such shape{nearest(text, valid)}; known: "
                    f"{', '.join(map(repr, valid))}; or give sizes, --shape {_inline(workload)}"
                )
            chosen = {**chosen, text: valid[text] if text in valid else _parse(text, workload)}
    for name, sizes in chosen.items():
        _check_sizes(contract, workload, name, sizes)
    return dict(chosen)


def _read(file: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise OpslotError(f"--shapes {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OpslotError(f"--shapes {file}: this is not JSON: {error}") from error
    if not isinstance(data, dict) or not data or not all(isinstance(sizes, dict) for sizes in data.values()):
        raise OpslotError(f'--shapes {file}: expected names with sizes, such as {{"mine": {{"tokens": 8192}}}}')
    return data


def _parse(text: str, workload: Workload) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value.isdecimal() or name in sizes:
            raise OpslotError(f"--shape {text!r}: {part!r} is not name=size, each once, such as {_inline(workload)}")
        sizes[name] = int(value)
    return sizes


def _check_sizes(contract: OpContract, workload: Workload, name: str, sizes: Mapping[str, Any]) -> None:
    parameters = inspect.signature(load_target(workload.problem, f"the workload of {contract}")).parameters
    names = [n for n in parameters if n not in ("device", "dtype", "seed")]
    needed = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    example = f"such as {_inline(workload)}"
    unknown = [n for n in sizes if n not in names]
    missing = [n for n in needed if n not in sizes]
    if unknown:
        hint = nearest(unknown[0], names)
        raise OpslotError(f"shape {name!r} of {contract}: there is no size {unknown[0]!r}{hint}, {example}")
    if missing:
        raise OpslotError(f"shape {name!r} of {contract}: {', '.join(missing)} not given, {example}")
    for size, value in sizes.items():
        if type(value) is not int or value < 1:
            raise OpslotError(f"shape {name!r} of {contract}: {size} must be a whole number above 0, got {value!r}")


def _inline(workload: Workload) -> str:
    return ",".join(f"{name}={size}" for name, size in next(iter(workload.shapes.values())).items())


def _report(
    known: Registry, plan: _Plan, device: Device, setting: Setting, verified: Verified, options: argparse.Namespace
) -> dict[str, Any]:
    contract = plan.contract
    entries, candidates = [], []
    for name, offer in plan.kernels.items():
        with stdout_as_stderr():
            entry, candidate = _examine(known, contract, name, offer, setting, verified)
        entries.append(entry)
        if candidate is not None:
            candidates.append(candidate)
    results = []
    for shape, sizes in plan.shapes.items():
        print(f"opslot bench: {contract} {shape} ...", file=sys.stderr, flush=True)
        with stdout_as_stderr():  # kernels may print while they tune
            # A kernel may leave the device unusable. What was measured before that is still worth having.
            outcome = attempt(partial(measure, contract, sizes, candidates, setting))
        figures: dict[str, Any] = {"error": str(outcome)} if isinstance(outcome, Failure) else outcome
        measured: dict[str, Any] = figures.pop("kernels", {})
        kernels = [{**entry, **measured.get(entry["kernel"], {})} for entry in entries]
        results.append({"shape": shape, "sizes": dict(sizes), **figures, "kernels": _ranked(kernels)})
        if not options.json:
            _print(f"{contract} {shape}", results[-1], f"{setting.dtype} on {device}")
    if plan.unusable and not options.json:
        print("not usable here:")
        print_table(("", ""), [(f"  {name}", reason) for name, reason in plan.unusable.items()])
    auto = known.choose(*contract.key, AUTO, device, (setting.dtype,))
    chosen = EAGER if auto.offer is None else auto.offer.selector
    chosen = next((name for name, offer in plan.kernels.items() if offer == auto.offer), chosen)
    return {
        "command": command_of(options, "bench", options.op, flags=_FLAGS),
        "date": datetime.date.today().isoformat(),
        "op": contract.op,
        "variant": contract.variant,
        "device": str(device),
        "dtype": setting.dtype,
        "seed": setting.seed,
        "repeats": setting.repeats,
        "environment": environment(setting.device, device, filter(None, plan.kernels.values())),
        "auto": {"kernel": chosen, "reason": auto.reason},
        "unusable": dict(plan.unusable),
        "results": results,
    }


def _examine(
    known: Registry, contract: OpContract, name: str, offer: Offer | None, setting: Setting, verified: Verified
) -> tuple[dict[str, Any], Candidate | None]:
    """Who the kernel is and whether it passes; nothing to measure when it does not."""
    entry: dict[str, Any] = {"kernel": name, "distribution": "", "version": "", "source": "", "nested": ""}
    if offer is None:
        return {**entry, "verdict": "", **NOT_MEASURED}, Candidate(name, contract.load_reference())
    entry |= {"distribution": offer.distribution, "version": offer.version}
    kernel = attempt(partial(known.load, offer))
    provenance = kernel if isinstance(kernel, Failure) else attempt(partial(Provenance.of, offer, kernel))
    if isinstance(kernel, Failure) or isinstance(provenance, Failure):
        return {**entry, "verdict": "", **NOT_MEASURED, "error": f"while loading: {provenance}"}, None
    entry |= {"source": provenance.source, "nested": provenance.nested}
    finding = verdict(offer, provenance.source, contract, setting.device, setting.dtype, verified)
    largest = largest_allowed(dict(offer.spec.rms_error).get(setting.dtype, RMS))
    candidate = None if finding else Candidate(name, kernel, offer.spec.backward, largest)
    return {**entry, "verdict": finding, **NOT_MEASURED}, candidate


def _ranked(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a `rank` by the time of forward and backward, the fastest first; without one what failed, last."""
    key = "forward_backward_ms" if any(kernel["forward_backward_ms"] for kernel in kernels) else "forward_ms"

    def order(kernel: dict[str, Any]) -> tuple[bool, float]:
        return not chart.passed(kernel), kernel[key]["median"] if kernel[key] else math.inf

    places = enumerate(sorted(kernels, key=order), start=1)
    return [{**k, "rank": place if chart.passed(k) and k[key] else None} for place, k in places]


def _print(title: str, result: dict[str, Any], where: str) -> None:
    sizes = ", ".join(f"{name}={size}" for name, size in result["sizes"].items())
    print(f"{title} ({sizes}), {where}")
    if result["error"]:
        print(f"  error: {result['error']}\n")
        return
    copy, gemm, floor = result["ceilings"]["copy"], result["ceilings"]["gemm"], result["floor_ms"]
    rates = f"copy {copy['gb_per_second']:.0f} GB/s" + (f", GEMM {gemm['tflops']:.3g} TFLOP/s" if gemm else "")
    if floor is not None:
        print(f"floor: forward {_short(floor['forward'])} ms, both {_short(floor['forward_backward'])} ms ({rates})")
    header = ("", "kernel", "fwd ms", "fwd+bwd ms", "% of floor", "extra memory", "error", "host us", "verdict")
    good = [kernel for kernel in result["kernels"] if chart.passed(kernel)]
    print_table(header, [_cells(kernel) for kernel in good])
    for kernel in result["kernels"]:
        if not chart.passed(kernel):
            print(f"not ranked: {kernel['kernel']}: {kernel['verdict'] or kernel['error']}")
    reasons = {(key, why): None for kernel in good for key, why in kernel["missing"].items()}
    for key, why in reasons:
        print(f"no {key.replace('_', ' ')}: {why}")
    print()


def _cells(kernel: dict[str, Any]) -> tuple[str, ...]:
    percent = [f"{value:.0f}" for value in kernel["percent_of_floor"].values() if value is not None]
    memory, errors, host = kernel["extra_memory_bytes"], kernel["error_against_eager"], kernel["host_us"]
    return (
        str(kernel["rank"] or ""),
        kernel["kernel"],
        _time(kernel["forward_ms"]),
        _time(kernel["forward_backward_ms"]),
        " / ".join(percent) or "-",
        "-" if memory is None else f"{memory / 2**30:.2f} GiB" if memory >= 2**30 else f"{memory / 2**20:.2f} MiB",
        "-" if errors is None else f"{max(errors.values(), default=0.0):.1e}".replace("0.0e+00", "0"),
        "-" if host is None else f"{host['forward']:.0f}",
        "reference" if kernel["kernel"] == EAGER else "passed",
    )


def _time(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return "-"
    low, high = spread["quartiles"]
    return f"{_short(spread['median'])} ({_short(low)}-{_short(high)})"


def _short(value: float) -> str:
    """Three digits, never an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, digits)}f}"


def _write(folder: Path, report: dict[str, Any]) -> None:
    kind = report["environment"]["device"].partition(":")[0]
    stem = f"{report['op']}-{report['variant']}-{kind}-{report['dtype']}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(report), indent=2, allow_nan=False)
        (folder / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
        chart.draw(folder / f"{stem}.png", report)
    except OSError as error:
        raise OpslotError(f"--output {folder}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null, which a figure that could not be had is too."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _has_failure(result: dict[str, Any]) -> bool:
    return bool(result["error"]) or not all(map(chart.passed, result["kernels"]))
