"""Diagnosis of a backend that failed to import: what its installation has to do with it, in words for its user."""

import os
import sys
from importlib.metadata import Distribution, EntryPoint, distributions, version
from types import ModuleType

from ._distributions import CORE, Folder, normal, project_of, text_of


def diagnose(entry_point: EntryPoint, error: BaseException) -> str:
    """Why `entry_point` cannot be loaded and what helps, or nothing where the error itself says it best."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    module = entry_point.module
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        root = sys.modules.get(module.partition(".")[0])
        hider = getattr(root, "__file__", None)
        if isinstance(root, ModuleType) and hider is not None and _elsewhere(missing, os.path.dirname(hider)):
            return (
                f"module {missing!r} is installed, but {hider} of {_owner(hider)} makes {root.__name__!r} a regular "
                f"package, which hides what other distributions put there; delete that file, and report it to its owner"
            )
        return (
            f"its metadata names module {module!r}, but there is no {missing!r}: the installation is stale or "
            "incomplete; reinstall the distribution, or delete what is left of it"
        )
    return _too_new_or_too_old(entry_point.dist)


def _elsewhere(module: str, hiding: str) -> bool:
    """Whether a path of this process has the module outside of the package that hides it."""
    places = (os.path.join(path, *module.split(".")) for path in sys.path)
    return any(
        os.path.dirname(place) != hiding and (os.path.isdir(place) or os.path.isfile(f"{place}.py")) for place in places
    )


def _too_new_or_too_old(distribution: Distribution | None) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    here = version(CORE)
    for text in (distribution.requires if distribution else None) or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if normal(wanted.name) == CORE and not wanted.specifier.contains(here, prereleases=True):
            return (
                f"it requires {text}, and this is opslot {here}: "
                f"pip install '{text}', or a version of the backend for this opslot"
            )
    return ""


def _owner(file: str) -> str:
    """The distribution that brought `file`: by its record, or as the project of an editable installation."""
    real = os.path.realpath(file)
    editable: dict[str, str] = {}
    for distribution in distributions():
        folder = Folder(distribution)
        title = f"{folder.name} {folder.version}"
        top = os.path.realpath(str(distribution.locate_file("")))
        relative = os.path.relpath(real, top).replace(os.sep, "/")
        if f"\n{relative}," in f"\n{text_of(distribution, 'RECORD')}":
            return title
        project = project_of(distribution)
        if project and real.startswith(project + os.sep):
            editable[project] = f"{title} (editable in {project})"
    return editable[max(editable, key=len)] if editable else "no installed distribution"
