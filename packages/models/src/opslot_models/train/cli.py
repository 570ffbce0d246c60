"""The command `opslot-train`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from opslot import OpsConfig, OpslotError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done; 1 the job could not run, or the reloaded checkpoint differs; 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except OpslotError as error:
        print(f"opslot-train: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opslot-train",
        description="Train a causal language model with the kernels of your choice. Without options: a byte-level "
        "Qwen3-MoE of 2.8 million parameters on the English text that ships with Python, on the device that is "
        "present, beside the same run without any kernel. Starts under torchrun too.",
    )
    parser.add_argument("--model", help="checkpoint folder or hub name (default: a new small Qwen3-MoE)")
    parser.add_argument("--data", help="UTF-8 text file (default: Python's language reference)")
    parser.add_argument("--ops", default="auto", help="YAML file of kernels, or 'auto' (default) or 'eager'")
    parser.add_argument("--output", type=Path, default=Path("runs/opslot-train"), help="default: %(default)s")
    parser.add_argument("--steps", type=_at_least(1), default=150, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=_at_least(1), default=8, help="sequences per process; default: %(default)s"
    )
    parser.add_argument("--sequence-length", type=_at_least(2), default=128, help="tokens; default: %(default)s")
    parser.add_argument("--learning-rate", type=_positive, help="default: 3e-3 for the new model, 2e-5 with --model")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    parser.add_argument("--no-compare", action="store_true", help="skip the second run, which binds no kernel")
    return parser


def _seconds(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.3f} s"


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return whole


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


def _run(options: argparse.Namespace) -> int:
    if options.output.exists() and not options.output.is_dir():
        raise OpslotError(f"--output {options.output} is a file")
    if options.model is not None:
        folder = Path(options.model)
        if options.model.startswith((".", "/")) and not folder.is_dir():
            raise OpslotError(f"--model {options.model}: no such folder")
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise OpslotError(f"--model {options.model}: no config.json in this folder; is it {folder / 'checkpoint'}?")
        if folder.resolve() == (options.output / "checkpoint").resolve():
            raise OpslotError(f"--model {options.model} is where the new checkpoint would go: choose another --output")
    # Judged before torch and transformers take their seconds to import.
    ops = OpsConfig.effective(options.ops)
    missing = [name for name in ("accelerate", "matplotlib") if find_spec(name) is None]
    if missing:
        raise OpslotError(f"{' and '.join(missing)} not installed: pip install 'opslot-models[train]'")

    # Threads that spin while they wait make a laptop that does anything else ten times slower. OpenMP reads it once.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from ._job import Job, reload_difference, train
    from ._report import draw_losses, machine, write_json
    from ._text import Windows, encode, read_text, tokenizer_of

    default_rate = 3e-3 if options.model is None else 2e-5
    job = Job(
        model=options.model,
        output=options.output,
        steps=options.steps,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        learning_rate=default_rate if options.learning_rate is None else options.learning_rate,
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
    )
    tokenizer = None if job.model is None else tokenizer_of(job.model)
    windows = Windows(encode(read_text(options.data), tokenizer), job.sequence_length)
    first = int(os.environ.get("RANK", "0")) == 0  # set by torchrun
    checkpoint = job.output / "checkpoint"

    run = train(job, ops, windows, "bound")
    curves = {"bound": run.losses}
    seconds = {"bound": run.seconds_per_step}
    difference = {}
    if first:
        print(run.binding, flush=True)
        job.output.mkdir(parents=True, exist_ok=True)
        run.model.save_pretrained(checkpoint)
        (job.output / "binding.json").write_text(run.binding.to_json(), encoding="utf-8")
        difference = reload_difference(run, checkpoint, windows)
    if not options.no_compare:
        eager = train(job, ops, windows, "eager", unbound=True)
        curves["eager"], seconds["eager"] = eager.losses, eager.seconds_per_step
    if not first:
        return 0

    write_json(
        job.output / "result.json",
        {
            "arguments": vars(options) | {"output": str(job.output)},
            "machine": machine(),
            "seconds_per_step": seconds,
            "logit_difference": difference,
            "loss": curves,
        },
    )
    draw_losses(job.output / "loss.png", curves)
    for name, losses in curves.items():
        tail = losses[-10:]
        print(
            f"{name}: loss {losses[0]:.3f} -> {sum(tail) / len(tail):.3f} (mean of the last {len(tail)}), "
            f"{_seconds(seconds[name])} per step"
        )
    print(
        f"reloaded by stock transformers: largest logit difference {difference['unbound']:.1e} with the kernels "
        f"unbound, {difference['bound']:.1e} bound (logits up to {difference['largest_logit']:.1f})"
    )
    print(f"written to {job.output}: checkpoint/, binding.json, result.json, loss.png")
    if difference["unbound"] != 0.0:
        print("opslot-train: the checkpoint does not give the same logits in stock transformers", file=sys.stderr)
        return 1
    return 0
