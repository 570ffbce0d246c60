"""Checkpoints: what one holds, compared with what a model needs, so that none is loaded in part."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opslot import BindError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

# A tensor of one expert in the layout of the hub: "model.layers.0.mlp.experts.7.up_proj.weight".
_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.*)")


def require_every_expert(path: str, origin: Mapping[str, Any]) -> None:
    """Raise `BindError` when a tensor of an expert is missing among its siblings, by name.

    transformers stacks what it finds in the order of the numbers: where all tensors of expert 3 are missing and there
    is one expert more at the end, the others would move up without a word. `origin`: where the hub's files lie.
    """
    missing = _missing_experts(_tensors(path, origin))
    if missing:
        raise BindError(
            f"the checkpoint {path} lacks tensors of experts that others of it have, and the rest would be stacked in "
            f"their place: {some(missing)}"
        )


def require_whole(path: str, model: str, info: Mapping[str, Any]) -> None:
    """Raise `BindError` unless loading filled the model and used up the checkpoint. `info` is transformers' report."""
    problems = {kind: info[f"{kind}_keys"] for kind in ("missing", "unexpected") if info.get(f"{kind}_keys")}
    if info.get("mismatched_keys"):
        problems["mismatched"] = [
            f"{name} ({tuple(found)} in the checkpoint, {tuple(wanted)} in the model)"
            for name, found, wanted in info["mismatched_keys"]
        ]
    if problems:
        detail = "; ".join(f"{kind} keys: {some(names)}" for kind, names in problems.items())
        raise BindError(
            f"the checkpoint {path} is not one of {model}: what is missing would train from random values, what is "
            f"unexpected would be lost. {detail}. If that is meant, load it with transformers and call "
            "opslot_models.adopt"
        )


def some(names: Iterable[Any]) -> str:
    """A few names and how many more there are; a layout that is not known has every name wrong."""
    ordered = sorted(map(str, names))
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def _tensors(path: str, origin: Mapping[str, Any]) -> list[str]:
    """The names in the safetensors files of a checkpoint; none where it has no such file, which loading notices."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    whole = cached_file(path, SAFE_WEIGHTS_NAME, **quiet, **origin)
    if whole is not None:
        return _header(Path(whole))
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **quiet, **origin)
    return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]) if index is not None else []


def _header(file: Path) -> list[str]:
    """The names in one safetensors file: its first eight bytes are the length of the JSON that follows them."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > file.stat().st_size:
            return []  # not such a file, which loading says
        return [name for name in json.loads(content.read(length)) if name != "__metadata__"]


def _missing_experts(tensors: Iterable[str]) -> list[str]:
    found: dict[str, dict[str, set[int]]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            found.setdefault(match["experts"], {}).setdefault(match["rest"], set()).add(int(match["number"]))
    return [
        f"{experts}.{number}.{rest}"
        for experts, parts in found.items()
        for rest, numbers in parts.items()
        for number in range(max(max(of_part) for of_part in parts.values()) + 1)
        if number not in numbers
    ]
