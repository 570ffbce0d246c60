"""The generated model families, for the installed version of transformers."""

import importlib
import importlib.metadata
import inspect
import pkgutil
from functools import cache
from types import ModuleType

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


@cache
def twins(model_type: str) -> dict[type, type]:
    """Upstream's class -> the generated class of the same name, for every module class of a family."""
    import torch

    ours = generated_module(model_type)
    upstream = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    pairs = {}
    for name, cls in inspect.getmembers(ours, inspect.isclass):
        if cls.__module__ == ours.__name__ and issubclass(cls, torch.nn.Module):
            pairs[getattr(upstream, name)] = cls
    return pairs


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
