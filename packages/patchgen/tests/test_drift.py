"""What another upstream changed: small trees for every kind of finding, and the real releases read as data."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from opslot_patchgen import (
    CallGuard,
    EntryGuard,
    FetchError,
    ForwardGuard,
    LockError,
    ModelSpec,
    Slot,
    SpecPackage,
    as_json,
    as_markdown,
    as_text,
    cli,
    drift,
    fetch,
    generated_set,
    plan,
)

TINY = """\
from torch import nn

from ...modeling_utils import PreTrainedModel
from ...integrations import use_experts_implementation


class TinyPreTrainedModel(PreTrainedModel):
    config: object


def scale(x):
    return x * 2


class Pair:
    def get(self, k):
        return k


def turn(q, k, position=None):
    return scale(q), Pair().get(k)


class TinyMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.size, 2)

    def forward(self, x):
        # The sum.
        return self.up(x) + 1


@use_experts_implementation
class TinyExperts(nn.Module):
    def forward(self, x):
        return self.up_proj @ x


class TinyAttention(nn.Module):
    def forward(self, q, k):
        q, k = turn(q, k)
        return q @ k


def unrelated(x):
    return x
"""
SLOT = Slot("op", "standard")
GUARDS = (
    EntryGuard(target="TinyMLP.forward", slot=SLOT, result="self.up(kernel(x))"),
    ForwardGuard(target="TinyExperts", slot=SLOT, attributes=("up_proj",)),
    CallGuard(target="TinyAttention.forward", slot=SLOT, call="turn"),
)


@pytest.fixture
def package(tmp_path):
    def make(family="tiny", guards=GUARDS):
        spec = ModelSpec(family=family, source=f"transformers.models.{family}.modeling_{family}", guards=guards)
        return SpecPackage("acme.patches", tmp_path / "acme/patches", (spec,))

    return make


@pytest.fixture
def generated(package, upstream):
    """The package with a committed set for `TINY`."""
    plan(package(), upstream(TINY)).write()
    return package()


@pytest.fixture
def changed(generated, upstream):
    """The drift after replacing text in `TINY`."""

    def run(*replacements):
        text = TINY
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        return drift(generated, root=upstream(text, version="5.25.0"))

    return run


def findings(found):
    """(kind, target, summary) of the only family."""
    (family,) = found.families
    return [(finding.kind, finding.target, finding.summary) for finding in family.findings]


def test_the_same_bytes_are_no_drift(changed):
    found = changed()
    assert findings(found) == []
    assert found.exit_code == 0
    assert as_text(found) == (
        "transformers 5.24.0 -> 5.25.0\ntiny (transformers.models.tiny.modeling_tiny): nothing changed\n"
    )


COSMETIC = ("# The sum.", "# Their sum.")
KINDS = {
    "annotation": (
        [("def forward(self, x):\n        # The", "def forward(self, x: int) -> int:\n        # The")],
        [("cosmetic", "", "only comments, docstrings, annotations or layout changed")],
    ),
    "cosmetic beside maths elsewhere": (
        [COSMETIC, ("unrelated(x):\n    return x", "unrelated(x):\n    return -x")],
        [
            ("cosmetic", "TinyMLP.forward", "comments, docstrings, annotations or layout changed"),
            ("elsewhere", "", "changed: unrelated"),
        ],
    ),
    "maths": ([("(x) + 1", "(x) + 2")], [("maths", "TinyMLP.forward", "the maths changed")]),
    "parameters": (
        [("forward(self, x):\n        #", "forward(self, x, y=None):\n        #")],
        [("parameters", "TinyMLP.forward", "parameters changed: +y=None")],
    ),
    "parameters in another order": (
        [("forward(self, q, k)", "forward(self, k, q)")],
        [("parameters", "TinyAttention.forward", "parameters changed: now in this order: self, k, q")],
    ),
    "what it depends on": (
        [("x * 2", "x * 3")],
        [("dependency", "TinyAttention.forward", "scale: its maths changed")],
    ),
    "constructor": (
        [("config.size, 2", "config.size, 3")],
        [("dependency", "TinyMLP.forward", "TinyMLP.__init__: its maths changed")],
    ),
    "signature of the callee": (
        [(", position=None", "")],
        [("dependency", "TinyAttention.forward", "turn: parameters changed: -position=None")],
    ),
    "callee renamed": (
        [("scale", "double")],
        [
            (
                "dependency",
                "TinyAttention.forward",
                "scale is gone; perhaps now double (equal maths)",
            ),
            ("dependency", "TinyAttention.forward", "turn: its maths changed"),
            ("dependency", "TinyAttention.forward", "double is used now"),
        ],
    ),
    "import": (
        [("from torch import nn", "from torch import nn, special")],
        [("elsewhere", "", "new: special")],
    ),
    "unreachable": (
        [("class TinyMLP", "@use_experts_implementation\nclass TinyMLP")],
        [
            (
                "decorators",
                "TinyMLP.forward",
                "decorators changed: +@use_experts_implementation; @use_experts_implementation swaps the body: "
                "the guard becomes unreachable inside it",
            )
        ],
    ),
    "reachable": (
        [("@use_experts_implementation\n", "")],
        [
            (
                "decorators",
                "TinyExperts.forward",
                "decorators changed: -@use_experts_implementation; without @use_experts_implementation a guard in the "
                "body is reachable",
            )
        ],
    ),
    "still reachable": (
        [
            (
                "class TinyExperts(nn.Module):\n    def",
                "class TinyExperts(nn.Module):\n    @hub.use_kernel_func_from_hub_with_fallback('a')\n    def",
            )
        ],
        [
            (
                "decorators",
                "TinyExperts.forward",
                "decorators changed: +@hub.use_kernel_func_from_hub_with_fallback('a'); "
                "@use_kernel_func_from_hub_with_fallback swaps the body: the guard stays reachable outside it",
            )
        ],
    ),
    "harmless decorator": (
        [("    def forward(self, q, k)", "    @torch.no_grad()\n    def forward(self, q, k)")],
        [("decorators", "TinyAttention.forward", "decorators changed: +@torch.no_grad()")],
    ),
    "the callee is swapped": (
        [("def turn", "@use_kernel_func_from_hub_with_fallback('turn')\ndef turn")],
        [
            (
                "dependency",
                "TinyAttention.forward",
                "turn: decorators changed: +@use_kernel_func_from_hub_with_fallback('turn'); "
                "@use_kernel_func_from_hub_with_fallback may run another implementation in place of its body",
            )
        ],
    ),
    "escape": (
        [("self.up = nn.Linear(config.size, 2)", "self.up = AutoModel.from_config(config)")],
        [
            ("dependency", "TinyMLP.forward", "TinyMLP.__init__: its maths changed"),
            (
                "escape",
                "",
                "AutoModel.from_config in TinyMLP.__init__ is new (1): "
                "it builds upstream's classes, which have no slots",
            ),
        ],
    ),
    "statement of the module": (
        [("def unrelated", "nn.patch()\n\n\ndef unrelated")],
        [
            ("dependency", "TinyAttention.forward", "(statements) is used now"),
            ("dependency", "TinyExperts.forward", "(statements) is used now"),
            ("dependency", "TinyMLP.forward", "(statements) is used now"),
        ],
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds(case, changed):
    replacements, expected = KINDS[case]
    found = changed(*replacements)
    assert findings(found) == expected
    assert found.exit_code == (0 if case == "annotation" else 2)


def test_a_renamed_target_is_found_by_its_maths(changed):
    found = changed(("TinyMLP", "TinyFeedForward"))
    assert ("renamed", "TinyMLP.forward", "gone; perhaps now TinyFeedForward.forward (equal maths)") in findings(found)
    assert found.families[0].findings[0].candidates == ("TinyFeedForward.forward",)
    assert found.exit_code == 3


def test_a_target_that_is_renamed_and_changed_is_found_by_its_name(changed):
    found = changed(("TinyMLP", "TinyMLPs"), ("(x) + 1", "(x) + 2"))
    assert ("gone", "TinyMLP.forward", "gone; perhaps now TinyMLPs.forward (similar name)") in findings(found)
    assert found.exit_code == 3


def test_a_class_that_is_gone_is_not_taken_for_one_of_the_same_bases(changed):
    summaries = [summary for _, _, summary in findings(changed(("Pair", "Couple")))]
    assert "Pair is gone" in summaries
    assert "Pair.get is gone; perhaps now Couple.get (equal maths)" in summaries


def test_a_call_that_is_gone_is_a_target_gone(changed):
    found = changed(("        q, k = turn(q, k)\n", ""))
    (finding,) = [finding for finding in found.families[0].findings if finding.kind == "gone"]
    assert "TinyAttention.forward does not call turn" in finding.summary
    assert found.exit_code == 3


def test_what_generation_refuses_is_said(changed):
    found = changed(("# The sum.", "kernel = 1"))
    assert [kind for kind, _, _ in findings(found)] == ["maths", "refused"]
    assert "already uses the name `kernel`" in findings(found)[1][2]


def test_layout_that_generation_refuses_is_said(changed):
    found = changed(("from ...modeling_utils", "from  ...modeling_utils"))
    assert [kind for kind, _, _ in findings(found)] == ["cosmetic", "refused"]
    assert found.exit_code == 2


def test_a_module_that_is_gone(generated, upstream):
    root = upstream(TINY, version="5.25.0")
    (root / "transformers/models/tiny/modeling_tiny.py").unlink()
    found = drift(generated, root=root)
    ((kind, _, summary),) = findings(found)
    assert kind == "gone"
    assert "transformers 5.25.0 has no module transformers.models.tiny.modeling_tiny" in summary
    assert found.exit_code == 3


def test_a_source_that_cannot_be_read_is_refused(changed):
    assert [kind for kind, _, _ in findings(changed(("    return x * 2", "\treturn x * 2")))] == ["refused"]
    (finding,) = findings(changed(("x * 2", "x * * 2")))
    assert finding[0] == "refused"
    assert "modeling_tiny.py:12: not Python" in finding[2]


def test_reports(changed):
    found = changed(("(x) + 1", "(x) | 2"), ("class TinyExperts", "@a(x | '<b>')\nclass TinyExperts"))
    text = as_text(found)
    assert "  maths: TinyMLP.forward: the maths changed\n    --- a/transformers/models/tiny/modeling_tiny.py: " in text
    assert "    -        return self.up(x) + 1\n    +        return self.up(x) | 2\n" in text
    data = json.loads(as_json(found))
    assert sorted(data) == ["exit_code", "families", "from", "to"]
    assert sorted(data["families"]["tiny"]) == ["findings", "source", "verdict"]
    keys = ["candidates", "diff", "kind", "subject", "summary", "target"]
    assert [sorted(finding) for finding in data["families"]["tiny"]["findings"]] == [keys, keys]
    assert (data["from"], data["to"], data["exit_code"]) == ("5.24.0", "5.25.0", 2)
    markdown = as_markdown(found)
    rows = [line for line in markdown.split("\n") if line.startswith("|")]
    assert rows[:3] == [
        "| family | target | kind | what |",
        "|---|---|---|---|",
        "| tiny | `TinyExperts.forward` | decorators | decorators changed: +@\u200ba(x\\|'&lt;b>') |",
    ]
    assert rows[3:] == ["| tiny | `TinyMLP.forward` | maths | the maths changed |"]
    assert "`````diff\n--- a/" in markdown


def test_the_newest_set_is_the_default(generated, upstream):
    plan(generated, upstream(TINY, version="5.9.1")).write()
    plan(generated, upstream(TINY, version="5.30.1")).write()
    assert generated_set(generated).folder.name == "v5_30"
    assert drift(generated, "v5_9", upstream(TINY)).before == "5.9.1"
    with pytest.raises(LockError, match=r"no set 'v5_1'; there are: v5_9, v5_24, v5_30"):
        drift(generated, "v5_1", upstream(TINY))


def test_no_set_is_refused(package):
    with pytest.raises(LockError, match="no generated sets"):
        generated_set(package())


def test_a_damaged_set_is_no_measure(generated, upstream):
    path = generated_set(generated).folder / "modeling_tiny.py"
    path.write_text(path.read_text().replace("(x) + 1", "(x) + 2"))
    with pytest.raises(LockError, match=r"modeling_tiny\.py: undone, it is not the source that lock\.json names"):
        drift(generated, root=upstream(TINY))
    path.unlink()
    with pytest.raises(LockError, match=r"modeling_tiny\.py: no such file, but lock\.json names it"):
        drift(generated, root=upstream(TINY))


@pytest.mark.parametrize("version", ["nowhere", "--help", "5", "5.24.0; x", "git+https://example.org"])
def test_what_is_no_version_is_refused(version, tmp_path):
    with pytest.raises(FetchError, match="is neither a folder nor a version"):
        fetch(version, tmp_path)


def test_neither_tool_works(tmp_path, monkeypatch):
    """The reasons of both are given, and what would work."""
    monkeypatch.setattr("shutil.which", lambda name: f"/nowhere/{name}")
    folders = []

    def run(command, cwd, **options):
        folders.append(cwd)
        return subprocess.CompletedProcess(command, 1, "", "no answer from the index\n")

    monkeypatch.setattr("subprocess.run", run)
    message = r"transformers==5\.24\.0:\nuv: no answer from the index\npip: no answer .*\nGive a folder"
    with pytest.raises(FetchError, match=message):
        fetch("5.24.0", tmp_path)
    assert folders == [tmp_path, tmp_path]


def test_pip_where_there_is_no_uv(tmp_path, monkeypatch):
    """What pip downloads is a wheel, which is unpacked."""

    def run(command, cwd, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        with zipfile.ZipFile(cwd / "transformers-5.24.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("transformers/__init__.py", '__version__ = "5.24.0"\n')
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("subprocess.run", run)
    assert (fetch("5.24.0", tmp_path) / "transformers/__init__.py").is_file()


def test_no_answer_in_time(tmp_path, monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(FetchError, match="pip: no answer within 300 s"):
        fetch("5.24.0", tmp_path)


def test_a_release_that_does_not_exist(release, tmp_path):
    release("5.24.0")  # skips without an index
    with pytest.raises(FetchError, match=r"cannot fetch transformers==5\.24\.999"):
        fetch("5.24.999", tmp_path)


def entry(target, result="kernel(hidden_states)"):
    return EntryGuard(target=target, slot=SLOT, result=result)


# family, from, to, guard, exit code, what must be among the findings: (kind, part of the summary).
RELEASES = {
    "cast order of a norm": (
        "deepseek_v4",
        "5.17.0",
        "5.23.0",
        entry("DeepseekV4RMSNorm.forward"),
        2,
        [("maths", "")],
    ),
    "a clamp in an MLP": (
        "deepseek_v4",
        "5.9.0",
        "5.17.0",
        entry("DeepseekV4MLP.forward", "kernel(x)"),
        2,
        [("maths", ""), ("dependency", "DeepseekV4MLP.__init__: its maths changed")],
    ),
    "rope of an indexer": (
        "glm_moe_dsa",
        "5.9.0",
        "5.17.0",
        entry("GlmMoeDsaIndexer.forward"),
        2,
        [
            ("maths", ""),
            ("parameters", "-use_cache=False +position_ids +past_key_values=None"),
            ("dependency", "apply_rotary_pos_emb is gone; perhaps now apply_rotary_pos_emb_interleave (similar name)"),
            ("dependency", "rotate_half is gone"),
        ],
    ),
    "signature of the called function": (
        "gpt_oss",
        "5.9.0",
        "5.17.0",
        CallGuard(target="GptOssAttention.forward", slot=SLOT, call="apply_rotary_pos_emb"),
        2,
        [("dependency", "apply_rotary_pos_emb: parameters changed: -position_ids=None; decorators changed: ")],
    ),
    "experts renamed": (
        "glm4_moe",
        "5.9.0",
        "5.17.0",
        ForwardGuard(target="Glm4MoeNaiveMoe", slot=SLOT, attributes=("gate_up_proj",)),
        3,
        [("renamed", "perhaps now Glm4MoeExperts.forward (equal maths)")],
    ),
    "a router returns more": (
        "deepseek_v3",
        "5.9.0",
        "5.17.0",
        entry("DeepseekV3TopkRouter.forward"),
        2,
        [("maths", "")],
    ),
    "a backbone through AutoModel": (
        "qwen3_5",
        "5.9.0",
        "5.17.0",
        entry("Qwen3_5RMSNorm.forward", "kernel(x)"),
        2,
        [
            ("escape", "AutoModel.from_config in Qwen3_5Model.__init__ is new (2)"),
            ("decorators", '+@use_kernel_forward_from_hub("RMSNormZeroCentered")'),
        ],
    ),
    "a tower through AutoModel": (
        "qwen3_vl",
        "5.9.0",
        "5.17.0",
        entry("Qwen3VLTextRMSNorm.forward"),
        2,
        [("escape", "AutoModel.from_config in Qwen3VLModel.__init__ is new (2)")],
    ),
    "functions with a fallback": (
        "qwen3_next",
        "5.9.0",
        "5.17.0",
        entry("Qwen3NextGatedDeltaNet.forward"),
        2,
        [
            (
                "dependency",
                "torch_chunk_gated_delta_rule: its maths changed; decorators changed: "
                '+@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla"); '
                "@use_kernel_func_from_hub_with_fallback may run another implementation in place of its body",
            ),
            ("dependency", "torch_causal_conv1d_update is gone; perhaps now causal_conv1d_update (similar name)"),
        ],
    ),
    "experts beyond the last": (
        "qwen3_moe",
        "5.17.0",
        "5.23.0",
        ForwardGuard(target="Qwen3MoeExperts", slot=SLOT, attributes=("gate_up_proj",)),
        2,
        [("maths", "")],
    ),
    "a loss rewritten": (
        "mixtral",
        "5.9.0",
        "5.17.0",
        CallGuard(target="MixtralForCausalLM.forward", slot=SLOT, call="load_balancing_loss_func"),
        2,
        [("dependency", "load_balancing_loss_func: its maths changed")],
    ),
    "a cache renamed": (
        "llama",
        "5.23.0",
        "5.24.0",
        CallGuard(target="LlamaAttention.forward", slot=SLOT, call="apply_rotary_pos_emb"),
        2,
        [("maths", ""), ("parameters", "-past_key_values=None +cache=None"), ("decorators", "+@deprecate_kwarg(")],
    ),
}


@pytest.mark.parametrize("case", RELEASES)
def test_releases(case, package, release):
    family, before, after, guard, code, expected = RELEASES[case]
    made = package(family, (guard,))
    planned = plan(made, release(before))
    assert planned.refusals == ()
    planned.write()
    found = drift(made, root=release(after))
    assert (found.before, found.after, found.exit_code) == (before, after, code)
    missing = [
        (kind, part)
        for kind, part in expected
        if not any(kind == other and part in summary for other, _, summary in findings(found))
    ]
    assert missing == [], as_text(found)


def test_a_norm_that_stayed_has_no_finding(package, release):
    """From 5.9.0 to 5.24.0 everything around it moved."""
    guard = entry("LlamaRMSNorm.forward")
    made = package("llama", (guard,))
    plan(made, release("5.9.0")).write()
    for version in ("5.17.0", "5.23.0", "5.24.0"):
        assert [kind for kind, _, _ in findings(drift(made, root=release(version)))] == ["elsewhere"]


def test_the_command(generated, upstream, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_specs", lambda name: generated)
    root = upstream(TINY.replace("(x) + 1", "(x) + 2"), version="5.25.0")
    arguments = ["drift", "acme.patches", "--to", str(root)]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().out.startswith("transformers 5.24.0 -> 5.25.0\ntiny ")
    assert cli.main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert cli.main([*arguments, "--markdown"]) == 2
    assert "| tiny | `TinyMLP.forward` | maths |" in capsys.readouterr().out
    assert cli.main([*arguments, "--from", "v5_24"]) == 2
    assert cli.main([*arguments, "--from", "v5_1"]) == 4
    assert cli.main(["drift", "acme.patches", "--to", "nonsense"]) == 4
    assert cli.main(["drift", "acme.patches", "--to", str(root / "transformers")]) == 4
    assert cli.main(["drift", "acme.patches", "--to", str(upstream(TINY))]) == 0
    with pytest.raises(SystemExit) as raised:
        cli.main([*arguments, "--json", "--markdown"])
    assert raised.value.code == 64


def test_the_command_fetches_a_version(generated, upstream, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_specs", lambda name: generated)
    asked = []

    def fake(version, folder):
        asked.append((version, Path(folder).is_dir()))
        return upstream(TINY, version=version)

    monkeypatch.setattr(cli, "fetch", fake)
    assert cli.main(["drift", "acme.patches", "--to", "5.25.0"]) == 0
    assert asked == [("5.25.0", True)]


CHECKS = {
    "fresh": ([], 0),
    "cosmetic": ([COSMETIC], 1),
    "maths": ([("(x) + 1", "(x) + 2")], 2),
    "elsewhere": ([("unrelated(x):\n    return x", "unrelated(x):\n    return -x")], 2),
    "gone": ([("TinyMLP", "TinyFFN")], 3),
    "refused": ([("# The sum.", "kernel = 1")], 4),
}


@pytest.mark.parametrize("case", CHECKS)
def test_check_tells_stale_from_changed(case, generated, upstream, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_specs", lambda name: generated)
    replacements, code = CHECKS[case]
    text = TINY
    for old, new in replacements:
        text = text.replace(old, new)
    assert cli.main(["check", "acme.patches", "--source", str(upstream(text))]) == code
    out = capsys.readouterr().out
    assert ("the committed set is of another source" in out) == (case != "fresh")
    # That a file made from another source differs goes without saying.
    assert ": stale" not in out
    assert ": undone" not in out


def test_a_lock_is_of_all_families_or_none(package, upstream):
    """One without the refused family would read as if no one had asked for it."""
    specs = (*package().specs, *package("small").specs)
    planned = plan(SpecPackage("acme.patches", package().folder, specs), upstream(TINY))
    assert len(planned.refusals) == 1
    names = {path.name for path in planned.files}
    assert "modeling_tiny.py" in names
    assert "lock.json" not in names


def test_check_of_a_damaged_set_is_stale(generated, upstream, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_specs", lambda name: generated)
    (generated_set(generated).folder / "lock.json").write_text("{}")
    assert cli.main(["check", "acme.patches", "--source", str(upstream(TINY))]) == 1
    assert "lock.json: stale" in capsys.readouterr().out
