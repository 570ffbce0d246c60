"""Text to train on, as token ids."""

from pathlib import Path
from typing import Any

import torch
from opslot import OpslotError
from transformers import AutoConfig, AutoTokenizer


def read_text(path: str | None) -> str:
    """The text of a file, or the English prose that ships with Python: its language reference, 700 kB."""
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OpslotError(f"--data {path}: {error}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def tokenizer_of(model: str) -> Any | None:
    """The tokenizer of a checkpoint; None for a folder without one whose vocabulary is the 256 bytes."""
    folder = Path(model)
    if not folder.is_dir() or list(folder.glob("tokenizer*")):
        return AutoTokenizer.from_pretrained(model)
    vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    if vocabulary != 256:
        raise OpslotError(
            f"--model {model}: no tokenizer in this folder, and {vocabulary} tokens are not the 256 bytes"
        )
    return None


def encode(text: str, tokenizer: Any | None) -> torch.Tensor:
    """Token ids [T], int64. Without a tokenizer each byte of the UTF-8 text is one token of 256."""
    if not text:
        raise OpslotError("the text is empty")
    if tokenizer is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of `length` tokens, each both the input and, shifted by the model, the labels."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        if len(tokens) < length:
            raise OpslotError(f"the text has {len(tokens)} tokens, fewer than one sequence of {length}")
        self._windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}
