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
    folders: dict[str, list[_Folder]] = {}
    for distribution in distributions:
        if GROUP in _entry_points_text(distribution):
            folder = _Folder(distribution)
            copies = folders.setdefault(normal(folder.name), [])
            if folder.path not in [copy.path for copy in copies]:
                copies.append(folder)
    return [item for name in sorted(folders) for item in _of_one(folders[name])]


class _Folder:
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


def _of_one(copies: list[_Folder]) -> list[Offered]:
    used, *others = copies
    if others:
        from packaging.version import InvalidVersion, Version

        def age(copy: _Folder) -> tuple[bool, Version]:
            try:
                return copy.whole, Version(copy.version)
            except InvalidVersion:
                return False, Version("0")

        used = max((copy for copy in copies if copy.parent == used.parent), key=age)
    remark = ""
    if others:
        rest = ", ".join(sorted(copy.path for copy in copies if copy is not used))
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


def _entry_points_text(distribution: "Distribution") -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        return error.object.decode("latin-1")  # only to see whether it concerns us; reading it will fail again
