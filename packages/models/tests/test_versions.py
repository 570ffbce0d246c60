"""Which generated module serves which transformers: a set that is shipped, one generated into the cache, or none."""

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from opslot import OpslotError
from opslot_models import _cache, _families, _generation, _sets, adopt, build_foundation_model, families
from opslot_models._installed import Installed, installed
from transformers import AutoModelForCausalLM

ROOT = Path(transformers.__file__).parent
# In no method that a guard stands in, nor in what such a method depends on.
UNTARGETED = ("hidden_states = self.norm(hidden_states)", "hidden_states = self.norm(hidden_states + 0)")
TARGETED = ("hidden_states = hidden_states.to(torch.float32)", "hidden_states = hidden_states.to(torch.float64)")
COMMENT = ("class LlamaModel(", "# A comment that is new.\n\n\nclass LlamaModel(")


def forget():
    """A process judges each family once, and imports a module once."""
    _families._served.cache_clear()
    for name in [name for name in sys.modules if name.startswith("opslot_models.cached.")]:
        del sys.modules[name]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def upstream(tmp_path, monkeypatch, cache) -> Callable[..., Path]:
    """Makes a tree whose llama is edited, and takes it for the installed one; the other families are as they were.

    What generated modules import is still the installed transformers.
    """

    def make(*edits: tuple[str, str], family: str = "llama") -> Path:
        folder = edited_tree(tmp_path / "site", *edits, family=family)
        for module in (_families, _generation):
            monkeypatch.setattr(module, "installed", lambda: Installed(folder, "5.99.1"))
        forget()
        return folder

    yield make
    forget()


def edited_tree(site: Path, *edits: tuple[str, str], family: str = "llama") -> Path:
    """A package that can be imported: links to the installed transformers but for one file."""
    here, there = site / "transformers", ROOT
    for part in ("models", family, None):
        here.mkdir(parents=True, exist_ok=True)
        for path in there.iterdir():
            if path.name not in (part, "__pycache__"):
                (here / path.name).symlink_to(path)
        here, there = here / (part or ""), there / (part or "")
    path = here / f"modeling_{family}.py"
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text, encoding="utf-8")
    return site / "transformers"


def entry(cache: Path, family: str = "llama") -> Path:
    (found,) = (cache / "models" / family).iterdir()
    return found


@pytest.mark.parametrize("family", families())
def test_the_installed_version_is_served_by_the_set_of_its_bytes(family):
    name = _families.generated_module(family).__name__
    one = next(one for one in _sets.shipped() if one.module(family) == name)
    assert one.transformers == transformers.__version__ == installed().version


def test_every_set_has_every_family_and_the_maths_of_its_own_source():
    for one in _sets.shipped():
        assert tuple(sorted(one.families)) == _sets.known_families()
        for family, lock in one.families.items():
            header = (one.lock.parent / f"modeling_{family}.py").read_text(encoding="utf-8").partition("\n\n")[0]
            assert f"# transformers: {one.transformers}\n# sha256: {lock['sha256']}" in header


def test_the_newest_set_comes_first():
    numbers = [tuple(map(int, one.transformers.split("."))) for one in _sets.shipped()]
    assert numbers == sorted(numbers, reverse=True)


def test_a_comment_is_served_by_the_set(upstream, cache):
    upstream(COMMENT)
    assert families() == _sets.known_families()
    assert _families.generated_module("llama").__name__.startswith("opslot_models.generated.v")
    assert not cache.exists()


@pytest.mark.parametrize(
    "edit", [UNTARGETED, ("import torch\n", "import math\nimport torch\n")], ids=["maths", "import"]
)
def test_other_maths_outside_the_targets_is_generated(upstream, cache, edit, config, batch):
    upstream(edit)
    assert families() == _sets.known_families()
    module = _families.generated_module("llama")
    assert module.__name__ == "opslot_models.cached.modeling_llama"
    assert sys.modules[module.__name__] is module
    source = inspect.getsource(module)
    assert edit[1] in source
    assert "# opslot: rms_norm/standard" in source
    assert Path(module.__file__).is_relative_to(cache)
    assert {path.name for path in entry(cache).iterdir()} == {"manifest.json", "modeling_llama.py"}
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in [cache, *cache.rglob("*")] if folder.is_dir())
    assert {path.name for path in (cache / "models").iterdir()} == {"llama"}  # sets serve the others


@pytest.mark.parametrize("family", ["llama"])
def test_a_family_from_the_cache_builds_and_is_adopted(upstream, config, batch, deterministic):
    upstream(UNTARGETED)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config())
    torch.manual_seed(0)
    model = build_foundation_model(config(), "auto", device="cpu")
    assert type(model).__module__ == "opslot_models.cached.modeling_llama"
    del batch["labels"]  # with them a fused loss would keep no logits
    expected = stock(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected)
    adoption = adopt(stock, "eager", device="cpu")
    assert adoption.left == ()
    assert type(stock).__module__ == "opslot_models.cached.modeling_llama"
    assert torch.equal(stock(**batch).logits, expected)
    assert adopt(model, "eager", device="cpu").swapped == ()  # it is known for a generated one


def test_what_is_cached_is_not_generated_again(upstream, monkeypatch):
    upstream(UNTARGETED)
    assert "llama" in families()
    forget()
    monkeypatch.setattr(_generation, "_generate", lambda family: pytest.fail("generated again"))
    assert _families.generated_module("llama").LlamaModel


def test_what_an_entry_depends_on(upstream, monkeypatch, tmp_path):
    folder = upstream(UNTARGETED)
    lock, spec = tmp_path / "generated/v5_1/lock.json", tmp_path / "patches/llama.py"
    monkeypatch.setattr(_generation, "FOLDER", lock.parents[1])
    monkeypatch.setattr(_generation, "__file__", str(tmp_path / "_generation.py"))
    keys = []
    for path in (lock, spec, folder / "models/llama/modeling_llama.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for content in ("one", "two"):
            path.write_text(content)
            keys.append(_generation._key("llama"))
    spec.rename(spec.with_name("other.py"))
    keys += [_generation._key("llama"), _generation._key("qwen3")]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    keys.append(_generation._key("llama"))
    assert len(set(keys)) == len(keys)


def test_other_maths_in_a_target_is_refused_with_what_differs(upstream, cache, config):
    upstream(TARGETED)
    assert families() == tuple(family for family in _sets.known_families() if family != "llama")
    with pytest.raises(OpslotError) as refused:
        _families.generated_module("llama")
    message = str(refused.value)
    assert message.startswith("transformers 5.99.1 is installed, and what opslot patches in its llama is not as in")
    assert all(one.transformers in message for one in _sets.shipped())
    assert "LlamaRMSNorm.forward" in message
    assert TARGETED[1] in message
    assert list((cache / "models/llama").iterdir()) == []


@pytest.mark.parametrize("family", ["llama"])
def test_a_model_whose_family_is_not_served_is_refused_and_says_why(upstream, config):
    upstream(TARGETED)
    stock = AutoModelForCausalLM.from_config(config())
    with pytest.raises(OpslotError, match="what opslot patches in its llama is not as in"):
        adopt(stock, "eager", device="cpu")
    with pytest.raises(OpslotError, match="what opslot patches in its llama is not as in"):
        build_foundation_model(config(), "eager", device="cpu")


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_family_that_is_not_served_does_not_stop_another(upstream, config):
    upstream(TARGETED)
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    stock = torch.nn.ModuleDict({"main": AutoModelForCausalLM.from_config(config()), "norm": llama.LlamaRMSNorm(64)})
    adoption = adopt(stock, "eager", device="cpu")
    (left,) = adoption.left
    assert str(left) == "norm (LlamaRMSNorm)"
    assert "what opslot patches in its llama is not as in" in left.reason
    assert type(stock["main"]).__module__.startswith("opslot_models.generated.")


def test_a_target_that_is_gone_is_refused_with_its_name(upstream):
    upstream(("class LlamaMLP(", "class LlamaFeedForward("))
    with pytest.raises(OpslotError, match="LlamaMLP"):
        _families.generated_module("llama")


def test_without_patchgen_the_error_says_what_would_work(upstream, monkeypatch, cache):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    upstream(UNTARGETED)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "llama" not in families()
    with pytest.raises(OpslotError) as refused:
        _families.generated_module("llama")
    message = str(refused.value)
    assert message.startswith("transformers 5.99.1 is installed, and no generated set serves its llama")
    assert all(one.transformers in message for one in _sets.shipped())
    assert "pip install 'opslot-models[patchgen]'" in message
    assert "`opslot-patchgen drift --to 5.99.1`" in message
    assert not cache.exists()


def test_a_version_without_a_family_says_so(upstream):
    (upstream() / "models/llama/modeling_llama.py").unlink()
    with pytest.raises(OpslotError, match=r"transformers 5\.99\.1 is installed, and it has no .*modeling_llama\.py"):
        _families.generated_module("llama")


@pytest.mark.parametrize("content", ["def broken(:\n", "x = 1\0\n", "\ufeffx = 1\n"], ids=["syntax", "null", "mark"])
def test_a_file_that_cannot_be_read_is_refused(upstream, content):
    (upstream() / "models/llama/modeling_llama.py").write_text(content)
    with pytest.raises(
        OpslotError, match=r"5\.99\.1 is installed, and its llama cannot be generated: .*modeling_llama"
    ):
        _families.generated_module("llama")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def other_key(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "key": "0" * 64}))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("modeling_llama.py", truncate),
        ("modeling_llama.py", Path.unlink),
        ("manifest.json", lambda path: path.write_text("{")),
        ("manifest.json", other_key),
        ("manifest.json", Path.unlink),
    ],
    ids=["truncated", "gone", "no manifest", "another's manifest", "manifest gone"],
)
def test_a_broken_entry_is_generated_again_and_never_run(upstream, cache, name, spoil):
    upstream(UNTARGETED)
    _generation.provide("llama")
    good = {path.name: path.read_bytes() for path in entry(cache).iterdir()}
    spoil(entry(cache) / name)
    assert _families.generated_module("llama").LlamaModel
    assert {path.name: path.read_bytes() for path in entry(cache).iterdir()} == good


def test_what_runs_is_what_was_verified(upstream, cache, monkeypatch):
    """Not what the file has become since; and no bytecode lies beside it, which nothing verifies."""

    def provide(family):
        found = _generation.provide(family)
        found.path.write_text("raise RuntimeError")
        return found

    upstream(UNTARGETED)
    monkeypatch.setattr("opslot_models.cached.provide", provide)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert _families.generated_module("llama").LlamaModel
    assert {path.name for path in entry(cache).iterdir()} == {"manifest.json", "modeling_llama.py"}


@pytest.mark.parametrize("below", ["", "models", "models/llama", "models/llama/KEY"])
@pytest.mark.parametrize("mode", [0o720, 0o702], ids=oct)
def test_a_cache_that_others_can_write_to_is_refused(upstream, cache, below, mode):
    upstream(UNTARGETED)
    _generation.provide("llama")
    folder = cache / below.replace("KEY", entry(cache).name)
    folder.chmod(mode)
    with pytest.raises(OpslotError, match=f"{re.escape(str(folder))} is writable by others .* OPSLOT_CACHE"):
        _families.generated_module("llama")


def test_a_cache_of_another_user_is_refused(upstream, monkeypatch):
    upstream(UNTARGETED)
    _generation.provide("llama")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        OpslotError, match=f"belongs to user {owner}, and this process runs as {owner + 1}.* OPSLOT_CACHE"
    ):
        _families.generated_module("llama")


@pytest.mark.parametrize("there", ["file", "entry"])
def test_a_cache_that_cannot_be_written_names_the_variable(upstream, cache, monkeypatch, there):
    upstream(UNTARGETED)
    (cache / "models/llama").mkdir(parents=True, mode=0o700)
    for folder in (cache, cache / "models"):
        folder.chmod(0o700)
    if there == "file":  # a folder cannot be made below it
        (cache / "file").touch()
        monkeypatch.setenv("OPSLOT_CACHE", str(cache / "file/cache"))
    else:
        (cache / "models/llama" / _generation._key("llama")).touch()
    with pytest.raises(OpslotError, match=r"cannot be used: .* Set OPSLOT_CACHE to a folder that you can write to"):
        _families.generated_module("llama")
    assert [path for path in (cache / "models/llama").iterdir() if path.is_dir()] == []  # nothing half done


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_home_names_the_variable(upstream, tmp_path, monkeypatch):
    upstream(UNTARGETED)
    monkeypatch.delenv("OPSLOT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o500)
    with pytest.raises(OpslotError, match="Set OPSLOT_CACHE to a folder that you can write to"):
        _families.generated_module("llama")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "own"))
    assert _cache._root() == tmp_path / "own"
    monkeypatch.setenv("OPSLOT_CACHE", "")
    assert _cache._root() == tmp_path / "xdg/opslot"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert _cache._root() == tmp_path / "home/.cache/opslot"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user without a home
    with pytest.raises(OpslotError, match="no home folder, where the cache would be: set OPSLOT_CACHE"):
        _cache._root()
    monkeypatch.setenv("OPSLOT_CACHE", "relative")
    with pytest.raises(OpslotError, match="OPSLOT_CACHE='relative': write an absolute path"):
        _cache._root()


PROVIDE = """
import hashlib, sys, time
from pathlib import Path
from opslot_models._generation import provide
while not Path(sys.argv[1]).exists():
    time.sleep(0.001)
entry = provide("llama")
assert entry.path.read_bytes() == entry.content
print(hashlib.sha256(entry.content).hexdigest())
"""


@pytest.mark.parametrize("before", ["nothing", "broken"])
def test_processes_at_once(tmp_path, cache, before):
    site = edited_tree(tmp_path / "site", UNTARGETED).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    go = tmp_path / "go"

    def start(count):
        command = [sys.executable, "-c", PROVIDE, str(go)]
        pipe = subprocess.PIPE
        return [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(count)]

    if before == "broken":
        go.touch()
        (first,) = start(1)
        assert first.wait() == 0, first.communicate()
        truncate(entry(cache) / "modeling_llama.py")
        go.unlink()
    processes = start(8)
    go.touch()
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    assert len({out for out, _ in results}) == 1
    assert len(list(entry(cache).iterdir())) == 2


ADOPT = """
import pickle, sys
import torch
from opslot_models import adopt
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=4))
assert "self.norm(hidden_states + 0)" in open(sys.modules[type(model).__module__].__file__).read()
assert adopt(model, {"rms_norm": "torch", "default": "eager"}, device="cpu").left == ()
model.opslot_binding = None
pickle.dump(model, open(sys.argv[1], "wb"))
"""
LOAD = """
import pickle, sys
model = pickle.load(open(sys.argv[1], "rb"))
print(type(model).__module__)
"""


@pytest.mark.slow
def test_a_fresh_process_finds_the_classes_of_a_pickled_model(tmp_path, cache):
    site = edited_tree(tmp_path / "site", UNTARGETED).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    for code in (ADOPT, LOAD):
        command = [sys.executable, "-c", code, str(tmp_path / "model")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "opslot_models.cached.modeling_llama\n"


def test_to_name_the_families_imports_neither_torch_nor_transformers():
    code = """
import sys, opslot_models
opslot_models.families()
print(sorted({"torch", "transformers", "libcst"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
def test_a_real_release_between_the_sets(tmp_path, monkeypatch, cache):
    """The head of 5.23.0 cuts the logits as 5.24.0 does and names the cache as 5.17.0 does: no set has that maths."""
    from opslot_patchgen import FetchError, fetch

    try:
        folder = fetch("5.23.0", tmp_path)
    except FetchError as error:
        pytest.skip(f"no index gives transformers 5.23.0: {error}")
    for module in (_families, _generation):
        monkeypatch.setattr(module, "installed", lambda: Installed(folder / "transformers", "5.23.0"))
    forget()
    with pytest.raises(OpslotError, match=r"5\.17\.0 -> 5\.23\.0\n.*\n  maths: LlamaForCausalLM.forward: "):
        _families.generated_module("llama")
    forget()
