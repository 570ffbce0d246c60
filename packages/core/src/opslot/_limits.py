"""Limits: what a bound kernel refuses at the call, because no bind could know it."""

import functools
import warnings
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

    # Nested, since a pair of them as one key would compare devices, which costs more than all else here.
    known: dict[torch.dtype, dict[torch.device, str]] = {}

    # To torch.compile the verdict is a constant, so it costs neither a graph break nor a guard beyond the tensor's own.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it without annotations
    def verdict(device: torch.device, dtype: torch.dtype) -> str:
        of_dtype = known.setdefault(dtype, {})
        reason = of_dtype.get(device)
        if reason is None:
            reason = of_dtype[device] = refusal(device, dtype)
        return reason

    def first_floating(values: Iterable[Any]) -> torch.Tensor | None:
        for value in values:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, torch.Tensor) and item.dtype.is_floating_point:
                    return item
        return None

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
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

    def requires_grad(values: Iterable[Any]) -> bool:
        items = (item for value in values for item in (value if isinstance(value, tuple | list) else (value,)))
        return any(isinstance(item, torch.Tensor) and item.requires_grad for item in items)

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and requires_grad((*args, *kwargs.values())):
            raise KernelUnavailable(f"{owner} has no backward: call it under torch.no_grad(), or choose another kernel")
        return kernel(*args, **kwargs)

    return checked


def nondeterministic(kernel: Callable[..., Any], owner: str, op: str) -> Callable[..., Any]:
    """The kernel, doing under `torch.use_deterministic_algorithms` what torch's own operations do: raise, or warn."""
    import torch

    # A constant to torch.compile, which compiles anew when the mode changes; so it warns once a graph.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # as above
    def verdict() -> str:
        reason = (
            f"{owner} does not claim to be deterministic, and torch.use_deterministic_algorithms(True) is set. Choose "
            f"{op}: eager, or a kernel that claims it (`opslot explain {op}` shows them); with warn_only=True it runs"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            return reason
        warnings.warn(reason, stacklevel=3)
        return ""

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled() and (refused := verdict()):
            raise KernelUnavailable(refused)
        return kernel(*args, **kwargs)

    return checked
