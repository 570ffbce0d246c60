"""Accuracy: the kernel's error beside the error that eager code makes in the same dtype, against float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ._case import Case, error_of, exactly, is_tensor
from ._subject import Subject

if TYPE_CHECKING:
    import torch

SEEDS = 8
# How much larger than eager's the kernel's errors may be: their root mean square, and the largest of them.
RMS, LARGEST = 1.05, 2.0


def largest_allowed(rms: float = RMS) -> float:
    """How many times eager's largest error may be that of a kernel whose RMS error may be `rms` times eager's."""
    return LARGEST * max(1.0, rms / RMS)


@dataclass
class _Errors:
    """Of one tensor, seed by seed."""

    rms: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    overflows: int = 0

    def add(self, got: torch.Tensor, exact: torch.Tensor) -> None:
        error, _ = error_of(got, exact)
        if not got.isfinite().cpu()[exact.isfinite()].all():
            self.overflows += 1
        error = error[error.isfinite()]
        self.rms.append(float(error.square().mean().sqrt()) if error.numel() else 0.0)
        self.largest.append(float(error.max()) if error.numel() else 0.0)


@dataclass
class Comparison:
    """`rounding` is what rounding the exact result once would cost: no kernel can be asked to be better than that."""

    sample: str
    tensor: str
    kernel: _Errors = field(default_factory=_Errors)
    eager: _Errors = field(default_factory=_Errors)
    rounding: _Errors = field(default_factory=_Errors)

    def problem(self, rms: float = RMS) -> str:
        """What is too large, empty when nothing is. `rms` is the limit of the mean ratio of root mean squares.

        Few errors scatter, and those in one tensor may be copies of each other, so what scatters is read off the seeds.
        The mean ratio of the root mean squares must be above `rms` by more than five of its standard errors (of eight
        seeds, once in a thousand by chance). The largest error must be above `largest_allowed` times eager's by more
        than three standard deviations of eager's own largest from seed to seed.
        """
        if self.kernel.overflows > self.eager.overflows:
            return (
                f"{self.tensor}: not finite in {self.kernel.overflows} seeds, where eager is in {self.eager.overflows}"
            )
        base = [max(pair) for pair in zip(self.eager.rms, self.rounding.rms, strict=True)]
        ratios = [math.log(max(mine / other, 0.1)) for mine, other in zip(self.kernel.rms, base, strict=True) if other]
        if any(mine for mine, other in zip(self.kernel.rms, base, strict=True) if not other):
            return f"{self.tensor}: RMS error {max(self.kernel.rms):.3g} where eager is exact"
        if len(ratios) > 1:
            mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
            if mean - 5 * error > math.log(rms):
                return (
                    f"{self.tensor}: RMS error {math.exp(mean):.3g} times eager's (mean of {SEEDS} seeds, within a "
                    f"factor of {math.exp(error):.3g}), allowed {rms}"
                )
        largest = [max(pair) for pair in zip(self.eager.largest, self.rounding.largest, strict=True)]
        if all(largest):
            times = largest_allowed(rms)
            allowed = times * max(largest) * math.exp(3 * statistics.stdev(map(math.log, largest)))
            if max(self.kernel.largest) > allowed:
                return (
                    f"{self.tensor}: largest error {max(self.kernel.largest):.3g} over {SEEDS} seeds, eager's "
                    f"{max(largest):.3g}, allowed {allowed:.3g} ({times:.3g} times eager's, beyond its scatter)"
                )
        return ""


def comparisons(subject: Subject, seed: int) -> Iterator[Comparison]:
    """One for each output and gradient of each sample that the kernel takes, over all seeds."""
    found: dict[tuple[str, str], Comparison] = {}
    for number in range(seed, seed + SEEDS):
        for case in subject.cases(number):
            with case.noted():
                _add(found, case)
    yield from found.values()


def _add(found: dict[tuple[str, str], Comparison], case: Case) -> None:
    import torch

    for tensor, got, eager, exact in _results(case):
        key = case.sample.name, tensor
        mine = found.setdefault(key, Comparison(*key))
        for errors, value in ((mine.kernel, got), (mine.eager, eager), (mine.rounding, exact.to(got.dtype))):
            errors.add(value, exact)
        if not mine.rounding.rms[-1] and exact.numel():
            # The results need no rounding, as whole numbers do not; a kernel's may still go the other way once.
            unit = torch.finfo(got.dtype).eps * float(exact.detach().nan_to_num().abs().max())
            mine.rounding.rms[-1] = mine.rounding.largest[-1] = unit


def _results(case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By name: what the kernel, eager and float64 give, for each floating output and each gradient."""
    run, eager, exact = case.run(), case.eager, case.exact
    for number, values in enumerate(zip(run.outputs, eager.outputs, exact.outputs, strict=True)):
        if all(map(is_tensor, values)) and values[2].is_floating_point():
            yield f"output {number}", *values
    if case.has_gradients:
        _, incoming = next(case.incoming(eager.outputs))
        mine, theirs = run.gradients(incoming), eager.gradients(incoming)
        right = exact.gradients([None if g is None else exactly(g) for g in incoming])
        for name, value in right.items():
            if value is not None and mine[name] is not None and theirs[name] is not None:
                yield f"the gradient of {name}", mine[name], theirs[name], value  # type: ignore[misc]
