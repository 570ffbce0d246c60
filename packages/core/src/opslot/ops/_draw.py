"""What the contracts share: reproducible tensors in every layout, and tolerances from counted roundings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._contract import Tolerance

if TYPE_CHECKING:
    import torch

# Unit roundoff: the largest relative error of rounding once to the type.
_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def tolerances(*, roundings: float, terms: int, noise: float = 0.0) -> Mapping[str, Tolerance]:
    """Tolerances for a result that goes through `roundings` roundings to its dtype, one after the other.

    Sums of up to `terms` terms are kept in float32 (float64 for float64), where errors grow like a random walk; the
    factor 4 covers the largest of some thousand elements. `noise` is the absolute size, in units of roundoff, of what
    remains where the exact result is zero because terms of that size cancel.
    """
    result = {}
    for dtype, unit in _UNIT.items():
        accumulation = 4 * math.sqrt(terms) * min(unit, _UNIT["float32"])
        result[dtype] = Tolerance(rtol=roundings * unit + accumulation, atol=noise * unit)
    return result


class Draw:
    """A stream of random tensors, the same on every device: drawn on the CPU in float64, rounded, then moved.

    With `in_place` they are drawn where they are wanted, in float32: for workloads, whose sizes a CPU would take
    minutes for.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int, *, in_place: bool = False) -> None:
        import torch

        self.device = torch.device(device)
        self.dtype = dtype
        self._wide = torch.float32 if in_place else torch.float64
        self._generator = torch.Generator(self.device if in_place else "cpu").manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        values = torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=self._wide) * scale
        return values.to(dtype or self.dtype).to(self.device)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        import torch

        return torch.randint(high, shape, generator=self._generator, device=self._generator.device).to(self.device)

    def ranks(self, rows: int, columns: int) -> torch.Tensor:
        """Every row a random permutation of 0 .. columns - 1."""
        import torch

        keys = torch.rand(rows, columns, generator=self._generator, device=self._generator.device)
        return keys.argsort(-1).to(self.device)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in its layout, to be differentiated."""
    return tensor.detach().requires_grad_()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a larger buffer: no stride is 1."""
    buffer = gap(tensor, (*tensor.shape, 2))
    buffer[..., 0] = tensor
    return buffer[..., 0]


def gap(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A buffer of NaN, or of a number that is no index, to lay elements into: whoever reads between them is seen."""
    no_index = 2**30 if like.element_size() > 2 else 1
    return like.new_full(shape, float("nan") if like.is_floating_point() else no_index)
