import opslot
import pytest
from opslot import ConfigError, OpsConfig


def read(tmp_path, text):
    path = tmp_path / "ops.yaml"
    path.write_text(text, encoding="utf-8")
    return OpsConfig.parse(path)


def selected(config, known):
    return {key: name for key, (name, _) in config.select(known).items()}


def test_none_and_the_two_words(known):
    assert OpsConfig.parse(None) == OpsConfig(default="auto")
    assert OpsConfig.parse("eager").default == "eager"
    assert OpsConfig.parse("auto").select(known) == {}


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
    assert config == OpsConfig({"scale": "fast"}, "eager", "sdpa", str(tmp_path / "ops.yaml"))


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
    with pytest.raises(ConfigError, match="pass 'auto', 'eager', a mapping or the path of a YAML file"):
        OpsConfig.parse("fast")


def test_an_unknown_field_lists_the_valid_ones_and_the_nearest(known):
    with pytest.raises(ConfigError, match=r"code: unknown field 'scalee' \(did you mean 'scale'\?\); known: scale"):
        OpsConfig.parse({"scalee": "fast"}).select(known)


def test_two_fields_of_one_op_are_refused(known):
    with pytest.raises(ConfigError, match="'scale' and 'scaling' both choose scale/standard"):
        OpsConfig.parse({"scale": "fast", "scaling": "slow"}).select(known)


def test_a_typo_is_noticed_whatever_the_model_has(known):
    with pytest.raises(opslot.UnknownKernel, match=r"code: scale: no kernel 'fasst'.*did you mean 'fast'"):
        OpsConfig.parse({"scale": "fasst"}).select(known)
    with pytest.raises(opslot.UnknownKernel):
        OpsConfig.parse({"scale": {"other": "fast"}}).select(known)


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
            OpsConfig.parse(tree).select(known)
    other = {"model": {"ops_implementation": {"scale": "fast"}, "config_path": "x"}, "data": {"path": "y"}}
    assert OpsConfig.parse(other).select(known)


def test_a_variant_may_be_named_through_an_alias_of_the_op(known):
    assert selected(OpsConfig.parse({"rescale": {"standard": "fast"}}), known) == {("scale", "standard"): "fast"}


def test_a_config_made_by_hand_is_checked_too(known):
    with pytest.raises(ConfigError, match="scale must be the name of a kernel, got None"):
        OpsConfig(choices={"scale": None}).select(known)
