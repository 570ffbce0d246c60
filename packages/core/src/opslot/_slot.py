"""Slots: the places in a model where a kernel may run."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._errors import BindError, KernelUnavailable, OpslotError
from ._kernel import EAGER
from ._registry import PROCESS_LOCAL, Offer

if TYPE_CHECKING:
    import torch

_Class = TypeVar("_Class", bound=type)


class OpSlot:
    """A place where a kernel of `op/variant` may run. `kernel` is None: the original code below the guard runs.

    In a model it is a class attribute, and the guard reads it once:

        class Norm(nn.Module):
            rms_norm_op = OpSlot("rms_norm", "standard")

            def forward(self, x):
                kernel = self.rms_norm_op.kernel
                if kernel is not None:
                    return kernel(x, self.weight, self.eps)
                ...

    `opslot.bind(model, ...)` gives instances their own bound slot, which shadows the class attribute; the class and
    other instances stay as they are. A slot used alone, outside a class, is bound with `slot.bind(name)`.

    `activation` names the module's attribute that holds its activation function; a kernel is refused when that is not
    the activation of the contract. `check(module)` returns why no kernel may replace the code of this module, or None.
    """

    def __init__(
        self,
        op: str,
        variant: str = "standard",
        *,
        activation: str | None = None,
        check: Callable[[Any], str | None] | None = None,
    ) -> None:
        self.op = op
        self.variant = variant
        self.activation = activation
        self.check = check
        self.kernel: Callable[..., Any] | None = None
        self.offer: Offer | None = None
        self._declared_in = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._declared_in = f"{owner.__qualname__}.{name}"

    @property
    def use_non_eager_impl(self) -> bool:
        return self.kernel is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kernel is None:
            raise BindError(f"{self!r} has no kernel to call: bind one, or guard the call with `kernel is not None`")
        return self.kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"OpSlot({self.op}/{self.variant} -> {self.offer.spec.name if self.offer else EAGER})"

    def bind(self, name: str, *, device: Any = None) -> None:
        """Bind a slot that is used alone. `device`: as for `opslot.bind`. Raises as `Registry.resolve` does."""
        from ._discovery import registry

        if self._declared_in:
            raise BindError(
                f"{self!r} belongs to {self._declared_in}, where modules share it; bind the model: "
                "opslot.bind(model, ...)"
            )
        known = registry()
        choice = known.choose(
            self.op, self.variant, name, known.current_device() if device is None else known.describe(device)
        )
        self.kernel, self.offer = (None, None) if choice.offer is None else (known.load(choice.offer), choice.offer)

    def bound_to(self, kernel: Callable[..., Any] | None, offer: Offer | None) -> "OpSlot":
        """A slot like this one that holds `kernel`; `opslot.bind` writes it into instances."""
        other = OpSlot(self.op, self.variant, activation=self.activation, check=self.check)
        # A proof's counting kernel is for the module that holds it; a copy gets the kernel itself.
        other.kernel = getattr(kernel, "proves", kernel) if self.kernel is kernel else kernel
        other.offer, other._declared_in = offer, self._declared_in or "a model"
        return other

    def weight(self, linear: "torch.nn.Module") -> "torch.Tensor":
        """The weight of a plain `nn.Linear`, for a kernel that takes it as a tensor.

        Reading `.weight` would skip the bias and what a LoRA adapter, a quantised layer or a hook adds, and would see
        one shard of a sharded weight. All of these raise `BindError`, at the call, so also when wrapped after bind.
        """
        problem = self.weight_obstacle(linear)
        if problem is None:
            weight: torch.Tensor = linear.weight  # type: ignore[assignment]
            return weight
        where = f"{self._declared_in}: " if self._declared_in else ""
        raise BindError(
            f"{where}{self!r} would read the weight of {type(linear).__name__}, which {problem}: what its forward adds "
            f"would be lost. Choose {self.op}: eager"
        )

    @staticmethod
    def weight_obstacle(linear: Any) -> str | None:
        """Why the weight of this layer alone is not all that its call would use, or None."""
        from torch import nn

        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            return "is not a plain nn.Linear"
        if "forward" in linear.__dict__:
            return "has a forward of its own"
        if has_hooks(linear):
            if type(linear).__name__.startswith("FSDP"):
                return "is sharded on its own and whole only in its own forward (leave it to fully_shard(model))"
            return "has hooks"
        if linear.bias is not None:
            return "has a bias"
        weight = linear.weight
        if problem := OpSlot.tensor_obstacle(weight):
            return f"has a weight {problem}"
        if weight.dim() != 2 or weight.numel() == 0:
            return f"has a weight of shape {tuple(weight.shape)}, as a sharded parameter does"
        return None

    @staticmethod
    def tensor_obstacle(weight: "torch.Tensor") -> str | None:
        """Why the memory of this weight may not hold its values, as that of a quantised or sharded one, or None."""
        from torch import Tensor, nn

        if type(weight) is not Tensor and type(weight) is not nn.Parameter:
            return f"of type {type(weight).__name__}"
        return None if weight.is_floating_point() else f"of {weight.dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpSlot":
        return self.bound_to(self.kernel, self.offer)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.offer is not None and self.offer.distribution == PROCESS_LOCAL:
            raise KernelUnavailable(
                f"{self!r} holds a process-local kernel, which no other process can find: unbind() before pickling, "
                "or publish the kernel as a backend"
            )
        selector, version = (self.offer.selector, self.offer.version) if self.offer else (EAGER, "")
        return _restore, (self.op, self.variant, self.activation, self.check, self._declared_in, selector, version)


def has_hooks(module: Any) -> bool:
    """Whether a call of this module runs more than its forward. A plain function has none."""
    forward = getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
    return bool(forward or getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None))


def _restore(
    op: str, variant: str, activation: Any, check: Any, declared_in: str, selector: str, version: str
) -> OpSlot:
    """A slot as it was pickled. Another version of its kernel runs with a warning, an absent kernel is an error."""
    slot = OpSlot(op, variant, activation=activation, check=check)
    try:
        slot.bind(selector)
    except OpslotError as error:
        raise type(error)(
            f"a slot {op}/{variant} was pickled with kernel {selector} {version}, which cannot be bound here: {error}. "
            "Install what it needs, or save the state dict, or the model after Binding.unbind(), and bind where it is "
            "loaded"
        ) from error
    if slot.offer is not None and slot.offer.version != version:
        import warnings

        warnings.warn(
            f"a slot {op}/{variant} was pickled with kernel {selector} {version} and runs {slot.offer.version} here; "
            "install that version for the same results, or call opslot.bind again to choose anew",
            stacklevel=2,
        )
    slot._declared_in = declared_in
    return slot


def guard_forward(slot: str, *attributes: str) -> Callable[[_Class], _Class]:
    """Class decorator: guard `forward` from outside the decorators below it.

    For classes whose decorators swap the body of `forward`, where a guard inside would never be reached. A bound
    kernel is called with forward's own arguments followed by these attributes of the module:

        @guard_forward("moe_experts_op", "gate_up_proj", "down_proj")
        @use_experts_implementation
        class Experts(nn.Module): ...

    A parametrised attribute, as LoRA on parameters makes it, is passed as what the parametrisation gives. One that a
    kernel would misread raises `BindError` at the call, so also when it is quantised after bind.
    """

    def decorate(cls: _Class) -> _Class:
        from torch import Tensor
        from torch.nn import Parameter

        upstream = cls.forward  # type: ignore[attr-defined]

        @functools.wraps(upstream)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = getattr(self, slot).kernel
            if kernel is None:
                return upstream(self, *args, **kwargs)
            if kwargs:
                args = inspect.signature(upstream).bind(self, *args, **kwargs).args[1:]
            for attribute in attributes:
                value = getattr(self, attribute)
                # What nearly all are, told apart without a call: this runs at each forward.
                if (type(value) is not Parameter or not value.dtype.is_floating_point) and isinstance(value, Tensor):
                    _require_plain(value, self, slot, attribute)
                args += (value,)
            return kernel(*args)

        cls.forward = forward  # type: ignore[attr-defined]
        return cls

    return decorate


def _require_plain(weight: "torch.Tensor", module: Any, slot: str, attribute: str) -> None:
    problem = OpSlot.tensor_obstacle(weight)
    if problem is not None:
        op = getattr(module, slot).op
        raise BindError(
            f"{type(module).__name__}.{slot} would read {attribute}, which is {problem}: the kernel would compute with "
            f"what is stored there. Choose {op}: eager"
        )
