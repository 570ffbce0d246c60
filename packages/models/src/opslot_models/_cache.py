"""The user's cache of generated modules: folders that nobody else can write to, entries that are read when whole."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opslot import OpslotError

VARIABLE = "OPSLOT_CACHE"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """A module in the cache: where it lies, and its content as it was verified."""

    path: Path
    content: bytes


def read(family: str, key: str) -> Entry | None:
    """The module of a family under a key, or None where there is none or it is not what was written.

    Raises `OpslotError` for a cache that cannot be used.
    """
    path = _folder(family) / key / f"modeling_{family}.py"
    with _usable(path):
        if not path.parent.is_dir():
            return None
        _require_private(path.parent)
        try:
            content, manifest = path.read_bytes(), (path.parent / _MANIFEST).read_bytes()
        except FileNotFoundError:
            return None
    return Entry(path, content) if manifest == _manifest(key, content) else None


def write(family: str, key: str, content: bytes) -> Entry:
    """Keep a module under a key: no other process ever sees half of it. Raises `OpslotError` where that fails."""
    folder = _folder(family)
    entry = folder / key
    files = {f"modeling_{family}.py": content, _MANIFEST: _manifest(key, content)}
    with _usable(entry):
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        try:
            for name, data in files.items():
                (temporary / name).write_bytes(data)
            try:
                temporary.rename(entry)
            except OSError:
                # An entry is there: another process was faster, or it is broken. Its files are replaced one by one,
                # so that none is missing at any time for those who read; equal keys have equal content.
                for name in files:
                    (temporary / name).replace(entry / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Entry(entry / f"modeling_{family}.py", content)


def _manifest(key: str, content: bytes) -> bytes:
    """What lies beside a module: equal to the byte, or the entry is not what was written."""
    return json.dumps({"key": key, "sha256": hashlib.sha256(content).hexdigest()}, indent=1).encode() + b"\n"


def _folder(family: str) -> Path:
    """The folder of a family's entries, with every folder from the cache's own on down made and judged.

    Entries are not right below `models`: transformers takes the folder of a file in `models` for a model's name.
    """
    root = _root()
    folders = [root, root / "models", root / "models" / family]
    with _usable(root):
        for folder in folders:
            folder.mkdir(mode=0o700, parents=folder is root, exist_ok=True)
            _require_private(folder)
    return folders[-1]


def _root() -> Path:
    if chosen := os.environ.get(VARIABLE):
        if not os.path.isabs(chosen):
            raise OpslotError(f"environment variable {VARIABLE}={chosen!r}: write an absolute path")
        return Path(chosen)
    # A relative one is to be ignored, says the XDG base directory specification.
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return Path(base) / "opslot"
    raise OpslotError(f"this user has no home folder, where the cache would be: set {VARIABLE} to an absolute path")


def _require_private(folder: Path) -> None:
    """What others can write would run as code of this user."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OpslotError(
            f"the cache folder {folder} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}: "
            f"modules from it would run as code of yours. Set {VARIABLE} to a folder of your own"
        )
    if status.st_mode & 0o022:
        raise OpslotError(
            f"the cache folder {folder} is writable by others (mode {status.st_mode & 0o777:o}): what they write there "
            f"would run as code of yours. chmod go-w it, or set {VARIABLE} to another folder"
        )


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OpslotError(
            f"the cache {path} cannot be used: {error}. Set {VARIABLE} to a folder that you can write to"
        ) from error
