"""What the job leaves in its output folder: numbers as JSON and the loss curve as a picture."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def draw_losses(path: Path, curves: Mapping[str, list[float]]) -> None:
    """One line per run: loss over step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token, with the auxiliary loss)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def machine() -> dict[str, str]:
    import torch
    import transformers

    device = torch.accelerator.current_accelerator(check_available=True)
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device or "cpu"),
        "threads": str(torch.get_num_threads()),
    }
