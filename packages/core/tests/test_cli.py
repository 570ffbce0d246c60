import json
import subprocess
import sys

import pytest
from opslot import Backend, BackendRecord, OpslotError
from opslot.tools.cli import main


@pytest.fixture(autouse=True)
def process_registry(known, monkeypatch):
    monkeypatch.setattr("opslot._discovery._registry", known)


def test_list_shows_every_kernel_and_why_one_cannot_run_here(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device: ")
    assert any(line.split()[:4] == ["scale/standard", "fast", "acme", "yes"] for line in lines)
    assert any("cuda" in line and "no: needs a cuda device" in line for line in lines)


def test_list_as_json(capsys):
    assert main(["list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (op,) = [op for op in data["ops"] if op["variant"] == "standard"]
    assert [kernel["name"] for kernel in op["kernels"]] == ["eager", "cuda", "fast", "half", "slow"]
    assert op["fields"] == ["scale", "rescale", "scale_implementation", "rescale_implementation", "scaling"]


@pytest.mark.parametrize("name", ["scale", "rescale", "scale/standard", "rescale/standard", "scaling"])
def test_explain_gives_the_contract(capsys, name):
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert "scale/standard(x, weight, factor=2.0)" in out
    assert "x * weight * factor" in out
    assert main(["explain", name, "--json"]) == 0


def test_an_unknown_op_lists_the_known_ones_and_exits_with_1(capsys):
    assert main(["explain", "scael"]) == 1
    assert "did you mean 'scale'" in capsys.readouterr().err


def test_wrong_usage_exits_with_2():
    with pytest.raises(SystemExit) as caught:
        main(["nothing"])
    assert caught.value.code == 2


def test_backends_shows_a_failure_with_its_traceback_and_exits_with_1(known, capsys):
    known.records.append(BackendRecord("good", "good-dist", "1.0", Backend(api=1)))
    assert main(["backends"]) == 0
    known.records.append(
        BackendRecord("bad", "bad-dist", "2.0", error=OpslotError("boom"), traceback="Traceback: boom\n")
    )
    assert main(["backends"]) == 1
    captured = capsys.readouterr()
    assert "failed to load: OpslotError: boom" in captured.out
    assert "Traceback: boom" in captured.err
    assert main(["backends", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[-1]["error"] == "OpslotError: boom"


def test_python_m_opslot():
    done = subprocess.run([sys.executable, "-m", "opslot", "backends"], capture_output=True, text=True, timeout=60)
    assert "opslot" in done.stdout


def test_a_backend_that_failed_is_named_by_every_listing(known, capsys):
    known.records.append(BackendRecord("bad", "bad-dist", "2.0", error=OpslotError("boom")))
    for command in (["list"], ["explain", "scale"], ["list", "--json"]):
        assert main(command) == 0
        assert "These backends failed to load: bad-dist (OpslotError: boom)" in capsys.readouterr().err
