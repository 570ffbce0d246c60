"""The generated model families, for the installed version of transformers."""

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from opslot import OpslotError

from ._generation import provide
from ._installed import installed
from ._sets import known_families, serving

# What the names of generated modules begin with.
GENERATED = ("opslot_models.generated.", "opslot_models.cached.")


def families() -> tuple[str, ...]:
    """The families ("qwen3_moe") that are generated for the installed transformers, by the name of upstream's module.

    A set that is shipped serves a family whose maths is that of the installed file. Any other is generated from the
    installed file by opslot-patchgen, where that is installed and the maths of what it patches is known. One for which
    neither holds is left out; building or adopting a model of it says why.
    """
    return tuple(family for family in known_families() if not isinstance(_served(family), _Refusal))


def generated_module(model_type: str) -> ModuleType:
    """The generated modeling module of a model type. Raises `OpslotError` for one that has none, saying why."""
    if model_type not in known_families():
        there = ", ".join(families()) or "none for the installed transformers"
        raise OpslotError(f"no generated model for model type {model_type!r}; there are: {there}")
    served = _served(model_type)
    if isinstance(served, _Refusal):
        raise OpslotError(served.reason)
    return importlib.import_module(served)


def upstream_module(model_type: str) -> str:
    return f"transformers.models.{model_type}.modeling_{model_type}"


def twins(model_type: str) -> dict[type, type]:
    """Upstream's class -> the generated class of the same name, for every module class of a family.

    A name that something has put another class under is left out: that class is not upstream's.
    """
    import torch

    ours = generated_module(model_type)
    upstream = importlib.import_module(upstream_module(model_type))
    pairs = {}
    for name, cls in _own(ours).items():
        theirs = getattr(upstream, name)
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and theirs.__module__ == upstream.__name__:
            pairs[theirs] = cls
    return pairs


def patches(upstream: ModuleType, ours: ModuleType) -> list[str]:
    """What upstream's module defines, or its classes do, or the module imports, that something has replaced since.

    A class or function counts as replaced when its code is from another file than upstream's own.
    """
    patched = []
    own = _own(ours)
    for name, value in vars(ours).items():
        theirs = getattr(upstream, name, None)
        if name not in own:
            imported = isinstance(value, type | FunctionType | ModuleType) and hasattr(upstream, name)
            patched += [name] if imported and theirs is not value else []
        elif getattr(theirs, "__module__", None) != upstream.__name__:
            patched.append(name)
        elif not isinstance(value, type):
            patched += [] if _file(theirs) == upstream.__file__ else [name]
        else:
            methods = ((method, vars(value).get(method), code) for method, code in vars(theirs).items())
            patched += [f"{name}.{method}" for method, one, code in methods if not _is_twin(one, code, upstream, ours)]
    return patched


def _is_twin(one: Any, theirs: Any, upstream: ModuleType, ours: ModuleType) -> bool:
    """Whether a member of our class is what its counterpart is to upstream's; what is not code is not judged."""
    file = _file(one)
    return _file(theirs) == (upstream.__file__ if file == ours.__file__ else file)


def _own(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that a module defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    }


def _file(member: Any) -> str | None:
    """Where the code of a function, method or property is from; None for what is not code."""
    code = getattr(inspect.unwrap(getattr(member, "fget", member)), "__code__", None)
    return code.co_filename if code is not None else None


@dataclass(frozen=True)
class _Refusal:
    reason: str


@cache
def _served(family: str) -> str | _Refusal:
    """The name of the module that serves a family, or why there is none. Judged once per process."""
    try:
        one = serving(family, installed().modeling(family))
        if one is not None:
            return one.module(family)
        provide(family)
    except OpslotError as error:
        return _Refusal(str(error))
    return f"{__package__}.cached.modeling_{family}"
