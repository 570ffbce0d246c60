"""The installed transformers, found and read as files: importing it takes seconds."""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opslot import OpslotError

_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Installed:
    """`folder` is that of the package, `version` what the package says of itself."""

    folder: Path
    version: str

    def modeling(self, family: str) -> bytes:
        """Upstream's modeling file of a family. Raises `OpslotError` where this version has none."""
        path = self.folder / "models" / family / f"modeling_{family}.py"
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise OpslotError(f"transformers {self.version} is installed, and it has no {path}") from error


@cache
def installed() -> Installed:
    """Raises `OpslotError` when there is no transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise OpslotError("transformers is not installed: pip install opslot-models")
    found = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
    return Installed(Path(spec.origin).parent, found.group(1) if found else "of unknown version")
