"""Distributions: those on this process's path that offer backends."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP = "opslot.backends"
CORE = "opslot"


@dataclass(frozen=True)
class Offered:
    """One entry point of one distribution. `problem` says why there is none to load, `remark` what is odd about it."""

    distribution: str
    version: str
    name: str
    entry_point: "EntryPoint | None"
    problem: str = ""
    remark: str = ""

    @property
    def is_core(self) -> bool:
        return normal(self.distribution) == CORE


def normal(name: str) -> str:
    """A name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def offered(distributions: Iterable["Distribution"]) -> list[Offered]:
    """What the distributions offer, by name, whatever the order in which their metadata is found.

    Of one distribution one folder of metadata counts, as one copy of its modules is imported: that of the first path
    that has it, and there the newest of those that are whole. The others are named in the remark.
    """
    folders: dict[str, list[Folder]] = {}
    for distribution in distributions:
        # Bytes that are no text are taken as Latin-1, only to see whether it concerns us: reading it will fail again.
        if GROUP in text_of(distribution, "entry_points.txt"):
            folder = Folder(distribution)
            copies = folders.setdefault(normal(folder.name), [])
            if folder.path not in [copy.path for copy in copies]:
                copies.append(folder)
    return [item for name in sorted(folders) for item in _of_one(folders[name])]


class Folder:
    """The metadata of one distribution. An interrupted installation leaves a folder without a METADATA file."""

    def __init__(self, distribution: "Distribution") -> None:
        self.distribution = distribution
        # importlib.metadata has no public name for the folder; finders other than the path's have no folder at all.
        self.path = os.path.realpath(str(getattr(distribution, "_path", distribution.locate_file(""))))
        self.parent = os.path.dirname(self.path)
        stem, _, rest = os.path.splitext(os.path.basename(self.path))[0].partition("-")
        try:
            metadata = distribution.metadata
            given = {field: metadata[field] for field in ("Name", "Version") if field in metadata}
        except UnicodeDecodeError:
            given = {}
        self.whole = "Name" in given
        self.name = given.get("Name", stem or "?")
        self.version = given.get("Version", rest)


def _of_one(copies: list[Folder]) -> list[Offered]:
    used, *others = copies
    if others:
        from packaging.version import InvalidVersion, Version

        def age(copy: Folder) -> tuple[bool, Version]:
            try:
                return copy.whole, Version(copy.version)
            except InvalidVersion:
                return False, Version("0")

        used = max((copy for copy in copies if copy.parent == used.parent), key=age)
    remark = ""
    odd = [c.path for c in copies if c is not used and not _of_one_project(used, c) and not _of_one_project(c, used)]
    if odd:
        rest = ", ".join(sorted(odd))
        remark = (
            f"the metadata of {used.name} is there more than once: {used.path} is used, {rest} is not; "
            f"reinstall it, and delete what then remains of others"
        )
    try:
        points = [point for point in used.distribution.entry_points if point.group == GROUP]
    except (TypeError, ValueError) as error:  # a line that is no `name = value`, bytes that are no UTF-8
        problem = f"{os.path.join(used.path, 'entry_points.txt')} cannot be read ({error}): reinstall {used.name}"
        return [Offered(used.name, used.version, used.name, None, problem, remark)]
    distinct = {(point.name, point.value): point for point in points}
    return [Offered(used.name, used.version, name, point, "", remark) for (name, _), point in sorted(distinct.items())]


def _of_one_project(installed: Folder, sources: Folder) -> bool:
    """Whether both are metadata of one editable installation: setuptools leaves an egg-info in the project too."""
    project = project_of(installed.distribution)
    return bool(project) and sources.path.endswith(".egg-info") and sources.path.startswith(project + os.sep)


def text_of(distribution: "Distribution", file: str) -> str:
    """A file of the metadata, empty where there is none. Bytes that are no UTF-8 are read as Latin-1."""
    try:
        return distribution.read_text(file) or ""
    except UnicodeDecodeError as error:
        return error.object.decode("latin-1")


def project_of(distribution: "Distribution") -> str:
    """The folder of the sources of an editable installation, as PEP 610 records it, or an empty string."""
    import json
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(text_of(distribution, "direct_url.json") or "{}")
        url = urlsplit(origin["url"]) if origin.get("dir_info", {}).get("editable") else None
    except (AttributeError, KeyError, TypeError, ValueError):  # another tool wrote it
        return ""
    return os.path.realpath(url2pathname(url.path)) if url is not None and url.scheme == "file" else ""
