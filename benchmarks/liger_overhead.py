"""What opslot's way to Liger's kernels costs: a bound slot beside Liger's own functions, called with the same tensors.

    python benchmarks/liger_overhead.py --json liger_overhead.json

The candidates take turns in one process, another one first in each turn. Times on the device are between two events,
with the L2 cache overwritten before each run and long enough for the host to queue it meanwhile; the time of the host,
until the call returns, is another figure. Some of Liger's functions write over their inputs and over the incoming
gradient. So every run gets copies of its activations and incoming gradients, made before the clock starts, and is the
only one to hold the activations, as between two layers of a model. Weights and rotary tables stay the same;
`opslot, new tables` has copies of those too. Memory is the peak of a forward and backward above what was there before:
results, gradients and all between them.

`--largest 16 --dtype float32` cuts every size, to try the script. Exit code 1 when a case failed; the others go on.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from liger_train import versions, without_folders
from opslot import OpSlot, registry
from opslot._attempt import Failure, attempt

PASSES = ("forward", "forward_backward")
HEAD_START_MS = 2.0
Function = Callable[..., Any]
Times = dict[str, dict[tuple[str, str], list[float]]]  # by kind, then by candidate and pass


def direct_calls() -> dict[tuple[str, str], tuple[str, dict[str, Function]]]:
    """By contract: the shape of its workload to measure at, and Liger's functions over the contract's arguments."""
    from liger_kernel.ops import (
        LigerFusedLinearCrossEntropyFunction,
        LigerGELUMulFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, accum_dtype: Any = None) -> Any:
        target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)  # as Liger's patch shifts
        rest = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
        return LigerFusedLinearCrossEntropyFunction.apply(hidden.view(-1, hidden.shape[-1]), weight, target, *rest)[0]

    in_float32 = partial(loss, accum_dtype=torch.float32)
    return {
        ("rms_norm", "standard"): ("wide", {"direct": rms_norm}),
        ("glu", "swiglu"): ("qwen3-8b", {"direct": LigerSiLUMulFunction.apply}),
        ("glu", "geglu_tanh"): ("gemma2-2b", {"direct": LigerGELUMulFunction.apply}),
        ("rotary_pos_emb", "full"): ("qwen3-30b-a3b", {"direct": LigerRopeFunction.apply}),
        ("cross_entropy_loss", "causal"): ("qwen3-30b-a3b", {"direct": loss, "direct, float32 sums": in_float32}),
    }


@dataclass(frozen=True)
class Candidate:
    """A function, and the names of the arguments of which every call gets a copy that nobody else holds."""

    function: Function
    fresh: frozenset[str]


class Problem:
    """The arguments of a call and its incoming gradients. Neither is ever written over: calls get copies."""

    def __init__(self, arguments: Mapping[str, Any], reference: Function) -> None:
        self._arguments = arguments
        self._leaves = [a for a in arguments.values() if isinstance(a, torch.Tensor) and a.requires_grad]
        with torch.no_grad():
            outputs = tupled(reference(*arguments.values()))
        # Of a loss it is one, as `loss.backward()` gives it.
        self._incoming = [torch.randn_like(o) if o.dim() else torch.ones_like(o) for o in outputs]
        # What the next call takes: in lists, so that the call can be the only one that holds it.
        self._inputs: list[tuple[Any, ...]] = []
        self._gradients: list[list[torch.Tensor]] = []

    def prepare(self, fresh: frozenset[str]) -> tuple[Any, ...]:
        """Copy what the next call takes. To hold what is returned is to hold the inputs of that call."""
        copies = tuple(value.clone() if name in fresh else value for name, value in self._arguments.items())
        self._inputs = [copies]
        self._gradients = [[gradient.clone() for gradient in self._incoming]]
        return copies

    def forward(self, function: Function) -> tuple[torch.Tensor, ...]:
        return tupled(function(*self._inputs.pop()))

    def forward_backward(self, function: Function) -> tuple[torch.Tensor, ...]:
        outputs = self.forward(function)
        # Back to the tensors that were copied; a copy's own backward passes the gradient on as it is.
        return *outputs, *torch.autograd.grad(outputs, self._leaves, self._gradients.pop())

    def changes_its_inputs(self, candidate: Candidate) -> bool:
        """Whether a forward and backward write over inputs that the caller holds."""
        held = self.prepare(candidate.fresh)
        self.forward_backward(candidate.function)
        pairs = zip(held, self._arguments.values(), strict=True)
        return any(isinstance(mine, torch.Tensor) and not torch.equal(mine, before) for mine, before in pairs)


def tupled(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Meter:
    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.flushed_bytes = 0
        if self.on_gpu:
            self.flushed_bytes = max(2**28, 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
            self._buffer = torch.empty(self.flushed_bytes, dtype=torch.uint8, device=device)
            self._writes = 0
            once = [self.device_ms(self._buffer.zero_) for _ in range(3)][-1]
            self._writes = math.ceil(HEAD_START_MS / once)

    def device_ms(self, run: Callable[[], Any]) -> float:
        if not self.on_gpu:
            return self.host_us(run) / 1e3
        for _ in range(self._writes):
            self._buffer.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        _alive = run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def host_us(self, run: Callable[[], Any]) -> float:
        self.synchronize()
        start = time.perf_counter()
        _alive = run()  # freed after the clock is read
        return 1e6 * (time.perf_counter() - start)

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        if not self.on_gpu:
            return None
        gc.collect()
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def measure(problem: Problem, candidates: Mapping[str, Candidate], repeats: int, meter: Meter) -> dict[str, Any]:
    """The figures of every candidate by name, and what each way through opslot takes more than each direct one."""
    figures: dict[str, dict[str, Any]] = {}
    first: list[torch.Tensor] = []
    for name, candidate in candidates.items():
        changes = problem.changes_its_inputs(candidate)  # compiles, too
        problem.prepare(candidate.fresh)
        results = [result.detach().clone() for result in problem.forward_backward(candidate.function)]
        first = first or results
        apart = max(map(distance, results, first))
        del results
        problem.prepare(candidate.fresh)
        peak = meter.peak_bytes(partial(problem.forward_backward, candidate.function))
        figures[name] = {"changes_its_inputs": changes, "distance_from_direct": apart, "peak_bytes": peak}
    del first

    times: Times = {kind: {(name, p): [] for name in candidates for p in PASSES} for kind in ("device", "host")}
    names = list(candidates)
    for turn in range(repeats + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            candidate = candidates[name]
            for p in PASSES:
                for kind, clock in (("device", meter.device_ms), ("host", meter.host_us)):
                    problem.prepare(candidate.fresh)
                    taken = clock(partial(getattr(problem, p), candidate.function))
                    if turn:  # the first one warms up
                        times[kind][name, p].append(taken)

    for name in names:
        for kind, unit in (("device", "ms"), ("host", "us")):
            figures[name] |= {f"{kind}_{p}_{unit}": spread(times[kind][name, p]) for p in PASSES}
    pairs = [(a, b) for a in names for b in names if a.startswith("opslot") and b.startswith("direct")]
    return {
        "candidates": figures,
        "percent_over": [{"of": a, "over": b, **percent_over(a, b, times)} for a, b in pairs],
    }


def percent_over(mine: str, theirs: str, times: Times) -> dict[str, Any]:
    """What one takes more than another, as the median and the quartiles of the ratios of all turns."""
    found = {}
    for kind, taken in times.items():
        for p in PASSES:
            ratios = (a / b for a, b in zip(taken[mine, p], taken[theirs, p], strict=True))
            found[f"{kind}_{p}"] = spread([100 * (ratio - 1) for ratio in ratios])
    return found


def spread(values: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, by root mean square."""
    difference = (mine.float() - theirs.float()).norm().item()
    return difference / theirs.float().norm().item() if difference else 0.0


def case(key: tuple[str, str], options: argparse.Namespace, device: torch.device, meter: Meter) -> dict[str, Any]:
    shape, direct = direct_calls()[key]
    contract = registry().contract(*key)
    assert contract.workload is not None
    sizes = {name: min(size, options.largest) for name, size in contract.workload.shapes[shape].items()}
    make: Any = contract.workload.problem
    sample = make(device, getattr(torch, options.dtype), options.seed, **sizes)
    slot = OpSlot(*key)
    slot.bind(options.kernel, device=str(device))
    assert slot.kernel is not None, "--kernel eager leaves nothing to call"
    # The loss is a mean over the labels: without the number of items that the workload names.
    arguments = contract.signature().bind(*sample.args).arguments
    del sample
    for name in {"cos", "sin"} & arguments.keys():
        # The workload draws all of a table, and Liger reads half of it: the kernel refuses halves that differ.
        half = arguments[name].chunk(2, dim=-1)[0]
        arguments[name] = torch.cat((half, half), dim=-1)
    tensors = frozenset(name for name, value in arguments.items() if isinstance(value, torch.Tensor))
    # As in a model: parameters are there all along, activations are those of this call, and tables those of all layers.
    activations = tensors - {"weight", "lm_head_weight", "labels", "cos", "sin"}
    candidates = {name: Candidate(function, activations) for name, function in direct.items()}
    candidates["opslot"] = Candidate(slot.kernel, activations)
    if "cos" in tensors:
        candidates["opslot, new tables"] = Candidate(slot.kernel, tensors)  # as in the first layer
    found = measure(Problem(arguments, contract.load_reference()), candidates, options.repeats, meter)
    return {"shape": shape, "sizes": sizes, "kernel": str(slot.offer), **found}


def show(title: str, result: dict[str, Any]) -> None:
    if result["error"]:
        print(f"{title}: failed: {result['error']}", flush=True)
        return
    print(f"{title} {result['shape']} {result['sizes']}: {result['kernel']}")
    for name, figures in result["candidates"].items():
        peak = f"{figures['peak_bytes'] / 2**20:10.1f} MiB" if figures["peak_bytes"] is not None else ""
        times = "".join(f"{figures[f'device_{p}_ms']['median']:11.4f} ms" for p in PASSES)
        hosts = "".join(f"{figures[f'host_{p}_us']['median']:9.0f} us" for p in PASSES)
        manners = ", changes its inputs" if figures["changes_its_inputs"] else ""
        print(f"  {name:22}{times}{hosts}{peak}, {figures['distance_from_direct']:.1e} from direct{manners}")
    for percents in result["percent_over"]:
        print(f"  {percents['of']} over {percents['over']}:", end="")
        for kind in ("device", "host"):
            for p in PASSES:
                found = percents[f"{kind}_{p}"]
                low, high = found["quartiles"]
                print(f" {kind} {p} {found['median']:+.2f} % ({low:+.2f} to {high:+.2f});", end="")
        print(flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="liger", help="the kernel in the slot")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--largest", type=int, default=2**31, help="cut every size of a shape to this")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, for quartiles")

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(options.seed)  # of the incoming gradients
    meter = Meter(device)
    results: dict[str, dict[str, Any]] = {}
    for key in direct_calls():
        outcome = attempt(partial(case, key, options, device, meter))
        if isinstance(outcome, Failure):
            print(outcome.traceback, file=sys.stderr)
            results["/".join(key)] = {"error": without_folders(str(outcome))}
        else:
            results["/".join(key)] = {"error": None, **outcome}
        del outcome
        gc.collect()
        if meter.on_gpu:
            torch.cuda.empty_cache()
        show("/".join(key), results["/".join(key)])
    if options.json:
        data = {
            "command": without_folders(" ".join(["python benchmarks/liger_overhead.py", *arguments])),
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name() if meter.on_gpu else "cpu",
            "versions": {"python": platform.python_version(), **versions(), "torch": torch.__version__},
            "dtype": options.dtype,
            "repeats": options.repeats,
            "l2_flush_bytes": meter.flushed_bytes,
            "results": results,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["error"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
