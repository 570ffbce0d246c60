from collections.abc import Callable
from pathlib import Path

import pytest
from opslot_patchgen import FetchError, Guard, ModelSpec, build, fetch, read_source

MODULE = "transformers.models.tiny.modeling_tiny"
FRAME = """\
# Copyright upstream.
import torch
from torch import nn

from ...activations import ACT2FN
from ...modeling_utils import PreTrainedModel
from .configuration_tiny import TinyConfig


class TinyPreTrainedModel(PreTrainedModel):
    config: TinyConfig


"""


@pytest.fixture
def upstream(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Write the text of modeling_tiny.py into a tree of its own and give the tree's root."""

    def write(text: str | bytes, version: str = "5.24.0") -> Path:
        root = tmp_path / "upstream"
        path = root / "transformers/models/tiny/modeling_tiny.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        (root / "transformers/__init__.py").write_text(f'__version__ = "{version}"\n')
        return root

    return write


@pytest.fixture
def generate(upstream: Callable[[str | bytes], Path]) -> Callable[..., str]:
    """Splice guards into a class that stands below the usual imports; gives the generated text below its header."""

    def run(text: str, *guards: Guard, frame: str = FRAME) -> str:
        spec = ModelSpec(family="tiny", source=MODULE, guards=guards)
        built = build(spec, read_source(MODULE, upstream(frame + text)), "acme.patches")
        return built.text.partition("\n\n")[2]

    return run


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a release of transformers, fetched once. Skips where no index answers."""
    fetched: dict[str, Path | FetchError] = {}

    def root(version: str) -> Path:
        if version not in fetched:
            try:
                fetched[version] = fetch(version, tmp_path_factory.mktemp(f"transformers-{version}"))
            except FetchError as error:
                fetched[version] = error
        found = fetched[version]
        if isinstance(found, FetchError):
            pytest.skip(str(found))
        return found

    return root
