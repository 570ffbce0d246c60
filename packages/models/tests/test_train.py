import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from opslot_models.train.cli import main
from transformers import AutoModelForCausalLM

SMALL = ["--steps", "4", "--batch-size", "2", "--sequence-length", "32"]


def test_the_main_job(tmp_path, capsys):
    assert main([*SMALL, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "opslot: " in printed
    assert "moe_experts/standard" in printed
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["logit_difference"]["unbound"] == 0.0
    assert result["logit_difference"]["bound"] < 1e-4
    assert len(result["loss"]["bound"]) == len(result["loss"]["eager"]) == 4
    assert result["loss"]["bound"][0] == pytest.approx(result["loss"]["eager"][0], abs=1e-3)
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    binding = json.loads((tmp_path / "out/binding.json").read_text())
    assert {slot["op"] for slot in binding["slots"]} == {
        "rms_norm",
        "rotary_pos_emb",
        "glu",
        "moe_experts",
        "cross_entropy_loss",
        "load_balancing_loss",
    }


def test_a_model_data_and_ops_of_the_users(tmp_path):
    main([*SMALL, "--no-compare", "--output", str(tmp_path / "first")])
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "ops.yaml").write_text(
        "model:\n  ops_implementation:\n    rms_norm_implementation: torch\n    default: eager\n"
    )
    arguments = ["--model", str(tmp_path / "first/checkpoint"), "--data", str(tmp_path / "text.txt")]
    arguments += ["--ops", str(tmp_path / "ops.yaml"), "--no-compare", "--output", str(tmp_path / "second")]
    assert main([*SMALL, *arguments]) == 0
    binding = json.loads((tmp_path / "second/binding.json").read_text())
    assert {slot["op"] for slot in binding["slots"] if slot["kernel"] == "torch"} == {"rms_norm"}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_of_another_family(config, family, tmp_path):
    torch.manual_seed(0)
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(config(vocab_size=256)).save_pretrained(source)
    arguments = ["--model", str(source), "--no-compare", "--output", str(tmp_path / "out")]
    assert main([*SMALL, *arguments]) == 0  # which is 1 unless stock transformers gives the same logits
    binding = json.loads((tmp_path / "out/binding.json").read_text())
    assert {slot["op"] for slot in binding["slots"]} == {"rms_norm", "rotary_pos_emb", "glu", "cross_entropy_loss"}
    assert json.loads((tmp_path / "out/checkpoint/config.json").read_text())["model_type"] == family


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ops", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--ops", "fast"], "pass 'auto', 'eager', a mapping or the path of a YAML"),
        (["--data", "nowhere.txt"], "--data nowhere.txt"),
        (["--sequence-length", "10000000"], "fewer than one sequence of 10000000"),
        (["--model", "/nowhere/at/all"], "--model /nowhere/at/all: no such folder"),
        (["--output", __file__], "is a file"),
    ],
)
def test_what_cannot_run_says_why(arguments, problem, capsys):
    assert main(arguments) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--batch-size", "-1"], ["--sequence-length", "1"], ["--learning-rate", "0"]]
)
def test_numbers_that_make_no_training_are_wrong_usage(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def torchrun(*arguments, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


@pytest.mark.slow
def test_two_processes(tmp_path):
    done = torchrun("-m", "opslot_models.train", *SMALL, "--no-compare", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("opslot: ") == 1
    together = json.loads((tmp_path / "out/result.json").read_text())["loss"]["bound"]
    assert len(together) == 4
    # Two processes with two sequences each see what one process sees with four.
    assert (
        main(
            ["--steps", "4", "--batch-size", "4", "--sequence-length", "32", "--no-compare", "--output", str(tmp_path)]
        )
        == 0
    )
    assert together == pytest.approx(json.loads((tmp_path / "result.json").read_text())["loss"]["bound"], abs=0.02)


RANKS = """
import os
import torch
from opslot_models import build_foundation_model
from transformers import Qwen3MoeConfig
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
config = Qwen3MoeConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1, num_experts=2, num_experts_per_tok=1,
                        intermediate_size=32, moe_intermediate_size=32)
binding = build_foundation_model(config, "eager" if rank and os.environ["DIFFER"] == "1" else "auto").opslot_binding
try:
    binding.assert_same_on_all_ranks()
    print("same choice\\n", end="", flush=True)
except ValueError as error:
    print(f"{error}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("differ", "expected"), [("0", "same choice"), ("1", "the ranks chose different kernels")])
def test_ranks_prove_the_same_choice(tmp_path, differ, expected):
    (tmp_path / "ranks.py").write_text(RANKS)
    done = torchrun(str(tmp_path / "ranks.py"), DIFFER=differ)
    assert done.stdout.count(expected) == 2, done.stdout + done.stderr


def test_the_default_text_is_prose_that_ships_with_python():
    from opslot_models.train._text import read_text

    text = read_text(None)
    assert len(text) > 300_000
    assert text.count(" the ") > 2_000


def test_help_runs_without_torch():
    code = "import sys; from opslot_models.train.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_the_output_folder_can_be_written_twice(tmp_path):
    for _ in range(2):
        assert main([*SMALL, "--no-compare", "--output", str(tmp_path)]) == 0
    assert Path(tmp_path / "checkpoint/config.json").is_file()
