"""A release of transformers as files, from the package index: its wheel, unpacked and never imported."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from opslot_patchgen._errors import FetchError

_VERSION = re.compile(r"\d+(\.\w+)+")
_TIMEOUT = 300


def fetch(version: str, folder: Path) -> Path:
    """Unpack the wheel of transformers `version` into `folder` with uv, or else with pip, and give the folder.

    Raises `FetchError` when neither can: there is no such tool, no such release, or no index that answers.
    """
    if not _VERSION.fullmatch(version):
        raise FetchError(f"{version!r} is neither a folder nor a version of transformers such as 5.24.0")
    wanted = f"transformers=={version}"
    # Only wheels: to build a source distribution would run its code.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    commands = []
    if (uv := shutil.which("uv")) is not None:
        commands.append([uv, "pip", "install", *options, "--python", sys.executable, "--target", ".", wanted])
    commands.append([sys.executable, "-m", "pip", "download", *options, "--dest", ".", wanted])
    reasons = []
    for command in commands:
        reason = _run(command, folder)
        if reason is None:
            for wheel in folder.glob("transformers-*.whl"):
                zipfile.ZipFile(wheel).extractall(folder)
            return folder
        reasons.append(reason)
    tried = "\n".join(reasons)
    raise FetchError(
        f"cannot fetch {wanted}:\n{tried}\n"
        "Give a folder that holds a transformers package instead, or an index: UV_INDEX_URL to uv, PIP_INDEX_URL to pip"
    )


def _run(command: list[str], folder: Path) -> str | None:
    """Why a command failed; its own words say whether the release or the index is missing.

    It runs in `folder`, where no project constrains which transformers there may be.
    """
    tool = "pip" if "-m" in command else "uv"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, cwd=folder)
    except subprocess.TimeoutExpired:
        return f"{tool}: no answer within {_TIMEOUT} s"
    return None if done.returncode == 0 else f"{tool}: {done.stderr.strip()}"
