"""What the documentation shows works: its code runs, its commands exist, its table is fresh."""

import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from opslot import OpsConfig, bind, registry
from opslot._catalog import distribution_of, op_of_field
from opslot_models import build_foundation_model
from transformers import Qwen3Config, Qwen3MoeConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_example_runs_and_is_short():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "moe_experts/standard" in done.stdout


def test_the_yaml_is_a_configuration():
    (text,) = blocks("yaml")
    chosen = {rule.key: rule.kernel for rule in OpsConfig.parse(yaml.safe_load(text)).rules(registry())}
    assert chosen[("moe_experts", "standard")] == "torch"


def test_the_two_commands_are_what_ci_runs():
    commands = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    assert commands == ["pip install uv && uv run opslot-train", "uv run pytest -n 2"]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == commands[-1]


def test_the_table_is_fresh():
    done = subprocess.run([sys.executable, "scripts/ops_table.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def commands():
    """Every command of ours that the documentation shows, in text or after a prompt."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "packages").glob("*/README.md"))]
    ours = r"opslot(?:-train|-patchgen)? "
    found = (
        re.findall(rf"`({ours}[a-z-][^`]*)`|^\$ (?:uv run )?({ours}[^#\n]*)", text, re.MULTILINE)
        for text in [README, *(page.read_text(encoding="utf-8") for page in pages)]
    )
    return sorted({" ".join((inline or shown).split()) for each in found for inline, shown in each})


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_text_parses(command):
    import importlib

    name, *arguments = shlex.split(command)
    modules = {
        "opslot": "opslot.tools.cli",
        "opslot-patchgen": "opslot_patchgen.cli",
        "opslot-train": "opslot_models.train.cli",
    }
    parser = importlib.import_module(modules[name])._parser()
    if name != "opslot-train":
        parser.parse_args(arguments)
    else:
        assert {a for a in arguments if a.startswith("--")} <= set(parser._option_string_actions)


def test_the_code_and_the_yaml_of_the_users_guide_run(monkeypatch, tmp_path):
    text = (ROOT / "docs/using.md").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)  # one block reads uv.lock
    (choices,) = blocks("yaml", text)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    said = yaml.safe_load(choices)
    del said["moe_implementation"]  # a dense model, and `strict`
    model = build_foundation_model(config, said, device="cpu")
    experts = Qwen3MoeConfig(**config.to_diff_dict(), moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
    build_foundation_model(experts, "eager").save_pretrained(tmp_path)
    tokens = torch.ones(1, 4, dtype=torch.long)
    seen = []
    names = {
        "logging": logging,
        "model": model,
        "binding": model.opslot_binding,
        "batch": {"input_ids": tokens, "labels": tokens},
        "build_foundation_model": build_foundation_model,
        "path": tmp_path,
        "ranks": 1,
        "tracker": type("Tracker", (), {"log": seen.append}),
    }
    logger = logging.getLogger("opslot")
    handlers, level = list(logger.handlers), logger.level
    try:
        for block in blocks("python", text):
            exec(compile(block, "docs/using.md", "exec"), names)
        bind(model, "eager", device="cpu")
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    assert [each["schema"] for each in seen] == [1]


def test_the_table_of_veomnis_fields_is_what_opslot_knows():
    text = (ROOT / "docs/from-veomni.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+_implementation`.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    fields = [field for names, _, _ in rows for field in re.findall(r"`(\w+)`", names)]
    assert len(fields) == 14
    owners = {field: contract.op for contract in registry().contracts() for field in contract.config_fields()}
    for names, _, values in rows:
        for field in re.findall(r"`(\w+)`", names):
            if field == "attn_implementation":
                continue
            op = owners.get(field) or op_of_field(field)
            said = re.findall(r"((?:`\w+`(?:, )?)+): (?:opslot-backend)?(-[a-z-]+)", values)
            assert said, field
            for kernels, distribution in said:
                for kernel in re.findall(r"`(\w+)`", kernels):
                    assert distribution_of(op, kernel.removeprefix("fused_")) == f"opslot-backend{distribution}"


def test_own_model_is_short_and_runs():
    path = ROOT / "examples/own_model.py"
    assert len(path.read_text().splitlines()) <= 40
    assert "transformers" not in path.read_text().replace("without transformers", "")
    subprocess.run([sys.executable, path], check=True, capture_output=True, timeout=300)


def test_every_relative_link_of_the_documentation_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
