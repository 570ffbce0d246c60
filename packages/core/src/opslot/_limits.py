"""Limits: what a bound kernel refuses at the call, because no bind could know it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import KernelUnavailable

if TYPE_CHECKING:
    import torch

    Refusal = Callable[[torch.device, torch.dtype], str]


def limited(kernel: Callable[..., Any], names: Sequence[str], refusal: "Refusal") -> Callable[..., Any]:
    """The kernel, whose parameters are `names`, refusing tensors that `refusal` gives a reason against.

    A model may be moved or cast after bind, and autocast casts between modules. The first floating tensor stands for
    the call: it carries the activations, beside which weights, statistics or tables may rightly have another dtype.
    """
    import torch

    known: dict[Any, str] = {}

    # To torch.compile the verdict is a constant, so it costs neither a graph break nor a guard beyond the tensor's own.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it without annotations
    def verdict(device: torch.device, dtype: torch.dtype) -> str:
        if (device, dtype) not in known:
            known[device, dtype] = refusal(device, dtype)
        return known[device, dtype]

    def first_floating(values: Iterable[Any]) -> torch.Tensor | None:
        for value in values:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, torch.Tensor) and item.dtype.is_floating_point:
                    return item
        return None

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        tensor = first_floating(args)
        if tensor is None:
            tensor = first_floating([kwargs[name] for name in names if name in kwargs])
        if tensor is not None:
            refused = verdict(tensor.device, tensor.dtype)
            if refused:
                raise KernelUnavailable(refused)
        return kernel(*args, **kwargs)

    return checked


def forward_only(kernel: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """The kernel, refusing to run where a gradient would be lost: without a backward nothing upstream would train."""
    import torch

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        items = (item for value in given for item in (value if isinstance(value, tuple | list) else (value,)))
        if torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
            raise KernelUnavailable(f"{owner} has no backward: call it under torch.no_grad(), or choose another kernel")
        return kernel(*args, **kwargs)

    return checked
