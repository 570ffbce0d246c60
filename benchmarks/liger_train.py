r"""A Qwen3-MoE trained on English text with the kernels of a backend, or patched by Liger, beside eager.

    python benchmarks/liger_train.py --json liger_train.json

needs a GPU and liger-kernel. On a CPU, tiny and without Liger:

    python benchmarks/liger_train.py --widths tiny --layers 2 --sequence 64 --steps 4 --dtype float32 \
        --candidates eager eager-again auto --json liger_train.json

Every candidate runs in a process of its own, since Liger patches a process, and starts from the same weights: they are
drawn in the order of their names, whatever class holds them. The text is the one that opslot-train uses, as bytes; each
step has other pieces of it, the same for all candidates. Written are the curves with times and memory as JSON, and a
picture of them beside it.

The verdict is over the last steps: how far a candidate's loss is from eager's, step by step and on average, against
the most that lies between two of the runs of eager, or 1e-3 where that is more. Some candidates run only when they are
asked for: `eager-third` and `eager-fourth` are more runs of eager, since two of them say little of how far any two are
apart; `nudged` is eager from weights of which one is a rounding away, so it shows how far a run drifts that differs in
nothing but one rounding; `patched-experts` has Liger's experts, which are tuned for minutes on first use. `liger`
leaves them out, as `patched` does.

Exit codes: 0; 1 when a candidate failed, the others are measured all the same; 2 wrong usage.
"""

import argparse
import hashlib
import itertools
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CANDIDATES = {
    "eager": "eager",
    "eager-again": "eager again",
    "eager-third": "eager, third run",
    "eager-fourth": "eager, fourth run",
    "liger": "liger",
    "patched": "transformers patched by Liger",
    "patched-experts": "patched by Liger, experts too",
    "auto": "auto",
    "triton": "triton",
    "nudged": "eager, one weight a rounding away",
}
DEFAULT = ["eager", "eager-again", "liger", "patched", "auto"]
# The same run, repeated.
EAGER = ("eager", "eager-again", "eager-third", "eager-fourth")
# Bound by opslot after the model is built.
BOUND = ("liger", "triton", "auto")
PACKAGES = (
    *("torch", "triton", "transformers", "liger-kernel", "opslot", "opslot-models"),
    *("opslot-backend-torch", "opslot-backend-liger", "opslot-backend-triton-moe"),
)
SETTLED, LAST, LEAST_LIMIT = 20, 50, 1e-3


def config_of(options: argparse.Namespace) -> Any:
    from opslot_models.train._job import demo_config
    from train_step import model_config

    if options.widths == "real":
        config: Any = model_config(options.layers)
    else:
        config = demo_config(options.sequence)
        config.num_hidden_layers = options.layers
    config.use_cache = False  # as Trainer sets it
    return config


def build(name: str, config: Any, dtype: Any) -> tuple[Any, Any, list[str]]:
    """The model, its binding if it has one, and the lines that say what runs in it."""
    from opslot import bind
    from opslot_models import build_foundation_model

    if name.startswith("patched"):
        model = patched(config, dtype, experts=name == "patched-experts")
        return model, None, liger_names(model)
    model = build_foundation_model(config, "eager", dtype=dtype)
    binding: Any = model.opslot_binding
    if name in BOUND:
        binding = bind(model, "auto" if name == "auto" else served_by(name, binding))
    return model, binding, str(binding).splitlines()


def served_by(kernel: str, binding: Any) -> dict[str, str]:
    """The kernel of this name for every slot that it is for, and eager for the others."""
    from opslot import OpslotError, Priority, registry

    keys = {(row.op, row.variant) for row in binding.rows}
    # Not what is chosen only by name: Liger tunes its experts for minutes before the first step.
    served = {
        key
        for key in keys
        for offer in registry().offers(*key)
        if offer.spec.name == kernel and offer.spec.priority > Priority.BY_NAME
    }
    if not served:
        raise OpslotError(f"no kernel named {kernel} for any slot of this model: install its backend")
    return {"default": "eager", **{"/".join(key): kernel for key in sorted(served)}}


def patched(config: Any, dtype: Any, *, experts: bool) -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
    from transformers import Qwen3MoeForCausalLM

    apply_liger_kernel_to_qwen3_moe(rope=True, rms_norm=True, fused_linear_cross_entropy=True, swiglu=experts)
    return Qwen3MoeForCausalLM._from_config(config, dtype=dtype)


def liger_names(model: Any) -> list[str]:
    """What in the model's module is Liger's now. Raises `AssertionError` when the patching left no trace."""
    upstream = vars(sys.modules[type(model).__module__])
    found = {**upstream, f"{type(model).__name__}.forward": type(model).forward}
    theirs = {name: value for name, value in found.items() if getattr(value, "__module__", "").startswith("liger_")}
    assert theirs, "nothing of Liger's is in transformers' module after the patching"
    return [f"{name}: {value.__module__}.{value.__qualname__}" for name, value in sorted(theirs.items())]


def initialise(model: Any, seed: int, scale: float) -> str:
    """Draw all weights, in the order of their names. Returns a checksum of them."""
    import torch

    generator, total = torch.Generator(model.device).manual_seed(seed), hashlib.sha256()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:  # those of norms
                weight.fill_(1)
            else:
                weight.normal_(0, scale, generator=generator)
            total.update(f"{name} {tuple(weight.shape)} {weight.sum(dtype=torch.float32).item()}\n".encode())
    return total.hexdigest()


def batches(options: argparse.Namespace) -> tuple[Any, str]:
    """Tokens [steps, batch, sequence], pieces of the text from random places, and the checksum of the text."""
    import torch
    from opslot_models.train._text import encode, read_text

    text = read_text(None)
    tokens = encode(text, None)
    generator = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(tokens) - options.sequence, (options.steps, options.batch), generator=generator)
    return tokens.unfold(0, options.sequence, 1)[starts], hashlib.sha256(text.encode()).hexdigest()


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One candidate, in this process."""
    import torch
    from opslot._attempt import Failure, attempt

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    cuda = torch.cuda if device.type == "cuda" else None
    config = config_of(options)
    torch.manual_seed(options.seed)
    with torch.device(device):
        model, binding, lines = build(name, config, getattr(torch, options.dtype))
    model.train()
    weights = initialise(model, options.seed, config.initializer_range)
    if name == "nudged":
        with torch.no_grad():  # of the space, which every batch has
            model.get_input_embeddings().weight[32, 0] *= 1 + torch.finfo(model.dtype).eps
    tokens, text = batches(options)
    tokens = tokens.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / options.warmup))

    def clock() -> float:
        if cuda is not None:
            cuda.synchronize()
        return time.perf_counter()

    losses, times = [], []
    settled = settled_after(options.steps)
    for index, batch in enumerate(tokens):
        if cuda is not None and index == settled:
            cuda.reset_peak_memory_stats()
        start = clock()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(1e3 * (clock() - start))
        losses.append(loss.item())
    step_ms = statistics.median(times[settled:])
    result: dict[str, Any] = {
        "error": None if all(map(math.isfinite, losses)) else "a loss is not finite",
        "step_ms": step_ms,
        "step_ms_quartiles": statistics.quantiles(times[settled:], n=4, method="inclusive")[::2],
        "tokens_per_second": options.batch * options.sequence / step_ms * 1e3,
        "peak_bytes": cuda.max_memory_allocated() if cuda is not None else None,
        "binding": lines,
        "loss": [loss if math.isfinite(loss) else None for loss in losses],
        "step_ms_each": [round(taken, 3) for taken in times],
        "device": cuda.get_device_name() if cuda is not None else device.type,
        "torch": torch.__version__,  # with the build, which the version of the distribution lacks
        "weights_sha256": weights,
        "text_sha256": text,
    }
    if name in BOUND:
        missed = attempt(lambda: misses(model, binding, tokens[0]))
        if isinstance(missed, Failure):
            print(missed.traceback, file=sys.stderr)
        if missed:
            result["error"] = result["error"] or f"whether the kernels ran: {missed}"
    return result


def misses(model: Any, binding: Any, batch: Any) -> str:
    """What a bound kernel missed in one more step, with its reason; empty when all of them ran."""
    with binding.proof() as proof:
        model(input_ids=batch, labels=batch).loss.backward()
    return "; ".join(map(str, proof.misses()))


def settled_after(steps: int) -> int:
    """The first steps allocate, compile and tune: they are not timed."""
    return min(SETTLED, steps // 2)


def run(name: str, options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """One candidate in a process of its own. What it prints is shown; what it raises is its `error`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = [sys.executable, __file__, *arguments, "--one", name, "--json", str(file)]
        start = time.perf_counter()
        try:
            code = subprocess.run(command, timeout=options.limit).returncode
            error = f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            error = f"it took longer than {options.limit:g} seconds"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"error": error}
    if result["error"]:
        result["error"] = without_folders(result["error"])
    return {"title": CANDIDATES[name], "seconds_in_all": round(time.perf_counter() - start, 1), **result}


def without_folders(text: str) -> str:
    """The text without the absolute folders of this machine; the names of files stay."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", text)


def start_of(result: dict[str, Any]) -> tuple[str, str]:
    return result["weights_sha256"], result["text_sha256"]


def require_one_start(results: dict[str, Any]) -> None:
    """A candidate that had other weights or another text than the first one has failed."""
    ran = [result for result in results.values() if "loss" in result]
    for result in ran:
        if start_of(result) != start_of(ran[0]):
            result["error"] = f"it started from other weights or had another text than {ran[0]['title']}"


def curves(results: dict[str, Any]) -> dict[str, list[float]]:
    """The losses that can be compared: whole, finite, and from one start."""
    ran = {name: result for name, result in results.items() if "loss" in result}
    first = next(map(start_of, ran.values()), None)
    return {name: r["loss"] for name, r in ran.items() if start_of(r) == first and None not in r["loss"]}


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """How far each candidate's last losses are from eager's, beside what is allowed. Empty without eager's."""
    last = {name: losses[-LAST:] for name, losses in curves(results).items()}
    if "eager" not in last:
        return {}

    def apart(losses: list[float], others: list[float]) -> dict[str, float]:
        differences = [mine - theirs for mine, theirs in zip(losses, others, strict=True)]
        return {
            "mean_of_differences": statistics.fmean(map(abs, differences)),
            "difference_of_means": abs(statistics.fmean(differences)),
        }

    repeats = [last[name] for name in EAGER if name in last]
    pairs = [apart(*pair) for pair in itertools.combinations(repeats, 2)]
    keys = ("mean_of_differences", "difference_of_means")
    limits = {key: max([LEAST_LIMIT, *(pair[key] for pair in pairs)]) for key in keys}
    found = {}
    for name, losses in last.items():
        if name != "eager":
            distances = apart(losses, last["eager"])
            within = all(value <= limits[key] for key, value in distances.items())
            found[name] = {**distances, "limits": limits, "within": within}
    return found


def draw(path: Path, results: dict[str, Any]) -> None:
    """The curves, and below them what each has more than eager."""
    from matplotlib.figure import Figure

    found = curves(results)
    figure = Figure(figsize=(8, 8), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True)
    for name, curve in found.items():
        steps, eager = range(1, len(curve) + 1), found.get("eager", curve)
        losses.plot(steps, curve, label=CANDIDATES[name], linewidth=1)
        differences.plot(steps, [a - b for a, b in zip(curve, eager, strict=True)], linewidth=1)
    losses.set_ylabel("loss (nats per token, with the auxiliary loss)")
    differences.set_yscale("symlog", linthresh=LEAST_LIMIT)
    differences.set_ylabel("loss minus that of eager")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    if found:
        losses.legend()
    figure.savefig(path, dpi=120)


def write(options: argparse.Namespace, arguments: list[str], results: dict[str, Any]) -> None:
    data = {
        "command": without_folders(" ".join(["python benchmarks/liger_train.py", *arguments])),
        "date": date.today().isoformat(),
        "device": next((result["device"] for result in results.values() if "device" in result), None),
        "versions": {"python": platform.python_version(), **versions()},
        "options": {key: value for key, value in vars(options).items() if key not in ("json", "one")},
        "settled_after_steps": settled_after(options.steps),
        "verdict_over_last_steps": min(LAST, options.steps),
        "verdict": verdict(results),
        "results": results,
    }
    options.json.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def line(result: dict[str, Any]) -> str:
    text = f"{result['title']:34}"
    if "loss" in result:
        peak = f"{result['peak_bytes'] / 2**30:6.1f} GiB " if result["peak_bytes"] is not None else ""
        text += f"{result['step_ms']:8.1f} ms {result['tokens_per_second']:9.0f} tokens/s {peak} "
        text += f"loss {result['loss'][0]} -> {result['loss'][-1]}"
    return text + (f"  failed: {result['error']}" if result["error"] else "")


def show(results: dict[str, Any]) -> None:
    for result in results.values():
        print(f"\n{result['title']}:", *result.get("binding", ()), sep="\n  ")
    print()
    for result in results.values():
        print(line(result))
    found = verdict(results)
    print("\nfrom eager's loss, over the last steps:" if found else "\nno verdict: eager is not among those that ran")
    for name, judged in found.items():
        (each, limit_each), (means, limit_means) = ((judged[key], limit) for key, limit in judged["limits"].items())
        print(
            f"{CANDIDATES[name]:34} each step {each:.2e} (limit {limit_each:.2e}), means {means:.2e} "
            f"(limit {limit_means:.2e}): {'within' if judged['within'] else 'OUTSIDE'}"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=DEFAULT)
    parser.add_argument("--widths", choices=("real", "tiny"), default="real", help="tiny: opslot-train's demo model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=20, help="steps; the learning rate is constant after them")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each candidate")
    parser.add_argument("--json", type=Path, required=True, help="the picture goes beside it, as .png")
    parser.add_argument("--one", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 4:
        parser.error("--steps must be at least 4: the first ones are not timed")

    if options.one is not None:
        from opslot._attempt import Failure, attempt

        outcome = attempt(lambda: train(options.one, options))
        if isinstance(outcome, Failure):
            print(outcome.traceback, file=sys.stderr)
            outcome = {"error": str(outcome)}
        options.json.write_text(json.dumps(outcome), encoding="utf-8")
        return 0
    results: dict[str, Any] = {}
    for name in options.candidates:
        print(f"{CANDIDATES[name]} ...", flush=True)
        results[name] = run(name, options, arguments)
        require_one_start(results)
        print(line(results[name]), flush=True)
        write(options, arguments, results)  # so that what ran is kept whatever becomes of the next
    show(results)
    draw(options.json.with_suffix(".png"), results)
    return 1 if any(result["error"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
