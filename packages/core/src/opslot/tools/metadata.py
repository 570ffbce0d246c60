"""What installed distributions say of themselves. What is malformed says nothing, since most are foreign to opslot."""

import csv
from importlib.metadata import Distribution
from pathlib import PurePosixPath

from opslot._distributions import text_of

# What reading RECORD gives for rows that are none, sizes that are no numbers, and bytes that are no text.
_MALFORMED = (OSError, TypeError, ValueError, csv.Error)


def files(found: Distribution) -> list[str]:
    """What the distribution installed, relative to where; nothing where no file says so."""
    try:
        return [file.as_posix() for file in found.files or ()]
    except _MALFORMED:
        return []


def modules(found: Distribution) -> set[str]:
    """The top-level modules that the distribution brings, as far as it says."""
    declared = set(text_of(found, "top_level.txt").split())
    paths = map(PurePosixPath, () if declared else files(found))
    return declared or {path.parts[0].partition(".")[0] for path in paths if path.suffix in (".py", ".so", ".pyd")}


def malformed(found: Distribution) -> str:
    """Why METADATA or RECORD cannot be read, or an empty string."""
    try:
        _ = found.metadata, found.files
    except _MALFORMED as error:
        return f"METADATA or RECORD cannot be read: {error}"
    return ""
