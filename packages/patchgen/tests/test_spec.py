"""Specs contradict themselves early, and are loaded without running their parent packages."""

import sys

import pytest
from opslot_patchgen import CallGuard, EntryGuard, ModelSpec, RegionGuard, Slot, SpecError, load_specs

NORM = Slot("rms_norm", "standard")
SPEC = """\
from opslot_patchgen import EntryGuard, ModelSpec, Slot

SPEC = ModelSpec(
    family="tiny",
    source="transformers.models.tiny.modeling_tiny",
    guards=(EntryGuard(target="TinyMLP.forward", slot=Slot("glu", "swiglu"), result="kernel(x)"),),
)
"""


def entry(**changes):
    return EntryGuard(**{"target": "A.forward", "slot": NORM, "result": "kernel(x)", **changes})


def region(**changes):
    values = {
        "target": "A.forward",
        "slot": NORM,
        "first": "f",
        "last": "g",
        "when": "x",
        "result": "y",
        "arguments": (),
    }
    return RegionGuard(**{**values, **changes})


def model(*guards, **changes):
    return ModelSpec(
        **{"family": "tiny", "source": "transformers.models.tiny.modeling_tiny", "guards": guards, **changes}
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Slot("rms-norm", "standard"),
        lambda: Slot("rms_norm", ""),
        lambda: Slot("rms_norm", "standard", activation="self.act"),
        lambda: Slot("rms_norm", "standard", check="own_loss"),
        lambda: entry(target="forward"),
        lambda: entry(result="kernel(x"),
        lambda: entry(result="kernel(\nx)"),
        lambda: entry(result="kernel(x)  # why"),
        lambda: CallGuard(target="A.forward", slot=NORM, call="f(x)"),
        lambda: region(first="f()"),
        lambda: region(result="self.loss"),
        lambda: region(when="return"),
        lambda: region(arguments=("x", "y=")),
        lambda: model(),
        lambda: model((entry(),)),
        lambda: entry(since=("5", "no weight")),
        lambda: entry(since=("5.24", "")),
        lambda: entry(before="f(x)"),
        lambda: CallGuard(target="A.forward", slot=NORM, call="f", result="kernel(x"),
        lambda: CallGuard(target="A.forward", slot=NORM, call="f", forwarded=(("cu seqlens", "x"),)),
        lambda: CallGuard(target="A.forward", slot=NORM, call="f", result="kernel(x)", forwarded=()),
        lambda: CallGuard(target="A.forward", slot=NORM, call="f", uses=("acme.losses:own",)),
        lambda: model(entry(), untrained=("A.forward",)),
        lambda: model(entry(), source="torch.nn"),
        lambda: model(entry(), family="tiny-moe"),
    ],
)
def test_malformed_specs_are_refused(make):
    with pytest.raises(SpecError):
        make()


def test_a_duplicate_guard_is_refused():
    with pytest.raises(SpecError, match=r"tiny: guarded twice: A\.forward"):
        model(entry(), entry(slot=Slot("glu", "swiglu")))


def test_a_function_that_nothing_uses_is_refused():
    region(when="own(x)", uses=("acme.losses:own",))
    with pytest.raises(
        SpecError, match=r"A\.forward: uses 'acme\.losses:own', but no expression of the guard names own"
    ):
        region(when="owned(x)", uses=("acme.losses:own",))


def test_specs_are_data():
    with pytest.raises(AttributeError):
        entry().result = "kernel(y)"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An `acme.patches` whose parent must not be run."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "acme/patches"
    folder.mkdir(parents=True)
    (tmp_path / "acme/__init__.py").write_text("raise RuntimeError('the parent package was run')\n")
    (folder / "__init__.py").write_text("")
    (folder / "tiny.py").write_text(SPEC)
    return folder


def test_specs_load_without_their_parents(package):
    loaded = load_specs("acme.patches")
    assert [spec.family for spec in loaded.specs] == ["tiny"]
    assert loaded.generated == package.parent / "generated"
    assert "acme" not in sys.modules


def test_specs_share_data_without_their_parents(package):
    (package / "_shared.py").write_text('RESULT = "kernel(x)"\n')
    shared = SPEC.replace('"kernel(x)"', "RESULT").replace("\n\n", "\n\nfrom ._shared import RESULT\n\n", 1)
    for family in ("tiny", "small"):
        (package / f"{family}.py").write_text(shared.replace('"tiny"', f'"{family}"'))
    loaded = load_specs("acme.patches")
    assert [spec.family for spec in loaded.specs] == ["small", "tiny"]
    assert {guard.result for spec in loaded.specs for guard in spec.guards} == {"kernel(x)"}
    assert [name for name in sys.modules if name.startswith(("acme", "_opslot"))] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from ._shared import RESULT\n", "cannot be imported: ModuleNotFoundError"),
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError"),
        ("x = = 1\n", "cannot be imported: SyntaxError"),
        ("raise SystemExit(0)\n", "cannot be imported: SystemExit: 0"),
        ("raise RuntimeError('no')\n", "cannot be imported: RuntimeError: no"),
        (SPEC.replace("guards=", "guard="), "cannot be imported: TypeError"),
        (SPEC.replace("kernel(x)", "kernel(x"), "not an expression"),
        (SPEC.replace("SPEC", "spec"), "has no SPEC"),
        ("SPEC = {}\n", "has no SPEC that is a ModelSpec"),
        (SPEC.replace('family="tiny"', 'family="small"'), "specifies another, small"),
    ],
)
def test_a_broken_spec_module_is_refused_by_name(text, message, package):
    (package / "tiny.py").write_text(text)
    with pytest.raises(SpecError, match=message) as raised:
        load_specs("acme.patches")
    assert str(raised.value).startswith(str(package / "tiny.py"))


def test_no_specs_are_refused(package):
    (package / "tiny.py").unlink()
    with pytest.raises(SpecError, match="no specs"):
        load_specs("acme.patches")


@pytest.mark.parametrize("name", ["acme.patch", "no_such_package", "no_such_package.patches"])
def test_an_unknown_package_is_refused(name, package):
    with pytest.raises(SpecError, match="no such package"):
        load_specs(name)
