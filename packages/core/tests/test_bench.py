"""opslot bench: every claim of its output, on tiny shapes, with planted kernels."""

import json
import math
import re
import time
from dataclasses import replace
from functools import partial

import opslot
import pytest
import torch
from opslot import Backend, KernelSpec, OpContract, Priority, Registry, Requires, Sample, Tolerance, Workload
from opslot._attempt import Failure, attempt
from opslot._device import CORE_KINDS
from opslot.testing import check
from opslot.testing._suite import QUICK
from opslot.tools import bench, measure
from opslot.tools.cli import main
from opslot.tools.verify import Outcome

LARGE = 64  # rows from which on some of the kernels below fail
SLEEP = 0.03


def project(x, weight):
    """x @ weight"""
    return x @ weight


def transposed(x, weight):
    return torch.nn.functional.linear(x, weight.t())


def slow(x, weight):
    time.sleep(SLEEP)
    return x @ weight


def wrong(x, weight):
    return x @ weight * 1.01


def raising(x, weight):
    raise NotImplementedError("no such tile\nand a long story")


def wrong_when_large(x, weight):
    return x @ weight * (1.1 if x.shape[0] >= LARGE else 1)


def one_wrong_when_large(x, weight):
    out = x @ weight
    if x.shape[0] >= LARGE:  # by what the mean of all elements does not show
        out = out + 1e-3 * (torch.arange(out.numel()) == 0).view(out.shape)
    return out


def raising_when_large(x, weight):
    if x.shape[0] >= LARGE:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 9.00 GiB")
    return x @ weight


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if x.shape[0] >= LARGE:
            raise ZeroDivisionError("in backward")
        return grad @ weight.t(), x.t() @ grad


def raising_in_backward(x, weight):
    return _RaisingBackward.apply(x, weight)


class _Wasting(torch.autograd.Function):
    """Takes a buffer of 1 MiB in the forward and one of 3 MiB in the backward, and keeps neither."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        torch.empty(2**20, dtype=torch.uint8)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        results = grad @ weight.t(), x.t() @ grad
        torch.empty(3 * 2**20, dtype=torch.uint8)
        return results


def wasting(x, weight):
    return _Wasting.apply(x, weight)


def chatting(x, weight):
    print("tuning, please wait")
    return x @ weight


def draw(rows, width, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (width, width))
    x, weight = (torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_() for shape in shapes)
    return Sample(f"{rows} rows", (x, weight))


def samples(device, dtype, seed):
    yield draw(5, 4, device, dtype, seed)
    yield draw(2, 2, device, dtype, seed)
    yield draw(0, 2, device, dtype, seed)


def problem(device, dtype, seed, *, rows, width):
    if width == 13:
        raise RuntimeError("13 brings bad luck")
    return draw(rows, width, device, dtype, seed)


SMALL, TALL = {"rows": 8, "width": 16}, {"rows": 2 * LARGE, "width": 16}


def contract(variant="standard", workload=True, **fields):
    return OpContract(
        op="project",
        variant=variant,
        summary="",
        reference=project,
        samples=samples,
        tolerances={"float32": Tolerance(1e-5, 1e-6), "bfloat16": Tolerance(2e-2, 1e-3)},
        workload=Workload(
            problem=problem,
            shapes={"small": SMALL, "tall": TALL},
            flops=lambda rows, width: 2 * rows * width**2,
        )
        if workload
        else None,
        **fields,
    )


def spec(name, target, **fields):
    return KernelSpec(op="project", name=name, target=target, priority=Priority.PORTABLE, **fields)


def known_with(*kernels):
    registry = Registry()
    contracts = (contract(aliases=("projection/standard",)), contract("bare", workload=False))
    registry.add(Backend(api=1, contracts=contracts, device_kinds=CORE_KINDS), "opslot", "1.0")
    registry.add(Backend(api=1, kernels=kernels), "acme", "2.0")
    return registry


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measure, "_GEMM_ON_CPU", 64)
    monkeypatch.setattr(measure, "_COPY_BYTES_ON_CPU", 2**20)

    def verify_here(jobs):
        """In this process, which alone knows the kernels of these tests; and the quick checks alone."""
        for job in jobs:
            if job.check in QUICK:
                call = partial(
                    check, job.op, job.variant, job.kernel, device=job.device, dtype=job.dtype, checks=(job.check,)
                )
                outcome = attempt(call)
                yield Outcome(job, str(outcome) if isinstance(outcome, Failure) else "", 0.0)

    monkeypatch.setattr(bench, "verify", verify_here)


@pytest.fixture
def offering(monkeypatch):
    def offering(*kernels):
        monkeypatch.setattr("opslot._discovery._registry", known_with(*kernels))

    return offering


@pytest.fixture
def run(capsys):
    def run(*arguments, code=0, repeats="3"):
        asked = main(["bench", "project", "--device", "cpu", "--repeats", repeats, *arguments])
        captured = capsys.readouterr()
        assert asked == code, captured
        return captured

    return run


@pytest.fixture
def results(run):
    """Of one run with --json: the kernels by name, for each shape."""

    def results(*arguments, **keywords):
        (report,) = json.loads(run("--json", *arguments, **keywords).out)
        return {r["shape"]: {kernel["kernel"]: kernel for kernel in r["kernels"]} for r in report["results"]}

    return results


def test_the_table_ranks_by_time_and_shows_every_figure(offering, run):
    offering(spec("slow", slow), spec("transposed", transposed))
    out = run("--shape", "tall").out
    title, floor, header, *rows = out.splitlines()
    assert title.startswith("project/standard tall (rows=128, width=16), float32 on cpu")
    assert re.fullmatch(r"floor: forward \S+ ms, both \S+ ms \(copy \S+ GB/s, GEMM \S+ TFLOP/s\)", floor)
    for column in ("kernel", "fwd ms", "fwd+bwd ms", "% of floor", "extra memory", "error", "host us", "verdict"):
        assert column in header
    lines = {row.split()[1]: row for row in rows if row}
    assert lines["slow"].split()[0] == "3"  # of three: eager and the other kernel do not sleep
    assert {name: line.split()[-1] for name, line in lines.items()} == {
        "slow": "passed",
        "transposed": "passed",
        "eager": "reference",
    }
    assert "not ranked" not in out


def test_forward_and_both_are_timed_apart_with_quartiles(offering, results):
    offering(spec("slow", slow))
    kernel = results("--shape", "small", "--kernel", "slow")["small"]["slow"]
    for name in ("forward_ms", "forward_backward_ms"):
        low, high = kernel[name]["quartiles"]
        assert 1e3 * SLEEP <= low <= kernel[name]["median"] <= high < 100 * 1e3 * SLEEP
    assert kernel["host_us"]["forward"] >= 1e6 * SLEEP
    assert kernel["rank"] == 1


def test_a_backward_takes_part_in_the_second_time_only(offering, results):
    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            time.sleep(10 * SLEEP)
            return grad @ weight.t(), x.t() @ grad

    offering(spec("sleeping", lambda x, weight: Sleeping.apply(x, weight)))
    kernel = results("--shape", "small")["small"]["sleeping"]
    assert kernel["forward_backward_ms"]["median"] >= 1e4 * SLEEP > kernel["forward_ms"]["median"]


def test_kernels_take_turns_and_each_goes_first(offering, run, monkeypatch):
    calls = []

    def logging(name):
        def kernel(x, weight):
            calls.append(name)
            return x @ weight

        return kernel

    offering(spec("a", logging("a")), spec("b", logging("b")))
    taken = []
    turn = measure._Kernel.take_turn

    def take_turn(self, keep):
        taken.append(self.candidate.name)
        calls.clear()
        turn(self, keep)
        assert calls == [self.candidate.name] * 2  # forward, then forward and backward

    monkeypatch.setattr(measure._Kernel, "take_turn", take_turn)
    run("--shape", "small", "--kernel", "a", "--kernel", "b", repeats="4")
    assert taken == ["a", "b", "b", "a"] * 2 + ["a", "b"]  # the first turn warms up


def test_the_floor_is_the_larger_of_products_and_copies_in_each_pass(offering, run):
    offering()
    (report,) = json.loads(run("--json").out)
    for result in report["results"]:
        rows, width = result["sizes"]["rows"], result["sizes"]["width"]
        matrix, weight = 4 * rows * width, 4 * width * width
        assert result["flops"] == 2 * rows * width**2
        # In: x and the weight, out: y. Backward in: these and y's gradient, out: the gradients of x and the weight.
        assert result["bytes"] == {"forward": 2 * matrix + weight, "backward": 3 * matrix + 2 * weight}
        gemm = result["ceilings"]["gemm"]["tflops"] * 1e9
        copy = result["ceilings"]["copy"]["gb_per_second"] * 1e6
        assert gemm == pytest.approx(2 * 64**3 / result["ceilings"]["gemm"]["ms"]["median"])
        assert copy == pytest.approx(2 * 2**20 / result["ceilings"]["copy"]["ms"]["median"])
        forward = max(result["flops"] / gemm, result["bytes"]["forward"] / copy)
        backward = max(2 * result["flops"] / gemm, result["bytes"]["backward"] / copy)
        assert result["floor_ms"]["forward"] == pytest.approx(forward)
        assert result["floor_ms"]["forward_backward"] == pytest.approx(forward + backward)
        (eager,) = result["kernels"]
        for passed in ("forward", "forward_backward"):
            assert eager["percent_of_floor"][passed] == pytest.approx(
                100 * result["floor_ms"][passed] / eager[f"{passed}_ms"]["median"]
            )


def test_both_bounds_of_the_floor():
    rates, moved = {"copy": 10.0, "gemm": 100.0}, {"forward": 20, "backward": 30}
    assert measure._floor(rates, 1000, moved) == {"forward": 10, "forward_backward": 30}
    assert measure._floor(rates, 10, moved) == {"forward": 2, "forward_backward": 5}
    assert measure._floor({"copy": 10.0}, None, moved) == {"forward": 2, "forward_backward": 5}
    assert measure._floor(rates, 10, None) is None


def test_extra_memory_is_the_peak_without_inputs_and_gradients(offering, results):
    offering(spec("wasting", wasting), spec("once", transposed))
    kernels = results("--shape", "tall")["tall"]
    output = 4 * TALL["rows"] * TALL["width"]
    assert kernels["eager"]["extra_memory_bytes"] == output
    # At the peak, in backward, the output and both gradients are alive too; the gradients do not count.
    assert kernels["wasting"]["extra_memory_bytes"] == 3 * 2**20 + output


class FakeAccelerator:
    """A device module whose events are 0.25 ms apart and which counts bytes as told."""

    def __init__(self):
        self.log = []
        self.allocated, self.peak = 1000, 1000

    def Event(self, enable_timing):
        assert enable_timing
        module = self

        class Event:
            def record(self):
                module.log.append("record")

            def synchronize(self):
                module.log.append("synchronize")

            def elapsed_time(self, other):
                return 0.25

        return Event()

    def synchronize(self):
        self.log.append("synchronize")

    def empty_cache(self):
        self.log.append("empty cache")

    def memory_allocated(self, device):
        return self.allocated

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated

    def max_memory_allocated(self, device):
        return self.peak


@pytest.fixture
def accelerator(monkeypatch):
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    meter = measure._Meter(torch.device("meta"))
    assert meter._buffer.numel() == 2**28
    meter._buffer = type("Buffer", (), {"zero_": lambda self: fake.log.append("flush")})()
    fake.log.clear()
    return fake, meter


def test_on_an_accelerator_a_run_lies_between_events_behind_a_flush(accelerator):
    fake, meter = accelerator
    assert meter.milliseconds(lambda: fake.log.append("run")) == 0.25
    # A write takes 0.25 ms here, and a head start of 1 ms is wanted.
    assert fake.log == [*["flush"] * 4, "record", "run", "record", "synchronize"]


def test_on_an_accelerator_the_host_is_timed_until_the_call_returns(accelerator):
    fake, meter = accelerator
    times = meter.host_ms(lambda: fake.log.append("run"))
    assert len(times) == 20
    assert fake.log == ["run", *["synchronize", "run"] * 20, "synchronize"]


def test_on_an_accelerator_extra_memory_comes_from_its_allocator(accelerator):
    fake, meter = accelerator
    x = torch.randn(10, 10, requires_grad=True)
    weight = torch.randn(10, 10, requires_grad=True)
    one = measure._Problem(contract(), (x, weight), {}, 0)

    def kernel(x, weight):
        fake.peak = fake.allocated + 5000
        return x @ weight

    assert meter.extra_bytes(one, kernel, True) == 5000 - 2 * 400  # without both gradients


def test_an_accelerator_without_a_peak_gives_the_reason(accelerator, monkeypatch):
    monkeypatch.delattr(FakeAccelerator, "max_memory_allocated")
    one = measure._Problem(contract(), draw(2, 2).args, {}, 0)
    assert str(accelerator[1].extra_bytes(one, project, True)) == "torch keeps no peak of the memory of meta"


def test_memory_that_a_gradient_shares_with_its_incoming_one_is_not_subtracted():
    reference = contract()
    x = torch.randn(1000, 1, requires_grad=True)
    one = measure._Problem(reference, (x, torch.ones(1, 1)), {}, 0)
    one.results(lambda x, weight: x + weight, True)  # draws the incoming gradient
    meter = measure._Meter(torch.device("cpu"))
    assert meter.extra_bytes(one, lambda x, weight: x + weight, True) == 4000  # the output; the gradient is passed on


def test_errors_are_relative_rms_for_outputs_and_each_gradient(offering, results):
    offering(spec("off", lambda x, weight: x @ weight * (1 + 2e-6)))
    kernels = results("--shape", "small")["small"]
    names = {"output 0", "gradient of x", "gradient of weight"}
    assert kernels["off"]["error_against_eager"].keys() == names
    assert kernels["off"]["error_against_eager"]["output 0"] == pytest.approx(2e-6, rel=0.1)
    assert kernels["off"]["error_against_float64"]["output 0"] == pytest.approx(2e-6, rel=0.2)
    assert set(kernels["eager"]["error_against_eager"].values()) == {0.0}
    # What float32 rounds, and nothing but that.
    assert all(1e-9 < error < 1e-6 for error in kernels["eager"]["error_against_float64"].values())


def test_relative_rms():
    deviation = measure._Deviation.of("it", torch.tensor([3.0, 4.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]))
    assert deviation.relative == pytest.approx(5)
    assert deviation.rms == pytest.approx(5 / math.sqrt(3))
    same = torch.tensor([math.inf, 1.0])
    assert measure._Deviation.of("it", same, same.clone()).relative == 0
    assert math.isnan(measure._Deviation.of("it", torch.tensor([math.nan]), torch.tensor([1.0])).relative)
    assert measure._Deviation.of("it", torch.ones(2), torch.zeros(2)).relative == math.inf


def test_relative_rms_in_pieces(monkeypatch):
    whole = measure._Deviation.of("it", torch.arange(10.0), torch.ones(10))
    monkeypatch.setattr(measure, "_CHUNK", 3)
    pieces = measure._Deviation.of("it", torch.arange(10.0), torch.ones(10))
    assert pieces.relative == pytest.approx(whole.relative)
    assert (pieces.worst, pieces.largest) == (whole.worst, whole.largest) == (8.0, 1.0)


@pytest.mark.parametrize(
    ("name", "kernel", "problem"),
    [
        ("wrong", wrong, "output 0 is wrong"),
        ("raising", raising, "NotImplementedError: no such tile"),
    ],
)
def test_what_fails_verification_is_not_ranked_nor_measured(offering, run, results, name, kernel, problem):
    offering(spec(name, kernel), spec("transposed", transposed))
    kernels = results(code=1)
    for shape in ("small", "tall"):
        failed = kernels[shape][name]
        assert problem in failed["verdict"]
        assert failed["rank"] is failed["forward_ms"] is failed["forward_backward_ms"] is None
        assert {kernels[shape][other]["rank"] for other in ("eager", "transposed")} == {1, 2}
    out = run("--shape", "small", code=1).out
    assert any(line.startswith(f"not ranked: {name}: ") and problem in line for line in out.splitlines())
    assert "transposed" in out
    assert "long story" not in out


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (wrong_when_large, "at this shape: output 0 is wrong: RMS "),
        (one_wrong_when_large, "at this shape: output 0 is wrong: its worst element is "),
        (raising_when_large, "at this shape: torch.OutOfMemoryError: out of memory: tried to allocate 9.00 GiB"),
        (raising_in_backward, "at this shape: ZeroDivisionError: in backward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_at_one_shape_is_ranked_at_the_others(offering, run, results, kernel, error):
    offering(spec("planted", kernel), spec("transposed", transposed))
    kernels = results(code=1)
    assert kernels["small"]["planted"]["rank"] is not None
    failed = kernels["tall"]["planted"]
    assert failed["error"].startswith(error)
    assert failed["verdict"] == ""
    assert failed["rank"] is failed["forward_ms"] is None
    assert kernels["tall"]["transposed"]["rank"] is not None
    assert f"not ranked: planted: {error}" in run("--shape", "tall", code=1).out


def test_a_stated_limit_of_accuracy_holds_here_too(offering, results):
    offering(
        spec("stated", one_wrong_when_large, rms_error=(("float32", 1e9),)),
        spec("elsewhere", one_wrong_when_large, rms_error=(("bfloat16", 1e9),)),
    )
    kernels = results("--shape", "tall", code=1)["tall"]
    assert kernels["stated"]["rank"] is not None
    assert "by the contract's tolerance or 2 times eager's own largest error" in kernels["elsewhere"]["error"]


def test_a_kernel_that_fails_in_a_later_call_is_dropped_then(offering, results):
    calls = []

    def tiring(x, weight):
        calls.append(x.shape[0])
        if calls.count(TALL["rows"]) > 6:
            raise RuntimeError("tired")
        return x @ weight

    offering(spec("tiring", tiring), spec("transposed", transposed))
    kernels = results("--shape", "tall", code=1)["tall"]
    assert kernels["tiring"]["error"] == "in a later call: RuntimeError: tired"
    assert kernels["tiring"]["forward_ms"] is None
    assert kernels["transposed"]["rank"] is not None


def test_a_device_that_is_lost_meanwhile_is_an_error_of_the_shape(offering, run, monkeypatch):
    offering()

    def lost(self, keep):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(measure._Ceilings, "take_turn", lost)
    (report,) = json.loads(run("--json", "--shape", "small", code=1).out)
    assert report["results"][0]["error"] == "RuntimeError: illegal memory access"
    assert report["results"][0]["kernels"][0]["rank"] is None


def test_a_failure_keeps_no_tensors_alive():
    import gc
    import weakref

    kept = []

    def failing():
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        raise RuntimeError("boom")

    failure = attempt(failing)
    gc.collect()
    assert failure == Failure("RuntimeError: boom")
    assert kept[0]() is None


def test_eager_that_cannot_run_leaves_the_kernels_without_an_error_figure(offering, results, run, monkeypatch):
    whole = contract()
    limited = OpContract(
        op="project", variant="standard", summary="", reference=raising_when_large, samples=samples,
        tolerances=whole.tolerances, workload=whole.workload,
    )  # fmt: skip
    registry = Registry()
    registry.add(Backend(api=1, contracts=(limited,), device_kinds=CORE_KINDS), "opslot", "1.0")
    registry.add(Backend(api=1, kernels=(spec("transposed", transposed),)), "acme", "2.0")
    monkeypatch.setattr("opslot._discovery._registry", registry)
    kernels = results("--shape", "tall", code=1)["tall"]
    assert kernels["eager"]["rank"] is None
    mine = kernels["transposed"]
    assert mine["rank"] == 1
    assert mine["error_against_eager"] is mine["error_against_float64"] is None
    assert "out of memory" in mine["missing"]["error_against_eager"]
    assert mine["percent_of_floor"]["forward_backward"] > 0
    assert "no error against eager: torch.OutOfMemoryError: out of memory" in run("--shape", "tall", code=1).out


def test_float64_that_does_not_fit_is_left_out_with_the_reason(offering, results, monkeypatch):
    offering()
    monkeypatch.setattr(measure._Meter, "free_bytes", lambda self: 1000)
    eager = results("--shape", "small")["small"]["eager"]
    assert eager["error_against_float64"] is None
    assert "in float64 would need" in eager["missing"]["error_against_float64"]
    assert eager["error_against_eager"] is not None


def test_a_kernel_without_backward_is_timed_forward_only(offering, results, run):
    def no_grad_only(x, weight):
        assert not (x.requires_grad and torch.is_grad_enabled())
        return x @ weight

    offering(spec("infer", no_grad_only, backward=False))
    infer = results("--shape", "small")["small"]["infer"]
    assert infer["verdict"] == ""
    assert infer["forward_ms"]
    assert infer["forward_backward_ms"] is None

    setting = measure.Setting("cpu", "float32", 0, 3)
    candidates = [measure.Candidate("infer", no_grad_only, backward=False), measure.Candidate("eager", project)]
    measured = measure.measure(contract(), SMALL, candidates, setting)["kernels"]
    assert measured["infer"]["error"] is None
    assert measured["infer"]["forward_ms"]["median"] > 0
    assert measured["infer"]["forward_backward_ms"] is None
    assert list(measured["infer"]["error_against_eager"]) == ["output 0"]
    ranks = [kernel["rank"] for kernel in bench._ranked([{"verdict": "", **kernel} for kernel in measured.values()])]
    assert ranks == [1, None]


def test_kernels_that_cannot_run_here_are_named(offering, run):
    offering(spec("far", transposed, requires=Requires(devices=("cuda",))), spec("half", wrong, dtypes=("bfloat16",)))
    captured = run("--json", "--shape", "small")
    (report,) = json.loads(captured.out)
    assert "needs a cuda device" in report["unusable"]["acme:far"]
    assert "takes bfloat16, not float32" in report["unusable"]["acme:half"]
    assert [kernel["kernel"] for kernel in report["results"][0]["kernels"]] == ["eager"]
    out = run("--shape", "small").out
    assert "not usable here:" in out
    assert "acme:far" in out


def test_a_kernel_that_cannot_be_loaded_is_one_that_failed(offering, results):
    offering(spec("absent", "no_such_module_here:kernel"))
    kernels = results("--shape", "small", code=1)["small"]
    assert "no_such_module_here" in kernels["absent"]["error"]
    assert kernels["eager"]["rank"] == 1


def test_one_name_from_two_distributions(offering, results, monkeypatch):
    registry = known_with(spec("twin", transposed))
    registry.add(Backend(api=1, kernels=(spec("twin", project),)), "bolt", "1.0")
    monkeypatch.setattr("opslot._discovery._registry", registry)
    assert results("--shape", "small")["small"].keys() == {"eager", "acme:twin", "bolt:twin"}


def test_shapes_by_name_inline_and_from_a_file(offering, results, tmp_path):
    offering()
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps({"mine": {"rows": 3, "width": 4}, "yours": {"rows": 4, "width": 4}}))
    assert list(results()) == ["small", "tall"]
    assert list(results("--shapes", str(file))) == ["mine", "yours"]
    chosen = results("--shapes", str(file), "--shape", "yours", "--shape", "tall", "--shape", "rows=2,width=5")
    assert list(chosen) == ["yours", "tall", "rows=2,width=5"]


def test_a_shape_that_the_workload_cannot_make_is_an_error_of_that_shape(offering, run):
    offering()
    captured = run("--json", "--shape", "rows=4,width=13", "--shape", "small", code=1)
    (report,) = json.loads(captured.out)
    assert report["results"][0]["error"] == "the workload cannot make this shape: RuntimeError: 13 brings bad luck"
    assert report["results"][1]["error"] is None
    assert "error: the workload cannot make this shape" in run("--shape", "rows=4,width=13", code=1).out


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--shape", "smal"], ["no such shape (did you mean 'small'?)", "'small', 'tall'", "--shape rows=8,width=16"]),
        (["--shape", "rows=8"], ["width not given", "rows=8,width=16"]),
        (["--shape", "rows=8,widht=16"], ["no size 'widht' (did you mean 'width'?)"]),
        (["--shape", "rows=8,width=many"], ["'width=many' is not name=size"]),
        (["--shape", "rows=8,rows=9,width=1"], ["'rows=9' is not name=size, each once"]),
        (["--shape", "rows=0,width=16"], ["rows must be a whole number above 0, got 0"]),
        (["--dtype", "float23"], ["--dtype float23", "did you mean 'float32'", "it has: bfloat16, float32"]),
        (["--dtype", "float16"], ["--dtype float16", "no tolerance", "bfloat16, float32"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--device", "toaster"], ["device 'toaster'"]),
        (["--kernel", "none"], ["no kernel 'none' for project/standard", "known: eager, auto, far"]),
        (["--kernel", "far"], ["kernel 'far'", "needs a cuda device", "Usable here: eager"]),
        (["--repeats", "2"], ["--repeats 2", "at least 3"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_is_refused_with_what_would_work_before_anything_runs(
    offering, run, monkeypatch, arguments, messages
):
    offering(spec("far", transposed, requires=Requires(devices=("cuda",))))
    monkeypatch.setattr(bench, "measure", None)
    error = run(*arguments, code=2).err
    for message in messages:
        assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not JSON"),
        ("[]", "expected names with sizes"),
        ("{}", "expected names with sizes"),
        ('{"mine": 3}', "expected names with sizes"),
        ('{"mine": {"rows": 3}}', "shape 'mine' of project/standard: width not given"),
        ('{"mine": {"rows": 3, "width": 2.5}}', "width must be a whole number above 0, got 2.5"),
        ('{"mine": {"rows": true, "width": 2}}', "rows must be a whole number above 0, got True"),
        (None, "No such file"),
    ],
)
def test_bad_files_of_shapes(offering, run, tmp_path, text, message):
    offering()
    file = tmp_path / "shapes.json"
    if text is not None:
        file.write_text(text)
    assert message in run("--shapes", str(file), code=2).err


def test_ops_are_found_by_alias_and_those_without_a_workload_refused(offering, capsys):
    offering()
    common = ["--device", "cpu", "--repeats", "3", "--shape", "small"]
    for name in ("projection", "projection/standard", "project/standard"):
        assert main(["bench", name, *common]) == 0
    capsys.readouterr()
    assert main(["bench", "project", *common]) == 0
    assert "project/bare brings no workload and is left out" in capsys.readouterr().err
    assert main(["bench", "project/bare", *common]) == 2
    assert "no workload to measure; these do: project/standard" in capsys.readouterr().err
    assert main(["bench", "projekt", *common]) == 2
    assert "did you mean 'project'" in capsys.readouterr().err


def test_the_report_says_how_it_came_about(offering, run):
    offering(spec("transposed", transposed))
    (report,) = json.loads(run("--json", "--shape", "small", "--seed", "3", "--dtype", "bfloat16").out)
    assert report["command"] == (
        "opslot bench project --shape small --dtype bfloat16 --device cpu --repeats 3 --seed 3"
    )
    assert (report["op"], report["variant"], report["dtype"]) == ("project", "standard", "bfloat16")
    assert (report["seed"], report["repeats"]) == (3, 3)
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["libraries"] == {"acme": "2.0"}
    kernel = next(k for k in report["results"][0]["kernels"] if k["kernel"] == "transposed")
    assert (kernel["distribution"], kernel["version"]) == ("acme", "2.0")
    assert kernel["source"].startswith("code:")


@pytest.mark.parametrize("measured", [(), ("--kernel", "eager")])
def test_the_report_says_what_auto_would_choose_even_if_it_is_not_measured(offering, run, measured):
    offering(replace(spec("by_name", transposed), priority=Priority.BY_NAME), spec("transposed", transposed))
    (report,) = json.loads(run("--json", "--shape", "small", *measured).out)
    assert report["auto"]["kernel"].rpartition(":")[2] == "transposed"
    assert "PORTABLE is the highest band" in report["auto"]["reason"]


def test_without_kernels_auto_is_eager(offering, run):
    offering()
    (report,) = json.loads(run("--json", "--shape", "small").out)
    assert report["auto"] == {"kernel": "eager", "reason": "auto: no installed backend offers a kernel"}


def test_what_kernels_print_stays_out_of_the_answer(offering, run):
    offering(spec("chatting", chatting))
    captured = run("--json", "--shape", "small")
    json.loads(captured.out)
    assert "tuning, please wait" in captured.err


def test_output_has_the_same_data_and_a_chart(offering, run, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra opslot[bench] draws")
    offering(spec("wrong", wrong), spec("transposed", transposed))
    folder = tmp_path / "new" / "results"
    (printed,) = json.loads(run("--json", "--output", str(folder), code=1).out)
    assert {path.name for path in folder.iterdir()} == {
        "project-standard-cpu-float32.json",
        "project-standard-cpu-float32.png",
    }
    written = folder / "project-standard-cpu-float32.json"
    assert json.loads(written.read_text()) == printed
    assert str(tmp_path) not in written.read_text()
    assert (folder / "project-standard-cpu-float32.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_shows_medians_quartiles_and_names_what_failed(offering, run, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure", reason="the extra opslot[bench] draws")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    offering(spec("wrong", wrong), spec("transposed", transposed))
    (report,) = json.loads(run("--json", "--shape", "small", "--output", str(tmp_path), code=1).out)
    axes = drawn[0].axes[1]
    kernels = [k for k in report["results"][0]["kernels"] if k["rank"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == [k["kernel"] for k in kernels]
    assert [bar.get_width() for bar in axes.patches] == [k["forward_backward_ms"]["median"] for k in kernels]
    assert "failed: wrong" in axes.get_title()
    assert axes.lines[-1].get_xdata()[0] == report["results"][0]["floor_ms"]["forward_backward"]


def test_without_matplotlib_output_is_refused_before_anything_runs(offering, run, tmp_path, monkeypatch):
    offering()
    monkeypatch.setattr("opslot.tools.chart.find_spec", lambda name: None)
    assert "pip install 'opslot[bench]'" in run("--output", str(tmp_path / "new"), code=2).err
    assert not (tmp_path / "new").exists()
    run("--shape", "small", "--json")


def test_an_output_that_is_a_file(offering, run, tmp_path, monkeypatch):
    offering()
    monkeypatch.setattr("opslot.tools.chart.find_spec", lambda name: True)
    (tmp_path / "taken").write_text("")
    assert "is a file; it must be a folder" in run("--output", str(tmp_path / "taken"), code=2).err


def test_figures_that_are_not_finite_are_null_in_json(tmp_path):
    assert bench._finite({"a": [math.nan, 1.0], "b": math.inf}) == {"a": [None, 1.0], "b": None}


@pytest.mark.parametrize(("value", "text"), [(0.0711, "0.0711"), (1234.6, "1235"), (9.87, "9.87"), (0.0, "0")])
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert bench._short(value) == text


def test_the_ops_of_the_core(capsys):
    """The workloads that the core's contracts bring, at a size of their own."""
    assert opslot.registry().contract("rms_norm").workload is not None
    assert (
        main(["bench", "rms_norm/standard", "--device", "cpu", "--shape", "tokens=4,hidden=8", "--repeats", "3"]) == 0
    )
    assert "reference" in capsys.readouterr().out


def test_the_incoming_gradient_is_no_input():
    """A workload draws its inputs in place from the seed, and the gradient must be another draw."""
    contract = opslot.registry().contract("rms_norm", "unweighted_fp32")
    sample = contract.workload.problem("cpu", torch.float32, 3, tokens=64, hidden=32)
    problem = measure._Problem.of(contract, sample, 3)
    problem.results(contract.load_reference(), True)
    x, incoming = problem.inputs["x"].detach().flatten(), problem.given[0].flatten()
    assert abs(torch.corrcoef(torch.stack((x, incoming)))[0, 1]) < 0.1


def test_a_kernel_may_be_the_last_reader_of_its_activations():
    """As between two layers: the caller holds leaves, and a kernel that writes over what is its own would copy them."""
    import sys

    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return gate * up

        @staticmethod
        def backward(ctx, grad):
            saved = list(ctx.saved_tensors)
            seen.append([sys.getrefcount(saved[i]) - (saved[i]._use_count() > 1) for i in range(2)])
            return grad * saved[1], grad * saved[0]

    contract = opslot.registry().contract("glu", "swiglu")
    problem = measure._Problem.of(
        contract, contract.workload.problem("cpu", torch.float32, 0, tokens=4, intermediate=8), 0
    )
    for given, alone in ((problem.as_in_a_model(), True), (None, False)):
        found = problem.gradients(problem.forward(Noting.apply, given))
        assert torch.equal(found["gate"], problem.given[0] * problem.inputs["up"])
        assert (seen.pop() == [2, 2]) is alone


@pytest.mark.parametrize("contract", [c for c in opslot.registry().contracts() if c.workload], ids=str)
def test_every_shape_of_ours_can_be_asked_for_by_its_sizes(contract):
    for name, sizes in {**contract.workload.shapes, "large": contract.workload.large or {}}.items():
        if sizes:
            bench._check_sizes(contract, contract.workload, name, sizes)
