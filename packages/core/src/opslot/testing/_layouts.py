"""Layouts: the same values, or the same shape, in memory that a careless kernel reads wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .._contract import Sample
from ..ops._draw import gap, strided

if TYPE_CHECKING:
    import torch

Layout = Callable[["torch.Tensor"], "torch.Tensor"]


def relaid(sample: Sample) -> Iterator[Sample]:
    """The sample with all its tensors in each layout, and with each tensor alone in each layout."""
    from ._case import named, replace

    given = named({"args": sample.args, "kwargs": dict(sample.kwargs)})
    tensors = {id(tensor): tensor for tensor in given.values() if tensor.dim() and tensor.numel()}
    if not tensors:
        return
    names = {id(tensor): name.removeprefix("kwargs.") for name, tensor in given.items()}
    for layout, make in LAYOUTS.items():
        for group in (tuple(tensors), *((one,) for one in tensors if len(tensors) > 1)):
            fresh: dict[int, torch.Tensor] = {id(t): t for t in given.values()}
            for one in group:
                old = tensors[one]
                fresh[one] = make(old.detach()).requires_grad_(old.requires_grad)
            what = "everything" if len(group) > 1 or len(tensors) == 1 else names[group[0]]
            args, kwargs = replace((sample.args, dict(sample.kwargs)), fresh)
            yield Sample(f"{sample.name}, {what} {layout}", args, kwargs)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The first columns of longer rows, as halves of a merged projection are."""
    buffer = gap(tensor, (*tensor.shape[:-1], tensor.shape[-1] + 3))
    buffer[..., : tensor.shape[-1]] = tensor
    return buffer[..., : tensor.shape[-1]]


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and one element behind an aligned address."""
    buffer = gap(tensor, (tensor.numel() + 1,))
    buffer[1:] = tensor.reshape(-1)
    return buffer[1:].view(tensor.shape)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The first dimension is the fastest."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Other values: the first row for all of them, in one row's memory. What is not floating stays as it is."""
    if not tensor.is_floating_point() or not tensor.dim():
        return tensor
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS: Mapping[str, Layout] = {
    "strided": strided,
    "padded": padded,
    "offset": offset,
    "transposed": transposed,
    "expanded": expanded,
}
