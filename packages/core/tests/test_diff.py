"""`opslot diff`: what differs between two saved bindings."""

import json
from pathlib import Path

import pytest
import torch
from opslot import Device, bind
from opslot.tools.cli import main


@pytest.fixture
def saved(known, scale_class, tmp_path):
    """Write the binding of six layers, changed by `change`, and return the path."""

    def write(name, change=lambda data: None, arch=""):
        model = torch.nn.Sequential(*(scale_class() for _ in range(6)))
        data = json.loads(bind(model, {"scale": "fast"}, device=Device("cpu", arch), registry=known).to_json())
        change(data)
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return str(path)

    return write


def test_equal_bindings(saved, capsys):
    def other_reasons(data):
        for row in data["slots"]:
            row["reason"] = "asked for: scale in another.yaml"

    assert main(["diff", saved("a.json"), saved("b.json", other_reasons)]) == 0
    assert capsys.readouterr().out == "same choice, same environment\n"
    assert main(["diff", saved("a.json"), saved("b.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"same": True, "slots": [], "environment": []}


def test_every_kind_of_difference(saved, capsys):
    def change(data):
        for index in (0, 1, 2, 4):
            data["slots"][index].update(kernel="slow", version="2.1", reason="auto: hooks")
        data["slots"][3]["source"] = "unknown"
        data["slots"].append({**data["slots"].pop(), "module": "new"})
        data["environment"].pop("acme")

    a, b = saved("a.json"), saved("b.json", change, arch="other")
    assert main(["diff", a, b]) == 1
    source = json.loads(Path(a).read_text())["slots"][0]["source"]
    assert capsys.readouterr().out.splitlines() == [
        f"a: {a}",
        f"b: {b}",
        "{0-2,4}, 4 x",
        "  a: scale/standard: fast acme 2.0  [asked for: scale in code]",
        "  b: scale/standard: slow acme 2.1  [auto: hooks]",
        "3, 1 x",
        f"  a: scale/standard: fast acme 2.0 of source {source}  [asked for: scale in code]",
        "  b: scale/standard: fast acme 2.0 of source unknown  [asked for: scale in code]",
        "5, 1 x",
        "  a: scale/standard: fast acme 2.0  [asked for: scale in code]",
        "  b: no such slot",
        "new, 1 x",
        "  a: no such slot",
        "  b: scale/standard: fast acme 2.0  [asked for: scale in code]",
        "environment, device",
        "  a: cpu",
        "  b: cpu (other)",
        "environment, acme",
        "  a: 2.0",
        "  b: not there",
    ]
    assert main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"]
    assert found["slots"][0]["modules"] == ["{0-2,4}"]
    assert found["slots"][0]["slots"] == 4
    assert found["slots"][0]["b"]["version"] == "2.1"
    assert found["slots"][2]["b"] is None
    assert found["environment"][0] == {"name": "device", "a": "cpu", "b": "cpu (other)"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file or directory"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a binding"),
        ("{}", "not a binding"),
        ('{"schema": 7}', "a binding of schema 7; this opslot reads schema 1"),
        ('{"schema": 1, "slots": [{}], "environment": {}}', "not a whole binding"),
        ('{"schema": 1, "slots": {}, "environment": {}}', "not a whole binding"),
        ('{"schema": 1, "slots": []}', "not a whole binding"),
    ],
)
def test_what_cannot_be_compared_exits_with_2(saved, tmp_path, capsys, text, problem):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    assert main(["diff", saved("a.json"), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"opslot: {path}: ")
    assert problem in captured.err
