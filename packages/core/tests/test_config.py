import textwrap

import opslot
import pytest
import yaml
from opslot import ConfigError, OpsConfig, OpslotError, _catalog


def read(tmp_path, text):
    path = tmp_path / "ops.yaml"
    path.write_text(text, encoding="utf-8")
    return OpsConfig.parse(path)


def selected(config, known):
    return {rule.key: rule.kernel for rule in config.rules(known)}


def test_none_and_the_two_words(known):
    assert OpsConfig.parse(None) == OpsConfig()
    assert OpsConfig.parse("eager").default == "eager"
    assert OpsConfig.parse("auto").rules(known) == ()


@pytest.mark.parametrize("field", ["scale", "scale_implementation", "scaling", "rescale", "rescale_implementation"])
def test_every_name_of_a_field(known, field):
    chosen = selected(OpsConfig.parse({field: "fast"}), known)
    assert chosen[("scale", "standard")] == "fast"


def test_a_field_chooses_for_every_variant_or_for_each(known):
    assert selected(OpsConfig.parse({"scale": "fast"}), known) == {
        ("scale", "standard"): "fast",
        ("scale", "other"): "fast",
    }
    assert selected(OpsConfig.parse({"scale": {"standard": "fast"}}), known) == {("scale", "standard"): "fast"}


@pytest.mark.parametrize(
    "text",
    [
        "scale: fast\ndefault: eager\nattn_implementation: sdpa\n",
        "model:\n  ops_implementation:\n    scale: fast\n    default: eager\n    attn_implementation: sdpa\n",
        "ops_implementation: {scale: fast, default: eager, attn_implementation: sdpa}\n",
    ],
)
def test_a_yaml_file(tmp_path, text):
    config = read(tmp_path, text)
    origin = str(tmp_path / "ops.yaml")
    assert config == OpsConfig(choices={"scale": "fast"}, default="eager", attn_implementation="sdpa", origin=origin)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("scale: [fast\n", r"ops\.yaml, line 2: not valid YAML"),
        ("a: b: c\n", r"ops\.yaml, line 1: not valid YAML"),
        ("scale: fast\n\nscale: slow\n", r"ops\.yaml, line 3: 'scale' is given twice"),
        ("scale: {standard: fast, standard: slow}\n", r"line 1: 'standard' is given twice"),
        ("scale: no\n", r"scale must be the name of a kernel, got False \(YAML reads yes, no"),
        ("scale: {standard: off}\n", r"scale\.standard must be the name of a kernel, got False"),
        ("scale:\n", "got None; write 'eager' or 'auto', or leave the line out"),
        ("scale: 3\n", "got 3"),
        ("scale: [fast]\n", r"got \['fast'\]"),
        ("default: fast\n", "default must be 'auto' or 'eager', got 'fast'"),
        ("attn_implementation: {a: b}\n", "attn_implementation must be one name"),
        ("- scale\n", "expected a mapping of fields to kernel names, got list"),
        ("", "expected a mapping of fields to kernel names, got NoneType"),
        ("on: fast\n", "a field is a name, got True .YAML reads yes"),
        ("1: fast\n", "a field is a name, got 1"),
        ("? [a, b]\n: fast\n", "line 1: a field is a name, not a sequence"),
        ("scale: {1: fast}\n", "scale must map variants to kernels"),
        ("scale: {}\n", "scale must map variants to kernels"),
        ("scale: 2020-13-45\n", r"ops\.yaml: month must be in"),
        ("{a: " * 3000 + "}" * 3000, r"ops\.yaml"),
        ("model: 3\n", "model must be a mapping"),
    ],
)
def test_a_yaml_file_that_cannot_be_right(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        OpsConfig.parse("nowhere.yaml")


def test_what_is_no_configuration():
    with pytest.raises(ConfigError, match="pass 'auto', 'eager', a mapping or the path of a YAML, TOML"):
        OpsConfig.parse("fast")


def test_an_unknown_field_lists_the_valid_ones_and_the_nearest(known):
    with pytest.raises(ConfigError, match=r"code: unknown field 'scalee' \(did you mean 'scale'\?\); known: scale"):
        OpsConfig.parse({"scalee": "fast"}).rules(known)


def test_a_denied_backend_is_named_for_the_op_and_not_for_a_variant(known):
    known.records.append(opslot.BackendRecord("far", "acme-far", "1.0", denied="denied by OPSLOT_BACKENDS='-far'"))
    problem = "code: scale: kernel 'far' for scale: backend 'far' of acme-far 1.0 is denied by OPSLOT_BACKENDS='-far'"
    with pytest.raises(opslot.BackendError, match=problem):
        OpsConfig.parse({"scale": "far"}).rules(known)


def test_two_fields_of_one_op_are_refused(known):
    with pytest.raises(ConfigError, match="'scale' and 'scaling' both choose scale/standard"):
        OpsConfig.parse({"scale": "fast", "scaling": "slow"}).rules(known)


def test_a_typo_is_noticed_whatever_the_model_has(known):
    problem = (
        r"code: scale: no kernel 'fasst' for any variant of scale \(did you mean 'fast'\?\); known: eager, auto, .*fast"
    )
    with pytest.raises(opslot.UnknownKernel, match=problem):
        OpsConfig.parse({"scale": "fasst"}).rules(known)
    with pytest.raises(opslot.UnknownKernel):
        OpsConfig.parse({"scale": {"other": "fast"}}).rules(known)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "ops.yaml").write_bytes(b"scale: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"ops\.yaml: 'utf-8' codec"):
        OpsConfig.parse(tmp_path / "ops.yaml")


def test_a_choice_that_stands_outside_the_level_that_counts_is_not_dropped(known):
    for tree in (
        {"model": {"ops_implementation": {}}, "scale": "fast"},
        {"model": {"ops_implementation": {}, "scael_implementation": "fast"}},
    ):
        with pytest.raises(ConfigError, match="stands outside `ops_implementation:` and would have no effect"):
            OpsConfig.parse(tree).rules(known)
    other = {"model": {"ops_implementation": {"scale": "fast"}, "config_path": "x"}, "data": {"path": "y"}}
    assert OpsConfig.parse(other).rules(known)


def test_a_variant_may_be_named_through_an_alias_of_the_op(known):
    assert selected(OpsConfig.parse({"rescale": {"standard": "fast"}}), known) == {("scale", "standard"): "fast"}


def test_a_config_made_by_hand_is_checked_too(known):
    with pytest.raises(ConfigError, match="scale must be the name of a kernel, got None"):
        OpsConfig(choices={"scale": None}).rules(known)


TEXTS = {
    "yaml": """
default: eager
strict: true
scale: {standard: fast}
modules:
  "layers.*.norm": {scale: eager}
  layers.0.**: {scale/standard: slow}
""",
    "toml": """
default = "eager"
strict = true
scale = {standard = "fast"}
[modules]
"layers.*.norm" = {scale = "eager"}
"layers.0.**" = {"scale/standard" = "slow"}
""",
    "json": """
{"default": "eager", "strict": true, "scale": {"standard": "fast"},
 "modules": {"layers.*.norm": {"scale": "eager"}, "layers.0.**": {"scale/standard": "slow"}}}
""",
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", TEXTS)
def test_yaml_toml_and_json_say_the_same(tmp_path, suffix, nested):
    path = tmp_path / f"ops.{suffix}"
    text = TEXTS[suffix]
    if nested and suffix == "yaml":
        text = "model:\n  ops_implementation:\n" + textwrap.indent(text, "    ")
    elif nested and suffix == "json":
        text = '{"model": {"ops_implementation": ' + text + "}}"
    elif nested:
        text = "[model.ops_implementation]\n" + text.replace("[modules]", "[model.ops_implementation.modules]")
    path.write_text(text, encoding="utf-8")
    config = OpsConfig.parse(path)
    assert config.to_dict() == yaml.safe_load(TEXTS["yaml"])
    assert OpsConfig.parse(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("ops.json", '{"scale": "fast",\n "scale": "slow"}', "'scale' is given twice"),
        ("ops.json", '{"scale":\n "fast",}', r"ops\.json, line 2: not valid JSON"),
        ("ops.json", "[]", "expected a mapping of fields to kernel names, got list"),
        ("ops.toml", 'scale = "fast"\nscale = "slow"\n', r"ops\.toml: not valid TOML: .*line 2"),
        ("ops.toml", "scale = 1\n", "must be the name of a kernel, got 1"),
    ],
)
def test_a_toml_or_json_file_that_cannot_be_right(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        OpsConfig.parse(tmp_path / name)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"modules": "fast"}, "modules must map globs to choices, got 'fast'"),
        ({"modules": {"a": "fast"}}, "got 'a': 'fast'"),
        ({"modules": {"a": {}}}, "got 'a': {}"),
        ({"modules": {"a..b": {"scale": "fast"}}}, r"got 'a\.\.b'"),
        ({"modules": {1: {"scale": "fast"}}}, "got 1: "),
        ({"modules": {"a": {"default": "eager"}}}, "default cannot be chosen per module, got it for 'a'"),
        ({"modules": {"a": {"strict": True}}}, "strict cannot be chosen per module"),
        (
            {"ops_implementation": {}, "strict": True},
            "'strict' stands beside `ops_implementation:` and belongs into it",
        ),
        ({"model": {"config_path": "x"}}, "`model:` has no `ops_implementation:`"),
        ({"modules": {"a": {"attn_implementation": "sdpa"}}}, "attn_implementation cannot be chosen per module"),
        ({"modules": {"a": {"scale": None}}}, "code: modules 'a': scale must be the name of a kernel, got None"),
        ({"strict": "yes"}, "strict must be true or false, got 'yes'"),
    ],
)
def test_overrides_that_cannot_be_right(tree, problem):
    with pytest.raises(ConfigError, match=problem):
        OpsConfig.parse(tree)


def test_one_contract_as_a_field(known):
    assert selected(OpsConfig.parse({"scale/other": "auto"}), known) == {("scale", "other"): "auto"}
    with pytest.raises(ConfigError, match="'scale' and 'scale/other' both choose scale/other"):
        OpsConfig.parse({"scale": "eager", "scale/other": "auto"}).rules(known)
    with pytest.raises(ConfigError, match="scale/other names one variant already"):
        OpsConfig.parse({"scale/other": {"other": "auto"}}).rules(known)


def test_the_environment_wins_over_code_and_code_over_a_file(tmp_path, known, monkeypatch):
    path = tmp_path / "ops.yaml"
    path.write_text("scale: slow\ndefault: eager\nattn_implementation: sdpa\n")
    code = OpsConfig.parse({"scale/standard": "fast"}).over(path)
    monkeypatch.setenv("OPSLOT_OPS", " scale/other=eager, default=auto ,")
    with pytest.raises(ConfigError, match=r"OPSLOT_OPS: '' is not of the form FIELD=KERNEL"):
        OpsConfig.from_environment()
    monkeypatch.setenv("OPSLOT_OPS", " scale/other=eager, default=auto ")
    config = OpsConfig.from_environment().over(code)
    assert config.setting("default") == ("auto", "OPSLOT_OPS")
    assert config.setting("attn_implementation") == ("sdpa", str(path))
    with pytest.raises(ConfigError, match=r"OPSLOT_OPS was laid over code, which one mapping may not be able to say"):
        config.to_dict()
    last = {rule.key: (rule.kernel, rule.origin) for rule in config.rules(known)}
    assert last == {("scale", "standard"): ("fast", "code"), ("scale", "other"): ("eager", "OPSLOT_OPS")}
    assert [r.origin for r in config.rules(known)] == [str(path)] * 2 + ["code", "OPSLOT_OPS"]


@pytest.mark.parametrize("text", ["scale", "scale=", "=fast", "scale=fast,scale=slow", "scale:fast", "scale=fast;a"])
def test_an_environment_that_does_not_parse_names_the_variable(known, monkeypatch, text):
    monkeypatch.setenv("OPSLOT_OPS", text)
    with pytest.raises(OpslotError, match="OPSLOT_OPS"):
        OpsConfig.from_environment().rules(known)


def test_without_the_variable_there_is_no_layer(monkeypatch):
    monkeypatch.delenv("OPSLOT_OPS", raising=False)
    assert OpsConfig.from_environment() is None
    monkeypatch.setenv("OPSLOT_OPS", "  ")
    assert OpsConfig.from_environment() is None


def test_a_kernel_of_an_absent_distribution_is_no_typo(monkeypatch):
    """Nor is the field of an op that has no contract here: a configuration made for a larger installation parses."""
    monkeypatch.setitem(_catalog.KERNELS, "later_op", {"fla": "opslot-backend-fla"})
    config = OpsConfig.parse({"moe_implementation": "fused_quack", "later_op_implementation": "fla"})
    keys = {rule.field: rule.key for rule in config.rules(opslot.registry())}
    assert keys == {
        "moe_implementation": ("moe_experts", "standard"),
        "later_op_implementation": None,
    }
    with pytest.raises(opslot.UnknownKernel, match="no kernel 'flaa' for later_op, an op without"):
        OpsConfig.parse({"later_op": "flaa"}).rules(opslot.registry())
    with pytest.raises(opslot.UnknownKernel, match="opslot-backend-quack would bring it, and is not installed"):
        opslot.registry().offer("moe_experts", "standard", "fused_quack")
