"""The training job: one model, one configuration of kernels, one loss curve."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opslot import BindError, Binding, OpsConfig, OpslotError
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ProgressCallback

from .._build import build_foundation_model
from ._text import Windows


@dataclass(frozen=True)
class Job:
    """What to train. `model` is a checkpoint, or None for a new byte-level Qwen3-MoE of 2.8 million parameters."""

    model: str | None
    output: Path
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    seed: int
    dtype: torch.dtype

    def source(self) -> PreTrainedConfig | str:
        return self.model if self.model is not None else demo_config(self.sequence_length)


@dataclass(frozen=True)
class Run:
    """One training run: the loss of every step, and the seconds of a step, the first one, which warms up, left out."""

    model: PreTrainedModel
    binding: Binding
    losses: list[float]
    seconds_per_step: float | None


def demo_config(sequence_length: int) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        # One dense layer, so that every op of the family runs.
        "mlp_only_layers": [0],
        "output_router_logits": True,
        "max_position_embeddings": max(sequence_length, 128),
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**fields)


def train(job: Job, ops: OpsConfig, windows: Windows, title: str, *, unbound: bool = False) -> Run:
    """Train from the job's seed, or `unbound` with the kernels taken out: the same weights, batches and attention."""
    torch.manual_seed(job.seed)
    model = build_foundation_model(job.source(), ops, dtype=job.dtype)
    binding: Binding = vars(model)["opslot_binding"]
    if unbound:
        binding.unbind()
    record = _Record()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(job.output),
            max_steps=job.steps,
            per_device_train_batch_size=job.batch_size,
            learning_rate=job.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, job.steps // 10),
            seed=job.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            # Unless told so, Trainer on a CPU lets torchrun's processes run side by side and not together.
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.accelerator.is_available(),
        ),
        train_dataset=windows,
        callbacks=[_SameOnAllRanks(binding), record],
    )
    wanted = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    if trainer.args.world_size != wanted:
        raise OpslotError(f"torchrun started {wanted} processes, but Trainer joins {trainer.args.world_size}")
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_Bar(title))
    trainer.train()
    problems = () if unbound else binding.verify()
    if problems:
        raise BindError("kernels were lost during training: " + "; ".join(problems))
    return Run(model, binding, record.losses, record.seconds_per_step())


def reload_difference(run: Run, checkpoint: Path, windows: Windows) -> dict[str, float]:
    """Largest logit difference to what stock transformers computes from the saved checkpoint.

    "unbound": of the same model with its kernels taken out, which runs upstream's own code. "bound": with them.
    """
    attention = run.model.config._attn_implementation
    stock: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=run.model.dtype, attn_implementation=attention)
    stock.to(run.model.device).eval()
    tokens = windows[0]["input_ids"][None].to(run.model.device)
    run.model.eval()
    with torch.no_grad():
        expected = stock(tokens).logits
        bound = run.model(tokens).logits
        run.binding.unbind()
        unbound = run.model(tokens).logits
        run.binding.apply()
    return {
        "unbound": (unbound - expected).abs().max().item(),
        "bound": (bound - expected).abs().max().item(),
        "largest_logit": expected.abs().max().item(),
    }


class _SameOnAllRanks(TrainerCallback):
    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._binding.assert_same_on_all_ranks()


class _Record(TrainerCallback):
    """Losses and step times."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._ends.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def seconds_per_step(self) -> float | None:
        steps = len(self._ends) - 1
        return (self._ends[-1] - self._ends[0]) / steps if steps > 0 else None


class _Bar(ProgressCallback):
    """transformers' progress bar with the loss beside it instead of one line per step."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self._title)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")
