"""docs/adding-a-model.md, done: its spec makes a model that is upstream's until a kernel is bound, and right after."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import opslot
import pytest
import torch
from opslot_patchgen import cli
from transformers import GraniteConfig, GraniteForCausalLM

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
PATCHES = ROOT / "packages/models/src/opslot_models/patches"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The module that the page's spec generates, in a package of specs of its own."""
    folder = tmp_path_factory.mktemp("walk")
    specs = folder / "walk_models/patches"
    specs.mkdir(parents=True)
    for path in (folder / "walk_models/__init__.py", specs / "__init__.py"):
        path.touch()
    shutil.copyfile(PATCHES / "_decoder.py", specs / "_decoder.py")
    (spec,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "SPEC = " in block)
    assert len(spec.splitlines()) < 40
    (specs / "granite.py").write_text(spec, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        assert cli.main(["generate", "walk_models.patches"]) == 0
        (made,) = (folder / "walk_models/generated").glob("*/modeling_granite.py")
        yield importlib.import_module(f"walk_models.generated.{made.parent.name}.modeling_granite")
    for name in [name for name in sys.modules if name.partition(".")[0] == "walk_models"]:
        del sys.modules[name]


def models(generated):
    config = GraniteConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=4.0,
    )
    for cls in (GraniteForCausalLM, generated.GraniteForCausalLM):
        torch.manual_seed(0)
        yield cls._from_config(config)


def test_unbound_it_is_upstream(generated):
    tokens = torch.randint(0, 96, (2, 9))
    upstream, ours = models(generated)
    expected, actual = (model(tokens, labels=tokens) for model in (upstream, ours))
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    expected.loss.backward()
    actual.loss.backward()
    for mine, theirs in zip(ours.parameters(), upstream.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_bound_every_kernel_runs_and_the_loss_is_divided(generated):
    tokens = torch.randint(0, 96, (2, 9))
    upstream, ours = models(generated)
    ops = dict.fromkeys(("rms_norm", "glu", "rotary_pos_emb"), "torch") | {"cross_entropy_loss": "chunk_loss"}
    binding = opslot.bind(ours, ops, device="cpu")
    with binding.proof() as proof:
        actual = ours(tokens, labels=tokens).loss
        actual.backward()
    assert not proof.misses()
    torch.testing.assert_close(actual, upstream(tokens, labels=tokens).loss)
