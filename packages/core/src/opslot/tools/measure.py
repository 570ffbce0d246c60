"""Measuring the kernels of one contract at one shape, side by side in this process."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot import Device, Offer, OpContract, Tolerance
from opslot._attempt import Failure, attempt
from opslot._provenance import libraries
from opslot._target import load_target
from opslot.testing._accuracy import largest_allowed

if TYPE_CHECKING:
    import torch

    Results = dict[str, torch.Tensor | None]

# The side of the square product: what fills an accelerator takes a CPU seconds, in float16 above all.
_GEMM, _GEMM_ON_CPU = 8192, 512
_COPY_BYTES, _COPY_BYTES_ON_CPU = 2**29, 2**27
_FLUSH_BYTES = 2**28
# For so long the flush keeps the device busy before each run: meanwhile the host queues the kernel, whose time is then
# that of the device alone. The host's own time is another figure.
_HEAD_START_MS = 1.0
_HOST_CALLS, _HOST_SECONDS = 20, 1.0
_CHUNK = 2**24

# The figures of a kernel; `missing` says why one of them could not be had.
NOT_MEASURED: Mapping[str, Any] = {
    "error": None,
    "forward_ms": None,
    "forward_backward_ms": None,
    "percent_of_floor": {"forward": None, "forward_backward": None},
    "extra_memory_bytes": None,
    "error_against_eager": None,
    "error_against_float64": None,
    "host_us": None,
    "missing": {},
}


@dataclass(frozen=True)
class Setting:
    """Where, in which dtype and how often is measured. `device` is torch's name of it."""

    device: str
    dtype: str
    seed: int
    repeats: int


@dataclass(frozen=True)
class Candidate:
    """A function to measure. Of one without a backward, the forward is measured while no gradients are recorded.

    `largest` is how many times eager's largest error its own may be, where the contract's tolerance is less.
    """

    name: str
    function: Callable[..., Any]
    backward: bool = True
    largest: float = field(default_factory=largest_allowed)


def device_to_measure(name: str | None) -> str:
    """Torch's full name of a device that is here, by default the accelerator, else the CPU. It becomes the current."""
    import torch

    device = torch.device(name) if name is not None else torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        return "cpu"
    if device.index is not None and name is not None:
        torch.accelerator.set_device_index(device.index)
    return f"{device.type}:{torch.accelerator.current_device_index()}"


def environment(device: str, there: Device, offers: Iterable[Offer]) -> dict[str, Any]:
    """What decides the outcome besides the code of the kernels. `device` is torch's name of `there`."""
    import torch

    return {
        "python": platform.python_version(),
        "opslot": version("opslot"),
        "device": device,
        "torch": torch.__version__,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **({"threads": torch.get_num_threads()} if device == "cpu" else {"cuda": torch.version.cuda}),
        "libraries": libraries(offers, there),
    }


def measure(
    contract: OpContract, sizes: Mapping[str, int], candidates: Iterable[Candidate], setting: Setting
) -> dict[str, Any]:
    """The figures of each candidate by name, the ceilings and the floor. `error` is set where no problem can be made.

    A candidate that raises, runs out of memory or computes something else at this shape has an `error` of its own; the
    others go on.
    """
    import torch

    assert contract.workload is not None
    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    meter = _Meter(device)
    meter.release()
    make = load_target(contract.workload.problem, f"the workload of {contract}")
    problem = attempt(lambda: _Problem.of(contract, make(device, dtype, setting.seed, **sizes), setting.seed))
    if isinstance(problem, Failure):
        meter.release()
        return {"error": f"the workload cannot make this shape: {problem}"}
    kernels = [_Kernel(candidate, problem, meter) for candidate in candidates]

    eager, exact = _references(contract, problem, meter)
    rounding = _largest_errors(eager, exact)
    for kernel in kernels:
        kernel.attempt("at this shape", kernel.compare, eager, exact, rounding, contract.tolerances[setting.dtype])
    del eager, exact
    for kernel in kernels:
        kernel.attempt("measuring memory", kernel.note_memory)
    # A CPU works while Python waits: there only a problem without work shows what the call itself costs.
    idle = problem if device.type != "cpu" else attempt(partial(_tiny, contract, device, dtype, setting.seed))
    for kernel in kernels:
        kernel.attempt("measuring the host", kernel.note_host, idle)

    flops = contract.workload.flops
    work = load_target(flops, f"the flops of {contract}")(**sizes) if flops is not None else None
    ceilings = _Ceilings(meter, dtype, gemm=work is not None)
    for turn in range(setting.repeats + 1):
        first = turn % max(1, len(kernels))
        for kernel in kernels[first:] + kernels[:first]:  # in each turn another one goes first
            kernel.attempt("in a later call", kernel.take_turn, turn > 0)  # turn 0 warms up
        ceilings.take_turn(turn > 0)
    moved = problem.bytes_moved()
    floor = _floor(ceilings.rates(), work, moved)
    return {
        "error": None,
        "flops": work,
        "bytes": moved,
        "ceilings": ceilings.figures(),
        "floor_ms": floor,
        "kernels": {kernel.candidate.name: kernel.figures(floor) for kernel in kernels},
    }


@dataclass
class _Problem:
    """One call: its arguments, which of them are differentiated, and the incoming gradients, once they are known."""

    contract: OpContract
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    given: list[torch.Tensor | None] | None = None
    output_bytes: int | None = None

    def __post_init__(self) -> None:
        arguments = self.contract.signature().bind(*self.args, **self.kwargs).arguments
        self.inputs = dict(_tensors(arguments))
        self.leaves = {name: tensor for name, tensor in self.inputs.items() if tensor.requires_grad}

    @classmethod
    def of(cls, contract: OpContract, sample: Any, seed: int) -> _Problem:
        return cls(contract, sample.args, sample.kwargs, seed)

    def as_in_a_model(self) -> list[tuple[Any, ...]]:
        """The arguments, in a list of their own, with activations that nobody but the list refers to.

        Between two layers a kernel may be the last reader of an activation, and may make use of it. The leaves here are
        held by the caller, so such a kernel would copy them.
        """
        names = list(self.contract.signature().parameters)
        return [
            tuple(
                value.clone() if name in self.contract.rows and name in self.leaves else value
                for name, value in zip(names, self.args, strict=False)
            )
        ]

    def forward(self, function: Callable[..., Any], given: list[tuple[Any, ...]] | None = None) -> tuple[Any, ...]:
        result = function(*(given.pop() if given else self.args), **self.kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if self.output_bytes is None:
            self.output_bytes = sum(_bytes(tensor) for _, tensor in _tensors(outputs))
        return outputs

    def gradients(self, outputs: tuple[Any, ...]) -> Results:
        """By name of the input, for incoming gradients that are random normal and the same for every kernel."""
        import torch

        if self.given is None:
            self.given = [self._random(output) for output in outputs]
        pairs = [(o, g) for o, g in zip(outputs, self.given, strict=True) if g is not None and o.requires_grad]
        found = torch.autograd.grad(
            [output for output, _ in pairs], list(self.leaves.values()), [g for _, g in pairs], allow_unused=True
        )
        return dict(zip(self.leaves, found, strict=True))

    def _random(self, output: Any) -> torch.Tensor | None:
        import torch

        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return None
        # Not the seed of the inputs: where a gradient equals its input, that of a norm is nothing but rounding.
        generator = torch.Generator(output.device).manual_seed(self.seed + 1_000_003)
        return torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)

    def results(self, function: Callable[..., Any], backward: bool) -> Results:
        """Outputs and gradients by name, without the graph behind them."""
        import torch

        with torch.set_grad_enabled(backward):
            outputs = self.forward(function)
        found: Results = {f"output {name}": tensor.detach() for name, tensor in _tensors(outputs, "")}
        if backward and any(tensor.requires_grad for _, tensor in _tensors(outputs)):
            found |= {f"gradient of {name}": gradient for name, gradient in self.gradients(outputs).items()}
        return found

    def in_float64(self) -> _Problem:
        import torch

        def wide(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
            if isinstance(value, (tuple, list)):
                return type(value)(wide(item) for item in value)
            return value

        kwargs = {name: wide(value) for name, value in self.kwargs.items()}
        given = [wide(gradient) for gradient in self.given] if self.given is not None else None
        return _Problem(self.contract, wide(self.args), kwargs, self.seed, given)

    def bytes_moved(self) -> dict[str, int] | None:
        """What has to be read and written at least. None when nothing ever ran, so that no output is known."""
        if self.output_bytes is None:
            return None
        inputs = sum(map(_bytes, self.inputs.values()))
        incoming = sum(_bytes(gradient) for gradient in self.given or () if gradient is not None)
        gradients = sum(leaf.numel() * leaf.element_size() for leaf in self.leaves.values())
        return {"forward": inputs + self.output_bytes, "backward": inputs + incoming + gradients}


def _references(contract: OpContract, problem: _Problem, meter: _Meter) -> tuple[Results | Failure, Results | Failure]:
    """What eager gives in the kernels' dtype, and in float64 where that fits."""
    import torch

    reference = contract.load_reference()
    eager = attempt(partial(problem.results, reference, True))
    if isinstance(eager, Failure):
        meter.release()
        return eager, Failure("eager failed in the kernels' own dtype")
    itemsize = max((t.element_size() for t in problem.inputs.values() if t.is_floating_point()), default=8)
    if itemsize == torch.float64.itemsize:
        return eager, Failure("the kernels run in float64 themselves")
    extra = attempt(partial(meter.extra_bytes, problem, reference, True))
    there = sum(_bytes(tensor) for tensor in (*problem.inputs.values(), *eager.values()) if tensor is not None)
    needed = 8 // itemsize * (there + (extra if isinstance(extra, int) else 0))
    free = meter.free_bytes()
    if free is not None and needed > free:
        return eager, Failure(f"eager in float64 would need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
    exact = attempt(lambda: problem.in_float64().results(reference, True))
    if isinstance(exact, Failure):
        meter.release()
    return eager, exact


def _largest_errors(eager: Results | Failure, exact: Results | Failure) -> dict[str, float]:
    if isinstance(eager, Failure) or isinstance(exact, Failure):
        return {}
    return {key: _Deviation.of(key, eager[key], value).worst for key, value in exact.items() if value is not None}


def _check_worst(name: str, deviation: _Deviation, other: str, limit: float, why: str) -> None:
    """What a mean over millions of elements does not show: a few that are wrong."""
    if deviation.worst > limit:
        raise AssertionError(
            f"{name} is wrong: its worst element is {deviation.worst:.3g} from {other}, at most {limit:.3g} is "
            f"allowed, {why}"
        )


def _tiny(contract: OpContract, device: torch.device, dtype: torch.dtype, seed: int) -> _Problem:
    """The contract's smallest sample that is not empty."""
    samples = load_target(contract.samples, f"the samples of {contract}")
    problems = [_Problem.of(contract, sample, seed) for sample in samples(device, dtype, seed)]
    sizes = [[tensor.numel() for tensor in problem.inputs.values()] for problem in problems]
    full = [(sum(size), number) for number, size in enumerate(sizes) if all(size)]
    return problems[min(full)[1]]


@dataclass
class _Kernel:
    """One candidate with its figures so far. Once it has failed it is not called again."""

    candidate: Candidate
    problem: _Problem
    meter: _Meter
    failure: str = ""
    deviations: dict[str, dict[str, float] | Failure] = field(default_factory=dict)
    memory: int | Failure | None = None
    host: dict[str, float] | Failure | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "forward_backward": []})

    def __post_init__(self) -> None:
        self._backward = self.candidate.backward and bool(self.problem.leaves)

    def attempt(self, stage: str, step: Callable[..., None], *arguments: Any) -> None:
        if self.failure:
            return
        outcome = attempt(partial(step, *arguments))
        if isinstance(outcome, Failure):
            self.failure = f"{stage}: {outcome}"
            self.meter.release()

    def compare(
        self,
        eager: Results | Failure,
        exact: Results | Failure,
        rounding: Mapping[str, float],
        tolerance: Tolerance,
    ) -> None:
        """Note how far the results are from both. Raises `AssertionError` where that is too far.

        `rounding` is the largest error of eager, by result, empty where nothing exact is there to tell.
        """
        mine = self.problem.results(self.candidate.function, self._backward)
        for name, theirs in (("eager", eager), ("float64", exact)):
            if isinstance(theirs, Failure):
                self.deviations[name] = theirs
                continue
            wanted = {key: value for key, value in theirs.items() if self._backward or key.startswith("output")}
            if mine.keys() != wanted.keys():
                raise AssertionError(f"it gives {', '.join(mine)}; eager gives {', '.join(wanted)}")
            found = {key: _Deviation.of(key, mine[key], value) for key, value in wanted.items() if value is not None}
            self.deviations[name] = {key: deviation.relative for key, deviation in found.items()}
            for key, deviation in found.items():
                limit = tolerance.atol + tolerance.rtol * deviation.largest
                if name == "float64":
                    times = self.candidate.largest
                    why = f"by the contract's tolerance or {times:.3g} times eager's own largest error"
                    allowed = max(limit, times * rounding.get(key, 0.0))
                    _check_worst(key, deviation, "its value in float64", allowed, why)
                    continue
                # Two results within the tolerance of the exact one differ by at most twice the tolerance.
                if not deviation.rms <= 2 * limit:  # so that NaN counts as wrong
                    raise AssertionError(
                        f"{key} is wrong: RMS {deviation.rms:.3g} from eager's, at most {2 * limit:.3g} is allowed, "
                        "twice the contract's tolerance"
                    )
                if isinstance(exact, Failure):
                    _check_worst(key, deviation, "eager's", 2 * limit, "twice the contract's tolerance")

    def note_memory(self) -> None:
        self.memory = self.meter.extra_bytes(self.problem, self.candidate.function, self._backward)

    def note_host(self, idle: _Problem | Failure) -> None:
        if isinstance(idle, Failure):
            self.host = idle
            return
        runs = {name: partial(self._run, idle, name) for name in self._passes()}
        self.host = attempt(lambda: {name: 1e3 * _median(self.meter.host_ms(run)) for name, run in runs.items()})

    def take_turn(self, keep: bool) -> None:
        for name in self._passes():
            given = self.problem.as_in_a_model() if self._backward else None
            taken = self.meter.milliseconds(partial(self._run, self.problem, name, given))
            if keep:
                self.times[name].append(taken)

    def _passes(self) -> tuple[str, ...]:
        return ("forward", "forward_backward") if self._backward else ("forward",)

    def _run(self, problem: _Problem, name: str, given: list[tuple[Any, ...]] | None = None) -> Any:
        import torch

        with torch.set_grad_enabled(self._backward):
            outputs = problem.forward(self.candidate.function, given)
        return outputs if name == "forward" else (outputs, problem.gradients(outputs))

    def figures(self, floor: Mapping[str, float] | None) -> dict[str, Any]:
        spreads = {name: _spread(times) if times and not self.failure else None for name, times in self.times.items()}
        percent = {
            name: 100 * floor[name] / spread["median"] if floor is not None and spread is not None else None
            for name, spread in spreads.items()
        }
        found: dict[str, Any] = {
            "extra_memory_bytes": self.memory,
            "host_us": self.host,
            **{f"error_against_{name}": deviation for name, deviation in self.deviations.items()},
        }
        return {
            **NOT_MEASURED,
            "error": self.failure or None,
            "forward_ms": spreads["forward"],
            "forward_backward_ms": spreads["forward_backward"],
            "percent_of_floor": percent,
            **{name: None if isinstance(value, Failure) else value for name, value in found.items()},
            "missing": {name: str(value) for name, value in found.items() if isinstance(value, Failure)},
        }


@dataclass(frozen=True)
class _Deviation:
    """How far a result is from another: the RMS of the difference, the same over the other's RMS, and the largest.

    `largest` is the largest value of the other.
    """

    rms: float
    relative: float
    worst: float
    largest: float

    @classmethod
    def of(cls, name: str, mine: torch.Tensor | None, theirs: torch.Tensor) -> _Deviation:
        import torch

        if mine is None or mine.shape != theirs.shape:
            what = "missing" if mine is None else f"of shape {tuple(mine.shape)}"
            raise AssertionError(f"{name} is {what}, eager's is of shape {tuple(theirs.shape)}")
        wide = torch.promote_types(torch.promote_types(mine.dtype, theirs.dtype), torch.float32)
        difference = square = worst = largest = 0.0
        # In pieces, so that the wide copies stay small beside the results.
        for start in range(0, mine.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            a, b = mine.reshape(-1)[piece].to(wide), theirs.reshape(-1)[piece].to(wide)
            off = torch.where(a == b, 0.0, a - b)
            difference += float(off.square().sum())
            worst = max(worst, float(off.abs().max()))
            square += float(b.square().sum())
            largest = max(largest, float(b.abs().max()))
        relative = math.sqrt(difference / square) if square else math.inf if difference else 0.0
        return cls(math.sqrt(difference / max(1, mine.numel())), relative, worst, largest)


class _Meter:
    """Times and memory on one device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.flushed_bytes = 0
        if device.type == "cpu":
            return
        self._module: Any = torch.get_device_module(device)
        properties = getattr(self._module, "get_device_properties", lambda device: None)(device)
        self.flushed_bytes = max(_FLUSH_BYTES, 2 * getattr(properties, "L2_cache_size", 0))
        self._buffer = torch.empty(self.flushed_bytes, dtype=torch.uint8, device=device)
        self._writes = 1
        self.milliseconds(self._flush)
        once = self.milliseconds(self._flush)
        self._writes = max(1, math.ceil(_HEAD_START_MS / max(once, 1e-3)))

    def _flush(self) -> None:
        for _ in range(self._writes):
            self._buffer.zero_()

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """On an accelerator between two events, with nothing of earlier runs in its L2 cache."""
        if self.device.type == "cpu":
            return self._on_this_clock(run)
        self._flush()
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        _alive = run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def host_ms(self, run: Callable[[], Any]) -> list[float]:
        """Until the calls return; on an accelerator it may still be at work then."""
        self._on_this_clock(run)
        deadline, found = time.perf_counter() + _HOST_SECONDS, list[float]()
        while len(found) < _HOST_CALLS and (len(found) < 3 or time.perf_counter() < deadline):
            self._synchronize()
            found.append(self._on_this_clock(run))
        self._synchronize()
        return found

    def _on_this_clock(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        _alive = run()  # freed after the clock is read
        return 1e3 * (time.perf_counter() - start)

    def extra_bytes(self, problem: _Problem, function: Callable[..., Any], backward: bool) -> int | Failure:
        """Peak of one forward and backward, without inputs, weights and incoming gradients, nor the gradients of them.

        On a CPU it is the peak of what torch's allocator gave out, as torch's profiler records it.
        """
        if self.device.type == "cpu":
            return _peak_on_cpu(partial(_gradient_bytes, problem, function, backward))
        if not hasattr(self._module, "max_memory_allocated"):
            return Failure(f"torch keeps no peak of the memory of {self.device.type}")
        problem.results(function, backward)  # allocates what is kept from the first call on, such as a workspace
        self.release()
        self._synchronize()
        before = self._module.memory_allocated(self.device)
        self._module.reset_peak_memory_stats(self.device)
        gradients = _gradient_bytes(problem, function, backward)
        self._synchronize()
        return int(self._module.max_memory_allocated(self.device) - before) - gradients

    def free_bytes(self) -> int | None:
        """What could still be allocated; None where that cannot be told."""
        if self.device.type == "cpu":
            known = {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", ()))
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
        if not hasattr(self._module, "mem_get_info"):
            return None
        return int(self._module.mem_get_info(self.device)[0])

    def release(self) -> None:
        """Give back what nothing refers to any more, so that the next one finds the memory."""
        gc.collect()
        if self.device.type != "cpu":
            self._module.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            self._module.synchronize()


class _Ceilings:
    """What this device reaches meanwhile: a dense product in this dtype, and a copy."""

    def __init__(self, meter: _Meter, dtype: torch.dtype, *, gemm: bool) -> None:
        import torch

        self._meter = meter
        on_cpu = meter.device.type == "cpu"
        self._side = _GEMM_ON_CPU if on_cpu else _GEMM
        self._bytes = _COPY_BYTES_ON_CPU if on_cpu else _COPY_BYTES
        generator = torch.Generator(meter.device).manual_seed(0)
        draw = partial(torch.randn, self._side, self._side, generator=generator, device=meter.device, dtype=dtype)
        self._runs: dict[str, Callable[[], Any]] = {}
        # Ones, since a CPU has all pages of untouched zeros in one place.
        source = torch.ones(self._bytes, dtype=torch.uint8, device=meter.device)
        self._runs["copy"] = partial(torch.empty_like(source).copy_, source)
        if gemm:
            self._runs["gemm"] = partial(torch.matmul, draw(), draw())
        self._times: dict[str, list[float]] = {name: [] for name in self._runs}

    def take_turn(self, keep: bool) -> None:
        for name, run in self._runs.items():
            taken = self._meter.milliseconds(run)
            if keep:
                self._times[name].append(taken)

    def rates(self) -> dict[str, float]:
        """Bytes read and written, and operations, in a millisecond."""
        amount = {"copy": 2 * self._bytes, "gemm": 2 * self._side**3}
        return {name: amount[name] / _median(times) for name, times in self._times.items()}

    def figures(self) -> dict[str, Any]:
        rates, spreads = self.rates(), {name: _spread(times) for name, times in self._times.items()}
        found: dict[str, Any] = {
            "copy": {"bytes": self._bytes, "ms": spreads["copy"], "gb_per_second": rates["copy"] / 1e6},
            "gemm": None,
        }
        if "gemm" in rates:
            found["gemm"] = {"side": self._side, "ms": spreads["gemm"], "tflops": rates["gemm"] / 1e9}
        return found | ({"l2_flush_bytes": self._meter.flushed_bytes} if self._meter.flushed_bytes else {})


def _floor(rates: Mapping[str, float], flops: float | None, moved: Mapping[str, int] | None) -> dict[str, float] | None:
    """In milliseconds. The backward has two products for each of the forward, and no pass is faster than its floor."""
    if moved is None:
        return None
    work = {"forward": flops or 0, "backward": 2 * (flops or 0)}
    floor = {name: max(work[name] / rates.get("gemm", 1.0), moved[name] / rates["copy"]) for name in work}
    return {"forward": floor["forward"], "forward_backward": floor["forward"] + floor["backward"]}


def _gradient_bytes(problem: _Problem, function: Callable[..., Any], backward: bool) -> int:
    """One forward and backward, and the bytes of the gradients that it allocated."""
    import torch

    with torch.set_grad_enabled(backward):
        outputs = problem.forward(function)
    if not backward:
        return 0
    found = [gradient for gradient in problem.gradients(outputs).values() if gradient is not None]
    given = [*problem.inputs.values(), *(gradient for gradient in problem.given or () if gradient is not None)]
    there = {tensor.untyped_storage().data_ptr() for tensor in given}
    fresh = {(g.data_ptr(), g.shape, g.stride()): g for g in found if g.untyped_storage().data_ptr() not in there}
    return sum(map(_bytes, fresh.values()))


def _peak_on_cpu(gradient_bytes: Callable[[], int]) -> int:
    from torch.autograd.profiler import profile  # torch.profiler's would import the compiler first

    with profile(profile_memory=True) as profiler:
        gradients = gradient_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    events = [e for e in trace["traceEvents"] if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    sizes = [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: float(event["ts"]))]
    return max(itertools.accumulate(sizes), default=0) - gradients


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested arguments with their names: `weight`, `gate_logits[1]`; in a bare tuple `0`, `1`."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, key)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]" if name else str(number))


def _bytes(tensor: torch.Tensor) -> int:
    """Of the elements, or of the memory behind them where several elements share it."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _spread(values: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}


def _median(values: list[float]) -> float:
    return statistics.median(values)
