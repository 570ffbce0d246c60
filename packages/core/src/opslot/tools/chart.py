"""The chart of a benchmark: a row of bars per shape, with the floor as a line."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opslot import OpslotError

_PASSES = {"forward": "forward_ms", "forward_backward": "forward_backward_ms"}


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise OpslotError(
            "--output draws a chart and needs matplotlib, which is not installed: pip install 'opslot[bench]', "
            "or use --json without --output"
        )


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Medians with quartiles of every kernel that passed; those that did not are named, not drawn."""
    from matplotlib.figure import Figure

    results = [result for result in report["results"] if not result["error"]]
    height = sum(1.2 + 0.35 * len(result["kernels"]) for result in results) or 2
    figure = Figure(figsize=(10, 0.8 + height), layout="constrained")
    figure.suptitle(f"{report['op']}/{report['variant']}, {report['dtype']} on {report['device']}")
    grid = figure.subplots(max(1, len(results)), 2, squeeze=False)
    for row, result in zip(grid, results, strict=False):
        for axes, (which, key) in zip(row, _PASSES.items(), strict=True):
            bars = [(kernel["kernel"], kernel[key]) for kernel in result["kernels"] if passed(kernel) and kernel[key]]
            names = [name for name, _ in bars]
            medians = [spread["median"] for _, spread in bars]
            errors = [
                [spread["median"] - spread["quartiles"][0] for _, spread in bars],
                [spread["quartiles"][1] - spread["median"] for _, spread in bars],
            ]
            axes.barh(names, medians, xerr=errors, color=["0.6" if name == "eager" else "C0" for name in names])
            axes.invert_yaxis()
            if result["floor_ms"] is not None:
                axes.axvline(result["floor_ms"][which], color="C3", linestyle="--", label="floor")
                axes.legend(loc="lower right")
            failed = [kernel["kernel"] for kernel in result["kernels"] if not passed(kernel)]
            note = f"\nfailed: {', '.join(failed)}" if failed else ""
            axes.set_title(f"{result['shape']}: {which.replace('_', ' + ')}{note}", fontsize="medium")
            axes.set_xlabel("ms, median and quartiles")
    figure.savefig(path, dpi=120)


def passed(kernel: Mapping[str, Any]) -> bool:
    """It passed verification, and every call of it at this shape went well."""
    return not kernel["verdict"] and not kernel["error"]
