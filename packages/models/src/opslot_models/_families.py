"""The generated model families, for the installed version of transformers."""

import importlib
import importlib.metadata
import inspect
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

from opslot import OpslotError


@cache
def families() -> tuple[str, ...]:
    """The model types ("qwen3_moe") that are generated for the installed transformers.

    Raises `OpslotError` when this version of transformers has no generated set: upstream's maths may have changed.
    """
    names = (module.name for module in pkgutil.iter_modules(_generated_set().__path__))
    return tuple(sorted(name.removeprefix("modeling_") for name in names))


def generated_module(model_type: str) -> ModuleType:
    """The generated modeling module of a model type. Raises `OpslotError` for one that has none."""
    if model_type not in families():
        raise OpslotError(f"no generated model for model type {model_type!r}; there are: {', '.join(families())}")
    return importlib.import_module(f"{_generated_set().__name__}.modeling_{model_type}")


def twins(model_type: str) -> dict[type, type]:
    """Upstream's class -> the generated class of the same name, for every module class of a family.

    A name that something has put another class under is left out: that class is not upstream's.
    """
    import torch

    ours = generated_module(model_type)
    upstream = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    pairs = {}
    for name, cls in _own(ours).items():
        theirs = getattr(upstream, name)
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and theirs.__module__ == upstream.__name__:
            pairs[theirs] = cls
    return pairs


def patches(upstream: ModuleType, ours: ModuleType) -> list[str]:
    """The classes, functions and forwards of upstream's module that no longer come from upstream's file."""
    patched = []
    for name, value in _own(ours).items():
        theirs = getattr(upstream, name, None)
        if getattr(theirs, "__module__", None) != upstream.__name__:
            patched.append(name)
        elif not isinstance(value, type):
            patched += [] if _file(theirs) == upstream.__file__ else [name]
        elif "forward" in vars(value) and _file(vars(theirs).get("forward")) != upstream.__file__:
            patched.append(f"{name}.forward")
    return patched


def _own(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that a module defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    }


def _file(function: Any) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return code.co_filename if code is not None else None


def _generated_set() -> ModuleType:
    from . import generated

    installed = importlib.metadata.version("transformers")
    wanted = "v" + "_".join(installed.split(".")[:2])
    available = [module.name for module in pkgutil.iter_modules(generated.__path__)]
    if wanted not in available:
        versions = ", ".join(name[1:].replace("_", ".") for name in sorted(available))
        raise OpslotError(
            f"transformers {installed} is installed, but the models here are generated from transformers {versions}; "
            f"install one of these, since the maths of another version may differ"
        )
    return importlib.import_module(f"{generated.__name__}.{wanted}")
