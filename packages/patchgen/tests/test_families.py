"""The real transformers sources under the real specs, and the files that are committed."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opslot_patchgen import TargetGone, build, load_specs, plan, read_source, restore

MODELS = Path(__file__).parents[2] / "models/src"
# In the order of upstream's file.
DENSE = ["rms_norm/standard", "glu/swiglu", "rotary_pos_emb/full", "cross_entropy_loss/causal"]
MLP_FIRST = ["glu/swiglu", "rotary_pos_emb/full", "rms_norm/standard", "cross_entropy_loss/causal"]
GEMMA = ["rms_norm/zero_centered", "glu/geglu_tanh", "rotary_pos_emb/full", "cross_entropy_loss/causal"]
ROUTED = ["cross_entropy_loss/causal", "load_balancing_loss/standard"]
DELTA = ["causal_conv1d/standard", "chunk_gated_delta_rule/standard"]
GUARDS = {
    "deepseek_v2": ["moe_experts/standard", "glu/swiglu", "rms_norm/standard", "cross_entropy_loss/causal"],
    "deepseek_v3": [
        *("rms_norm/standard", "glu/swiglu", "moe_experts/standard"),
        *("rotary_pos_emb/interleaved", "cross_entropy_loss/causal"),
    ],
    "deepseek_v4": [
        *("rms_norm/fp32_weight", "rms_norm/unweighted", "dsa_indexer/deepseek_v4", "dsa_attention/deepseek_v4"),
        *("mhc/pre", "mhc/head", "glu/swiglu_clamped", "moe_experts/clamped", "mhc/post", "mhc/post", *ROUTED),
    ],
    "gemma2": GEMMA,
    "gemma3": [GEMMA[1], GEMMA[0], *GEMMA[2:], "cross_entropy_loss/causal"],
    "glm4_moe": [
        *("rotary_pos_emb/partial", "glu/swiglu", "rms_norm/standard"),
        *("moe_experts/standard", "cross_entropy_loss/causal"),
    ],
    "glm_moe_dsa": [
        *("rms_norm/standard", "rotary_pos_emb/interleaved", "dsa_indexer/glm", "rotary_pos_emb/interleaved"),
        *("dsa_attention/glm", "dsa_attention/glm", "glu/swiglu", "moe_experts/standard", "cross_entropy_loss/causal"),
    ],
    "gpt_oss": ["rms_norm/fp32_weight", "moe_experts/gpt_oss", "rotary_pos_emb/half_table", *ROUTED],
    "llama": DENSE,
    "mistral": MLP_FIRST,
    "mixtral": ["moe_experts/standard", "rms_norm/standard", "rotary_pos_emb/full", *ROUTED],
    "olmoe": ["rms_norm/standard", "rotary_pos_emb/full", "moe_experts/standard", *ROUTED],
    "phi3": ["glu/swiglu", "rotary_pos_emb/partial", "rms_norm/standard", "cross_entropy_loss/causal"],
    "qwen2": MLP_FIRST,
    "qwen3": DENSE,
    "qwen3_5": [
        *("rms_norm_gated/standard", *DELTA, "rotary_pos_emb/partial", "glu/swiglu", "rms_norm/zero_centered"),
        *("rotary_pos_emb_vision/full", "cross_entropy_loss/causal", "cross_entropy_loss/causal"),
    ],
    "qwen3_5_moe": [
        *("rms_norm_gated/standard", *DELTA, "rotary_pos_emb/partial", "glu/swiglu", "moe_experts/standard"),
        *("rms_norm/zero_centered", "rotary_pos_emb_vision/full", *ROUTED, *ROUTED),
    ],
    "qwen3_next": [
        *("rms_norm_gated/standard", "rms_norm/zero_centered", "rotary_pos_emb/partial", *DELTA),
        *("glu/swiglu", "moe_experts/standard", *ROUTED),
    ],
    "qwen3_omni_moe": [
        *("rotary_pos_emb_vision/full", "moe_experts/standard", "rms_norm/standard", "rotary_pos_emb/full"),
        *("glu/swiglu", "rms_norm/standard", *ROUTED),
        *("rms_norm/standard", "rotary_pos_emb/full", "glu/swiglu", "glu/swiglu", "moe_experts/standard", *ROUTED),
        *("rotary_pos_emb/full", "glu/swiglu", "rms_norm/standard"),
    ],
    "qwen3_vl": ["rotary_pos_emb_vision/full", *DENSE[:1], *DENSE[2:3], DENSE[1], DENSE[3]],
    "qwen3_vl_moe": [
        *("rms_norm/standard", "moe_experts/standard", "rotary_pos_emb/full", "glu/swiglu"),
        *("rotary_pos_emb_vision/full", *ROUTED),
    ],
    "seed_oss": DENSE,
    "qwen3_moe": ["rotary_pos_emb/full", "glu/swiglu", "moe_experts/standard", "rms_norm/standard", *ROUTED],
}


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The specs are found on the path: this package does not depend on the one that holds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MODELS)
        yield


@pytest.fixture(scope="module")
def specs(on_path):
    return load_specs("opslot_models.patches")


@pytest.fixture(scope="module", params=GUARDS)
def spec(request, specs):
    return next(spec for spec in specs.specs if spec.family == request.param)


@pytest.fixture(scope="module")
def source(spec):
    return read_source(spec.source)


@pytest.fixture(scope="module")
def artifact(spec, source):
    return build(spec, source, "opslot_models.patches")


def test_the_inverse_gives_the_installed_bytes(artifact, source):
    assert restore(artifact.text).encode() == source.path.read_bytes()


def test_patch_program(artifact, source, tmp_path):
    path = tmp_path / source.label
    path.parent.mkdir(parents=True)
    shutil.copyfile(source.path, path)
    subprocess.run(["patch", "-p1"], input=artifact.patch.encode(), cwd=tmp_path, check=True, capture_output=True)
    assert path.read_bytes() == artifact.text.encode()


def test_every_family_is_tested(specs):
    assert {spec.family for spec in specs.specs} == set(GUARDS)


def test_a_spec_is_short(specs):
    for spec in specs.specs:
        # DeepSeek-V4 is like no other family.
        most = 80 if spec.family == "deepseek_v4" else 60 if spec.family == "glm_moe_dsa" else 40
        assert len((specs.folder / f"{spec.family}.py").read_text().splitlines()) < most


def test_all_specs_together_are_short(specs):
    """Logical lines: statements of the formatted source."""
    statements = (
        node
        for path in specs.folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.stmt)
    )
    assert sum(1 for _ in statements) < 1200


def test_guards_and_slots(artifact, spec):
    guards = GUARDS[spec.family]
    assert re.findall(r"# opslot: (\S+)$", artifact.text, re.MULTILINE) == guards
    declared = re.findall(r"^    (\w+)_op = OpSlot\(.*  # opslot$", artifact.text, re.MULTILINE)
    # One slot serves every guard of its op in a class.
    parts = enumerate(classes_of(artifact))
    read = {(number, op) for number, part in parts for op in re.findall(r"# opslot: (\w+)/", part)}
    assert sorted(declared) == sorted(op for _, op in read)


def classes_of(artifact):
    return re.split(r"^(?=class |@)", artifact.text, flags=re.MULTILINE)[1:]


def test_a_slot_stands_above_every_guard_that_reads_it(artifact):
    for part in classes_of(artifact):
        assert set(re.findall(r"self\.(\w+_op)\.kernel", part)) <= set(
            re.findall(r"^    (\w+_op) = ", part, re.MULTILINE)
        )


def test_every_causal_language_model_returns_auxiliary_states_and_no_tower_does(artifact):
    decorated = re.findall(r"^@auxiliary_states  # opslot\n(?:(?!class ).*\n)*class (\w+)", artifact.text, re.MULTILINE)
    assert set(re.findall(r"^class (\w+ForCausalLM)\b", artifact.text, re.MULTILINE)) <= set(decorated)
    assert len(decorated) >= 2  # the text model and its head
    assert not [name for name in decorated if re.search(r"Vision|Audio|Talker|Wav|Classification|Answering", name)]


def test_only_imports_and_reindented_lines_are_removed(artifact):
    removed = [line[1:] for line in artifact.patch.split("\n")[2:] if line.startswith("-")]
    added = {line[1:] for line in artifact.patch.split("\n")[2:] if line.startswith("+")}
    for line in removed:
        assert line.startswith("from .") or not line or f"    {line}" in added


def test_the_patches_of_a_set_are_short(specs):
    for folder in specs.generated.glob("v*"):
        patches = [path.read_text(encoding="utf-8").split("\n")[2:] for path in folder.glob("*.patch")]
        assert len(patches) == len(GUARDS)
        added = sum(line.startswith("+") for patch in patches for line in patch)
        assert added <= 100 * len(patches), folder


def test_signatures_and_docstrings_are_untouched(artifact, source):
    pattern = re.compile(r'^ *def [^#]*?:$|"""(?:.|\n)*?"""', re.MULTILINE)
    assert pattern.findall(artifact.text) == pattern.findall(source.text)


def test_generation_is_deterministic(specs, tmp_path):
    code = (
        "import sys, hashlib; from dataclasses import replace; from opslot_patchgen import load_specs, plan; "
        f"sys.path.insert(0, {str(MODELS)!r}); package = load_specs('opslot_models.patches'); "
        "few = tuple(spec for spec in package.specs if spec.family in ('gemma3', 'glm_moe_dsa', 'mixtral')); "
        "files = plan(replace(package, specs=few)).files; "
        "print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_committed_files_are_fresh_and_found_without_importing_transformers(specs):
    code = (
        "import sys; from opslot_patchgen import cli; "
        f"sys.path.insert(0, {str(MODELS)!r}); code = cli.main(['check']); "
        "print(sorted({'torch', 'transformers', 'opslot', 'opslot_models'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "are fresh" in done.stdout


def test_another_tree_gives_the_same_plan(specs):
    located = importlib.util.find_spec("transformers")
    root = Path(located.submodule_search_locations[0]).parent
    few = replace(specs, specs=specs.specs[:3])
    assert plan(few, root).files == plan(few).files


@pytest.mark.parametrize("name", ["RMSNorm", "self.lm_head", "variance_epsilon", "hc_sinkhorn_iters", "act_fn"])
def test_a_rename_upstream_is_a_target_gone(name, tmp_path, specs, spec, source):
    others = {
        "variance_epsilon": ["self.eps"],
        "act_fn": ["activation_fn", "self.alpha"],
        "apply_rotary_pos_emb": ["down_proj"],
        # Upstream's rotation has no guard in DeepSeek-V4.
        "hc_sinkhorn_iters": ["apply_rotary_pos_emb", "down_proj"],
    }
    name = next(
        each for each in [name, *others.get(name, [])] if each in source.text
    )  # some families have it otherwise
    root = tmp_path / "renamed"
    path = root / source.label
    path.parent.mkdir(parents=True)
    path.write_text(source.text.replace(name, f"{name}Renamed"))
    shutil.copyfile(source.path.parents[2] / "__init__.py", root / "transformers/__init__.py")
    (refusal,) = plan(replace(specs, specs=(spec,)), root).refusals
    assert isinstance(refusal, TargetGone)
    assert refusal.exit_code == 3
    assert source.path.name in str(refusal)
