"""Transformers models whose operations can be bound to kernels: build one, or adopt one that exists.

model = build_foundation_model("path/to/checkpoint", ops_implementation={"rms_norm": "torch"})
adopt(AutoModelForCausalLM.from_pretrained("path/to/checkpoint"), "auto")  # and unadopt(model) makes it stock again
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._adopt import Adoption as Adoption
    from ._adopt import adopt as adopt
    from ._adopt import unadopt as unadopt
    from ._build import build_foundation_model as build_foundation_model
    from ._families import families as families
    from ._left import Left as Left

# Loaded on first use (PEP 562): the specs in opslot_models.patches are read where no torch is installed.
_HOME = {
    "Adoption": "_adopt",
    "Left": "_left",
    "adopt": "_adopt",
    "build_foundation_model": "_build",
    "families": "_families",
    "unadopt": "_adopt",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'opslot_models' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"opslot_models.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
