"""The benchmarks: the commands in their docstrings run here, small and without a GPU, and the verdict judges."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def liger_train():
    spec = importlib.util.spec_from_file_location("liger_train", ROOT / "benchmarks/liger_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_tiny_run_of_the_docstring(liger_train, tmp_path):
    (command,) = re.findall(r"python (.* --widths tiny .*\\\n.*)", liger_train.__doc__)
    arguments = shlex.split(command.replace("\\\n", "").replace("liger_train.json", str(tmp_path / "result.json")))
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "result.json").read_text()
    assert not re.search(r'"/|[ =]/', text), "a path of this machine"
    data = json.loads(text)
    results = data["results"]
    assert list(results) == ["eager", "eager-again", "auto"]
    assert [len(result["loss"]) for result in results.values()] == [4, 4, 4]
    assert results["eager"]["loss"] == results["eager-again"]["loss"]
    assert len(set(results["eager"]["loss"])) == 4
    assert results["auto"]["loss"] == pytest.approx(results["eager"]["loss"], abs=1e-4)
    assert all(judged["within"] for judged in data["verdict"].values())
    assert len({result["weights_sha256"] for result in results.values()}) == 1
    assert not any(" torch " in line for line in results["eager"]["binding"])
    assert any("torch opslot-backend-torch" in line for line in results["auto"]["binding"])
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_candidates_that_fail_are_recorded_and_the_others_go_on(liger_train, tmp_path, capfd):
    arguments = ["--candidates", "eager", "auto", "--limit", "0.01", "--json", str(tmp_path / "result.json")]
    assert liger_train.main(arguments) == 1
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert [result["error"] for result in results.values()] == ["it took longer than 0.01 seconds"] * 2
    assert "no verdict: eager is not among those that ran" in capfd.readouterr().out


def result(*losses, start="same", error=None):
    return {"title": "", "error": error, "loss": list(losses), "weights_sha256": start, "text_sha256": ""}


def test_the_verdict(liger_train):
    eager = [5.0] * 60
    runs = {
        "eager": result(*eager),
        # What lies before the last 50 does not count.
        "liger": result(*[9.0] * 10, *[5.0009] * 50),
        "patched": result(*[5.0011] * 60),
        # On average the same, in each step far away.
        "auto": result(*[4.9, 5.1] * 30),
    }
    found = liger_train.verdict(runs)
    assert {name: judged["within"] for name, judged in found.items()} == {
        "liger": True,
        "patched": False,
        "auto": False,
    }
    assert found["auto"]["mean_of_differences"] == pytest.approx(0.1)
    assert found["auto"]["difference_of_means"] == pytest.approx(0, abs=1e-9)
    # Two runs of eager that differ more than 1e-3 say how far is allowed, in each of the two figures.
    found = liger_train.verdict({**runs, "eager-again": result(*[4.8, 5.2] * 30)})
    assert [name for name, judged in found.items() if not judged["within"]] == ["patched"]
    # And of more runs the two that are furthest apart, whether or not the first is one of them.
    more = {"eager-again": result(*[4.998] * 60), "eager-third": result(*[5.002] * 60)}
    limits = liger_train.verdict({**runs, **more})["liger"]["limits"]
    assert limits == pytest.approx({"mean_of_differences": 0.004, "difference_of_means": 0.004})


def test_a_run_that_cannot_be_compared_gets_no_verdict(liger_train):
    runs = {
        "eager": result(5.0, 4.0, 3.0, 2.0),
        "liger": result(5.0, 4.0, 3.0, 2.0, start="other"),
        "patched": result(5.0, None, None, None),
        "patched-experts": {"title": "", "error": "out of memory"},
        # What it computed stands, whatever was found afterwards.
        "auto": result(5.0, 4.0, 3.0, 2.0, error="a kernel did not run"),
    }
    liger_train.require_one_start(runs)
    assert "started from other weights" in runs["liger"]["error"]
    assert set(liger_train.verdict(runs)) == {"auto"}
    del runs["eager"]
    assert liger_train.verdict(runs) == {}


def test_no_folder_of_this_machine_is_written(liger_train):
    text = "OSError: '/home/someone/cache/kernel.so' of rms_norm/standard: x/y, --json=/tmp/a/b.json and 3/4/5"
    assert liger_train.without_folders(text) == (
        "OSError: 'kernel.so' of rms_norm/standard: x/y, --json=b.json and 3/4/5"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe_experts", "routers"])
def test_it_can_be_tried_without_a_gpu(name, tmp_path):
    """With what the docstring says to try it with."""
    text = (ROOT / f"benchmarks/{name}.py").read_text(encoding="utf-8")
    (options,) = re.findall(r"`([^`]*--device cpu[^`]*)`", text)
    command = [sys.executable, f"benchmarks/{name}.py", *shlex.split(options), "--json", str(tmp_path / "result.json")]
    extra = ["--rounds", "1"] if name == "moe_experts" else []
    done = subprocess.run([*command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    if name == "moe_experts":
        assert [set(row["candidates"]) for row in data["experts"]] == [{"torch", "grouped_mm"}] * 6
        assert set(data["load_balancing_loss"]["candidates"]) == {"torch", "transformers", "floor of the host"}
    else:
        assert set(data["results"]) == {"qwen3_moe", "gpt_oss", "deepseek_v3"}
