"""Targets: a function, or the lazy string that names one."""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, TracebackType
from typing import Any

from ._errors import SpecError, TargetError, nearest

Target = str | Callable[..., Any]


def check_target(target: Target, owner: str) -> None:
    """Refuse what can never be a target, without importing anything."""
    if callable(target):
        return
    module, colon, attr = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (colon and attr.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise SpecError(
            f"{owner}: target {target!r} is neither a callable nor a string of the form 'package.module:name'"
        )


def load_target(target: Target, owner: str) -> Callable[..., Any]:
    """The function behind `target`; `owner` says in errors what it was wanted for.

    Raises `TargetError` when the module or the attribute is missing. Whatever else a vendor's import raises passes
    through with a note that names the owner.
    """
    if not isinstance(target, str):
        return target
    module_name, _, attr = target.partition(":")
    with _Note(f"while loading {owner} from {target!r}"):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise TargetError(f"{owner}: target {target!r} cannot be imported: {error}") from error
    if not hasattr(module, attr):
        raise TargetError(f"{owner}: {module_name} has no attribute {attr!r}{nearest(attr, vars(module))}")
    function: Callable[..., Any] = getattr(module, attr)
    return function


def check_kernel(kernel: Any, contract: inspect.Signature, owner: str) -> None:
    """Raise `TargetError` unless `kernel` can be called in every way that its contract allows.

    Names, order and defaults must agree, since a default that differs is another function for the caller who omits it.
    """
    if isinstance(kernel, type):
        hint = ": name its `apply`" if hasattr(kernel, "apply") else ": name a function or an instance"
        raise TargetError(f"{owner}: {kernel.__qualname__} is a class, and calling it would construct an object{hint}")
    if not callable(kernel):
        raise TargetError(f"{owner}: {type(kernel).__name__} object is not callable")
    if inspect.iscoroutinefunction(kernel) or inspect.isgeneratorfunction(kernel):
        raise TargetError(f"{owner}: {kernel.__qualname__} is a coroutine or generator, whose call computes nothing")
    try:
        offered = inspect.signature(kernel)
    except ValueError as error:
        raise TargetError(f"{owner}: the signature of {kernel!r} is not readable; wrap it in a function") from error
    problem = _difference(offered, contract)
    if problem:
        raise TargetError(
            f"{owner}: {problem}\n  kernel:   {plain_signature(offered)}\n  contract: {plain_signature(contract)}"
        )


def _difference(offered: inspect.Signature, contract: inspect.Signature) -> str:
    kinds = {p.kind for p in offered.parameters.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    takes_any_position = inspect.Parameter.VAR_POSITIONAL in kinds
    positional = [p for p in offered.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for position, wanted in enumerate(contract.parameters.values()):
        mine = offered.parameters.get(wanted.name)
        if mine is None and wanted.kind is not wanted.KEYWORD_ONLY and takes_any_position and takes_any_name:
            continue
        if mine is None and wanted.kind is wanted.KEYWORD_ONLY and takes_any_name:
            continue
        if mine is None:
            return f"it does not take {wanted.name!r}"
        if mine.kind is mine.POSITIONAL_ONLY:
            return f"{wanted.name!r} must be accepted by keyword too"
        if wanted.kind is wanted.POSITIONAL_OR_KEYWORD and positional[position : position + 1] != [mine]:
            return f"{wanted.name!r} must be its positional argument number {position + 1}"
        if wanted.default is not wanted.empty and mine.default != wanted.default:
            return f"the default of {wanted.name!r} must be {wanted.default!r}"
    for name, mine in offered.parameters.items():
        variadic = mine.kind in (mine.VAR_KEYWORD, mine.VAR_POSITIONAL)
        if name not in contract.parameters and mine.default is mine.empty and not variadic:
            return f"it requires {name!r}, which no caller passes"
    return ""


def plain_signature(signature: inspect.Signature) -> str:
    """The signature without annotations, as a reader wants it."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def source_name(target: Target) -> str:
    """ "module:qualname" of a function, or of the type of a callable object."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"


def code_of(value: Any) -> str:
    """A text that differs when a function computes something else: its code with all constants, defaults, captured
    values and partial arguments. Objects without a stable text count by their type alone."""
    if isinstance(value, functools.partial):
        return code_of((value.func, value.args, tuple(sorted(value.keywords.items()))))
    if isinstance(value, tuple | frozenset):
        return f"({','.join(sorted(map(code_of, value)) if isinstance(value, frozenset) else map(code_of, value))})"
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()}{code_of(value.co_names)}{code_of(value.co_consts)}"
    if isinstance(value, FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        defaults = (value.__defaults__ or (), tuple(sorted((value.__kwdefaults__ or {}).items())))
        return code_of((value.__code__, *defaults, cells))
    plain = value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes)
    return repr(value) if plain else source_name(type(value))


class _Note:
    """Adds a note to whatever passes through; unlike an `except` it hides and changes nothing."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self._text)
