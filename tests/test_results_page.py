"""docs/results.md: it is fresh, the newest result wins, and what is bad or malformed is said plainly."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEVICE = "cuda (sm_90, Test GPU)"
RMS_NORM = {"op": "rms_norm", "variant": "standard"}


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "scripts/results_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def show(script, tmp_path):
    """The page of these files."""

    def show(**files):
        for name, data in files.items():
            path = tmp_path / f"2026-01-{name[1:].replace('_', '-')}.json"
            path.write_text(json.dumps(data))
        return script.page(tmp_path)

    return show


def outcome(kernel="liger", check="values", problem="", dtype="bfloat16", **more):
    return {**RMS_NORM, "kernel": kernel, "dtype": dtype, "check": check, "problem": problem, **more}


def verify(*outcomes, **more):
    return {"device": DEVICE, "outcomes": list(outcomes), "not_run": [], **more}


def summed_up(*runs):
    return {"date": "2026-01-01", "versions": {"torch": "2.9"}, "runs": list(runs)}


def summed_up_run(checks, failed=None):
    kernel = {"op": "rms_norm/standard", "kernel": "torch", "dtype": "bfloat16", "failed": failed or {}}
    return {"command": "opslot verify", "device": DEVICE, "checks": checks, "kernels": [kernel]}


def measured(kernel, forward, both=None, **more):
    def spread(median):
        return None if median is None else {"median": median, "quartiles": [median, median]}

    return {
        "kernel": kernel,
        "distribution": "" if kernel == "eager" else "opslot-backend-test",
        "version": "" if kernel == "eager" else "0.1.0",
        "nested": "",
        "verdict": "",
        "error": None,
        "forward_ms": spread(forward),
        "forward_backward_ms": spread(both),
        "percent_of_floor": {"forward": 50.0, "forward_backward": None},
        "extra_memory_bytes": 2**20,
        "error_against_eager": {"output": 0.0, "gradient": 0.0025},
        "error_against_float64": {"output 0": 0.001, "output 1": None, "gradient of x": 2e-3, "gradient of y": 1e-3},
        **more,
    }


def bench(*kernels, shape="small", date="2026-01-01", **more):
    result = {"shape": shape, "sizes": {"tokens": 8}, "error": None}
    result |= {"floor_ms": {"forward": 0.5, "forward_backward": 1.25}, "kernels": list(kernels)}
    command = "opslot bench rms_norm"
    report = {"command": command, "date": date, **RMS_NORM, "device": DEVICE, "dtype": "bfloat16"}
    return [{**report, "results": [result], **more}]


def row(page, *words):
    """The cells of the one line of a table that begins with these."""
    (line,) = [line for line in page.splitlines() if line.startswith("| " + " | ".join(words) + " |")]
    return line.strip("| ").split(" | ")


def test_the_page_is_fresh(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_refused_and_then_written(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(script, "PAGE", tmp_path / "results.md")
    assert script.main(["--check"]) == 1
    assert not script.PAGE.exists()
    assert script.main([]) == script.main(["--check"]) == 0
    (tmp_path / "results/2026-01-01-gpu-verify.json").write_text(json.dumps(verify(outcome())))
    capsys.readouterr()
    assert script.main(["--check"]) == 1
    assert "run python scripts/results_page.py" in capsys.readouterr().err


def test_the_newest_result_wins_and_says_where_it_is_from(show):
    old = verify(outcome("liger", problem="wrong"), outcome("torch"), date="2026-01-01")
    new = verify(outcome("liger"), date="2026-01-02")
    page = show(_01_z_verify=old, _02_a_verify=new)
    assert row(page, "`rms_norm/standard`", "`liger`")[2:] == [
        "1 of 1 checks",
        "[2026-01-02](results/2026-01-02-a-verify.json)",
    ]
    assert row(page, "`rms_norm/standard`", "`torch`")[3] == "[2026-01-01](results/2026-01-01-z-verify.json)"
    assert "2 of 2 kernels passed" in page


def test_the_datas_own_date_counts_and_without_one_that_of_the_name(show):
    page = show(_01_a_verify=verify(outcome(), date="2026-01-09"), _05_a_verify=verify(outcome(problem="wrong")))
    assert "[2026-01-09](results/2026-01-01-a-verify.json)" in page
    assert "Replaced by newer results: [2026-01-05-a-verify.json](results/2026-01-05-a-verify.json)." in page


def test_dtypes_may_come_from_two_files_and_a_run_of_a_few_checks_does_not_look_like_one_of_all(show):
    page = show(
        _01_verify=verify(outcome(dtype="float32"), outcome(), outcome(check="packed")),
        _02_verify=verify(outcome(dtype="bfloat16", problem="x")),
    )
    lines = [line for line in page.splitlines() if line.startswith("| `rms_norm/standard`")]
    assert [line.split(" | ")[2:4] for line in lines] == [
        ["1 of 1 checks, 1 not made", "-"],
        ["-", "**0 of 1 checks, failed: values**, 1 not made"],
    ]


def test_failing_checks_are_named_in_either_form(show):
    raw = verify(outcome(check="packed", problem="rows leak"), outcome(check="values"), outcome(check="twice"))
    page = show(_01_a_verify=raw, _01_b_verify=summed_up(summed_up_run(["values", "packed"], {"values": "wrong"})))
    assert row(page, "`rms_norm/standard`", "`liger`")[2] == "**2 of 3 checks, failed: packed**"
    assert row(page, "`rms_norm/standard`", "`torch`")[2] == "**1 of 2 checks, failed: values**, 1 not made"
    assert "0 of 2 kernels passed" in page
    assert "**liger of rms_norm/standard failed some**" in page


def test_runs_of_one_file_are_added_up_and_a_failure_of_one_of_them_stays(show):
    page = show(_01_verify=summed_up(summed_up_run(["values"], {"values": "x"}), summed_up_run(["values", "large"])))
    assert row(page, "`rms_norm/standard`", "`torch`")[2] == "**1 of 2 checks, failed: values**"


def test_versions_commands_and_what_cannot_run(show):
    environment = {"python": "3.12", "torch": "2.11", "threads": 4, "libraries": {"liger-kernel": "0.8.5"}}
    absent = [{"kernel": "rms_norm/standard:npu", "reason": "needs a npu device"}]
    data = verify(outcome(), environment=environment, command="opslot verify", not_run=absent)
    page = show(_01_verify=data, _01_old_verify=verify(outcome("torch")))
    assert "2026-01-01: liger-kernel 0.8.5, python 3.12, torch 2.11\n  - `opslot verify`\n" in page
    assert "2026-01-01: versions not in the file" in page
    assert "- `rms_norm/standard:npu`: needs a npu device" in page


def test_the_fastest_stands_first_and_what_is_slower_than_eager_says_so(show):
    kernels = [
        measured("eager", 1.0, 3.0),
        measured("slow", 0.5, 6.0),
        measured("fast", 4.0, 1.5),
        measured("same", 1.004, 3.01),
    ]
    page = show(_01_bench=bench(*kernels, auto={"kernel": "fast", "reason": "auto: because"}))
    shown = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| small |")]
    assert shown == ["`fast` `auto`", "`eager`", "`same`", "`slow`"]
    assert row(page, "small", "`fast` `auto`")[2:] == [
        "4.00 (0.25x, **slower than eager**)",
        "1.50 (2.00x)",
        "50 / -",
        "1.00 MiB",
        "0 / 2.5e-03",
        "inf / 2.0e-03",
    ]
    assert row(page, "small", "`slow`")[2:4] == ["0.500 (2.00x)", "6.00 (0.50x, **slower than eager**)"]
    assert row(page, "small", "`same`")[2:4] == ["1.00 (1.00x)", "3.01 (1.00x)"]
    assert row(page, "small: tokens=8", "floor")[2:4] == ["0.500", "1.25"]
    assert "slower than eager, forward and backward, at 1 of 1 shapes: `slow` of `rms_norm/standard`" in page
    assert "`auto` chooses `fast`: because" in page
    assert "opslot-backend-test 0.1.0" in page


def test_a_newer_bench_replaces_the_kernels_that_it_measured_and_leaves_the_others_beside_their_eager(show):
    old = bench(measured("eager", 2.0, 2.0), measured("torch", 1.0, 1.0), measured("liger", 9.0, 9.0))
    new = bench(measured("eager", 4.0, 4.0), measured("liger", 1.0, 1.0), date="2026-01-02")
    page = show(_01_bench=old, _02_bench=new)
    assert row(page, "small", "`liger`")[3] == "1.00 (4.00x)"
    assert row(page, "small", "`torch`")[3] == "1.00 (2.00x)"
    assert [line.split(" | ")[3] for line in page.splitlines() if line.startswith("| small | `eager`")] == [
        "4.00",
        "2.00",
    ]


def test_what_has_no_figures_is_named_below_the_table(show):
    none = dict.fromkeys(("extra_memory_bytes", "error_against_eager"))
    failed = measured("liger", None, verdict="values: off by 1 | 2\nmore", **none)
    (report,) = bench(measured("eager", 1.0, 1.0), failed)
    broken = {**copy.deepcopy(report["results"][0]), "shape": "huge", "error": "too large", "floor_ms": None}
    report["results"].append(broken)
    page = show(_01_bench=[report])
    assert "- `liger` at small, not ranked: values: off by 1 | 2\n" in page
    assert "- huge (tokens=8): too large" in page
    assert "| small | `liger`" not in page


def described(**more):
    versions = {"torch": "2.11", "liger-kernel": "0.8.5"}
    return {"command": "python it.py", "date": "2026-01-01", "device": "Test GPU", "versions": versions, **more}


def test_training_with_liger(show):
    trained = {"error": None, "step_ms": 123.4, "tokens_per_second": 66412.3, "peak_bytes": 2**31}
    gap = {"mean_of_differences": 2e-4, "limits": {"mean_of_differences": 1e-3}}
    data = described(
        verdict_over_last_steps=50,
        verdict={"liger": {**gap, "within": True}, "patched": {**gap, "within": False}},
        results={
            "eager": {"title": "eager", **trained},
            "liger": {"title": "liger", **trained},
            "patched": {"title": "patched by Liger", **trained},
            "auto": {"title": "auto", "error": "out of memory"},
        },
    )
    page = show(_01_liger_train=data)
    assert row(page, "eager")[1:] == ["123", "66412", "2.0", "-"]
    assert row(page, "liger")[4] == "2.0e-04 (limit 1.0e-03)"
    assert row(page, "patched by Liger")[4] == "2.0e-04 (limit 1.0e-03), **beyond a limit**"
    assert "- auto, failed: out of memory" in page
    assert "liger-kernel 0.8.5" in page


def test_what_a_slot_adds(show):
    def times(forward, both):
        return {"device_forward_ms": {"median": forward}, "device_forward_backward_ms": {"median": both}}

    percent = {"device_forward": {"median": 10.0}, "device_forward_backward": {"median": -0.52}}
    over = [{"of": "opslot", "over": "direct", **percent}]
    candidates = {"direct": times(1.0, 2.0), "opslot": times(1.1, 1.99)}
    result = {"error": None, "shape": "wide", "candidates": candidates, "percent_over": over}
    page = show(_01_liger_overhead=described(results={"rms_norm/standard": result, "glu/swiglu": {"error": "boom"}}))
    assert row(page, "`rms_norm/standard`")[1:] == [
        "wide", "opslot", "1.10 / 1.99", "direct", "1.00 / 2.00", "+10.0 / -0.5",
    ]  # fmt: skip
    assert "- `glu/swiglu`, failed: boom" in page


def test_other_files_and_charts(show, tmp_path):
    (tmp_path / "2026-01-01-cpu-step-curve.png").write_bytes(b"")
    page = show(_01_cpu_step=described())
    names = ("2026-01-01-cpu-step.json", "2026-01-01-cpu-step-curve.png")
    cells = row(page, ", ".join(f"[{name}](results/{name})" for name in names))
    assert cells[1:] == ["2026-01-01", "Test GPU", "`python it.py`"]


def test_the_page_depends_on_nothing_but_the_data(show):
    data = verify(outcome("b"), outcome("a"), outcome("a", dtype="float32"))
    assert show(_01_verify=data) == show(_01_verify=verify(*reversed(data["outcomes"])))


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("_01_verify", {"device": DEVICE}, "2026-01-01-verify.json: neither 'outcomes'"),
        ("_01_verify", verify({"op": "rms_norm"}), r"2026-01-01-verify.json, outcomes\[0\]: 'variant' is missing"),
        ("_01_verify", {"outcomes": []}, "2026-01-01-verify.json: 'device' is missing"),
        ("_01_verify", verify(outcome(problem=None)), r"outcomes\[0\]: 'problem' is null, not a string"),
        ("_01_verify", summed_up(summed_up_run(["values"], {"packed": "x"})), "'failed' names packed, not in 'checks'"),
        ("_01_bench", bench({"kernel": "eager"}), r"2026-01-01-bench.json, \[0\], results\[0\], kernels\[0\]: 'dist"),
        ("_01_bench", [7], r"2026-01-01-bench.json, \[0\] is 7, not an object"),
        ("_01_bench", bench(measured("a", "1 ms")), "forward_ms: 'median' is \"1 ms\", not a number or null"),
        ("_01_liger_train", described(), "2026-01-01-liger-train.json: 'verdict' is missing"),
        ("_01_liger_overhead", described(results=[]), "'results' is \\[\\], not an object"),
        ("_01_unknown", {"date": "2026-01-01"}, "2026-01-01-unknown.json: 'command' is missing"),
        ("_01_unknown", [], "2026-01-01-unknown.json is \\[\\], not an object"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_missing(script, show, name, data, error):
    with pytest.raises(script.Malformed, match=error):
        show(**{name: data})


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("verify.json", "not a result: expected YYYY-MM-DD-name.json"),
        ("2026-01-01-notes.txt", "not a result"),
        ("2026-01-01-verify.png", "no JSON file has a name with which this chart's begins"),
        ("2026-01-01-verify.json", "not JSON"),
    ],
)
def test_an_unknown_file_is_named(script, tmp_path, monkeypatch, capsys, name, error):
    (tmp_path / name).write_text("{")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "PAGE", tmp_path.parent / "results.md")
    assert script.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"docs/results/{name}: ")
    assert error in said
    assert not script.PAGE.exists()
