"""Reports, fingerprints and where a kernel's code comes from."""

import importlib
import json
import logging
import re
import sys
import zipfile
from dataclasses import fields, replace
from hashlib import sha256
from importlib.resources import files

import opslot
import pytest
import torch
from opslot import Backend, Row, bind
from opslot._report import collapse

KERNEL = "def one(x, weight, factor=2.0):\n    return x * weight * factor\n"


@pytest.fixture
def model(scale_class):
    return torch.nn.Sequential(*(scale_class() for _ in range(6)))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([""], ["(the model)"]),
        (["norm", "norm"], ["norm"]),
        (["layers.7.mlp"], ["layers.7.mlp"]),
        ([f"layers.{i}.mlp" for i in (0, 1, 2, 3, 5)], ["layers.{0-3,5}.mlp"]),
        ([f"layers.{i}.mlp" for i in (10, 9, 11)], ["layers.{9-11}.mlp"]),
        ([f"l.{i}.e.{j}.up" for i in range(3) for j in range(8)], ["l.{0-2}.e.{0-7}.up"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1", "l.2.e.1"], ["l.{0-1}.e.{0-1}", "l.2.e.1"]),
        (["l.0.a", "l.0.b", "l.1.a"], ["l.{0-1}.a", "l.0.b"]),
        (["0", "1", "3"], ["{0-1,3}"]),
    ],
)
def test_names_that_differ_in_numbers_are_one_and_no_other_is_meant(names, expected):
    assert collapse(names) == expected


def test_the_report_shows_which_layers_differ(known, model):
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    eager = {"kernel": "eager", "distribution": "", "version": "", "reason": "auto: it has hooks"}
    binding.rows = tuple(replace(row, **eager) if row.module in "235" else row for row in binding.rows)
    assert str(binding).splitlines()[1:] == [
        "  scale/standard",
        "    fast acme 2.0, 3 x  [asked for: scale in code]",
        "      {0-1,4}",
        "    eager, 3 x  [auto: it has hooks]",
        "      {2-3,5}",
    ]


def test_every_bind_is_one_log_record_that_carries_its_binding(known, model):
    seen = []

    class Observer(logging.Handler):
        def emit(self, record):
            seen.append(record)
            if len(seen) > 1:
                raise RuntimeError("the observer")

    logger, observer = logging.getLogger("opslot"), Observer()
    logger.addHandler(observer)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        binding = bind(model, "auto", device="cpu", registry=known)
        with pytest.raises(RuntimeError, match="the observer"):
            bind(model, {"scale": "slow"}, device="cpu", registry=known)
    finally:
        logger.removeHandler(observer)
        logger.setLevel(level)
    assert model[0].scale_op.offer.spec.name == "fast"  # as it was before the bind that failed
    record, _ = seen
    assert record.opslot_binding is binding
    assert record.getMessage() == str(binding)


def offered(known, target, **fields):
    """The row of a model bound to a kernel of this target, from a distribution of its own."""
    spec = opslot.KernelSpec(op="scale", name="lazy", target=target, **fields)
    registry = opslot.Registry()
    registry.add(Backend(api=1, contracts=known.contracts(), device_kinds=tuple(known._kinds.values())), "core")
    registry.add(Backend(api=1, kernels=(spec,)), "lazy-dist", "1.0")
    return registry


def bound(registry, scale_class):
    return bind(scale_class(), {"scale": "lazy"}, device="cpu", registry=registry)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write modules into a folder on the path; they are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(sources=()):
        for name, source in dict(sources).items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_source_is_the_hash_of_the_kernels_file(known, scale_class, modules):
    folder = modules({"lazy_kernels.py": KERNEL})
    registry = offered(known, "lazy_kernels:one")
    first = bound(registry, scale_class)
    expected = sha256((folder / "lazy_kernels.py").read_bytes()).hexdigest()
    assert first.rows[0].source == f"sha256:{expected}"
    assert bound(registry, scale_class).fingerprint == first.fingerprint
    (folder / "lazy_kernels.py").write_text(KERNEL + "# edited\n")
    assert bound(registry, scale_class).fingerprint != first.fingerprint
    (folder / "lazy_kernels.py").unlink()
    assert bound(registry, scale_class).rows[0].source == "unknown"


def test_a_kernel_that_its_package_only_passes_on_counts_with_the_file_that_has_it(known, scale_class, modules):
    sources = {"lazy_pkg/__init__.py": "from ._impl import one\n", "lazy_pkg/_impl.py": KERNEL}
    folder = modules(sources)
    registry = offered(known, "lazy_pkg:one")
    first = bound(registry, scale_class)
    (folder / "lazy_pkg/_impl.py").write_text("# edited\n" + KERNEL)
    assert bound(registry, scale_class).rows[0].source != first.rows[0].source


def test_a_kernel_in_a_zip_has_a_source_and_one_without_a_file_is_unknown(known, scale_class, modules, monkeypatch):
    folder = modules()
    source = KERNEL
    with zipfile.ZipFile(folder / "kernels.zip", "w") as archive:
        archive.writestr("zipped_kernels.py", source)
    monkeypatch.syspath_prepend(folder / "kernels.zip")
    row = bound(offered(known, "zipped_kernels:one"), scale_class).rows[0]
    assert row.source == f"sha256:{sha256(source.encode()).hexdigest()}"

    made = type(sys)("made_kernels")
    exec(source, vars(made))
    monkeypatch.setitem(sys.modules, "made_kernels", made)
    assert bound(offered(known, "made_kernels:one"), scale_class).rows[0].source == "unknown"


def test_the_nested_backend_is_asked_when_bound_and_counts(known, scale_class):
    answers = ["triton", "cutedsl"]
    registry = offered(known, known.offer("scale", "standard", "fast").spec.target, nested=lambda: answers[0])
    one = bound(registry, scale_class)
    assert one.rows[0].nested == "triton"
    assert "lazy (triton) lazy-dist 1.0" in str(one)
    answers.reverse()
    assert bound(registry, scale_class).fingerprint != one.fingerprint
    answers[0] = None
    with pytest.raises(opslot.SpecError, match="nested must return a string, got None"):
        bound(registry, scale_class)
    with pytest.raises(opslot.SpecError, match="nested: target 'nonsense'"):
        offered(known, "a:b", nested="nonsense")


def test_the_environment_has_the_libraries_behind_the_kernels_in_use(known, make_kernel, scale_class):
    requires = opslot.Requires(packages=("packaging>=1",))
    known.add(Backend(api=1, kernels=(make_kernel("needy", requires=requires),)), "needy-dist", "3.1")
    environment = bind(scale_class(), {"scale": "needy"}, device="cpu", registry=known).environment()
    assert environment["needy-dist"] == "3.1"
    assert environment["packaging"] == importlib.metadata.version("packaging")
    assert environment["torch"] == torch.__version__
    other = bind(scale_class(), {"scale": "fast"}, device="cpu", registry=known)
    assert set(other.environment()) == {"device", "python", "opslot", "torch", "acme"}
    moved = bind(scale_class(), {"scale": "fast"}, device=opslot.Device("cpu", "other"), registry=known)
    assert moved.fingerprint == other.fingerprint
    assert moved.environment_fingerprint != other.environment_fingerprint


def problems(value, schema, where="binding"):
    """The part of JSON Schema that ours uses."""
    kinds = {"object": dict, "array": list, "string": str}
    if "const" in schema and value != schema["const"]:
        return [f"{where} is not {schema['const']}"]
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return [f"{where} is no {schema['type']}"]
    found = []
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where} does not match {schema['pattern']}")
    if isinstance(value, dict):
        found += [f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            part = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            found += [f"{where}.{name} is not described"] if part is None else problems(item, part, f"{where}.{name}")
    if isinstance(value, list):
        found += [p for i, item in enumerate(value) for p in problems(item, schema["items"], f"{where}[{i}]")]
    return found


def test_the_json_is_as_its_published_schema_says(known, make_contract, model, scale_class):
    schema = json.loads((files("opslot") / "binding.schema.json").read_text())
    known.add(Backend(api=1, contracts=(make_contract("spare"),)), "more")
    mixed = torch.nn.Sequential(scale_class(), scale_class(torch.nn.SiLU()))
    data = json.loads(bind(mixed, {"mhc": "tilelang"}, device="cpu", registry=known).to_json())
    assert data["unused"]
    assert problems(data, schema) == []
    assert {row["kernel"] for row in data["slots"]} == {"fast", "eager"}
    assert set(schema["properties"]["slots"]["items"]["required"]) == {field.name for field in fields(Row)}
    assert problems({**data, "schema": 2}, schema)
    assert problems({**data, "slots": [{**data["slots"][0], "source": "sha256:1"}]}, schema)
    assert problems({**data, "new": ""}, schema)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["", "0", "1"], ["(the model)", "{0-1}"]),
        (["0", "", "1"], ["{0-1}", "(the model)"]),
        (["l.01.n", "l.1.n"], ["l.01.n", "l.1.n"]),
        (["l.0.n", "l.1.n", "l.3.n"], ["l.{0-1,3}.n"]),
        (["l.\u0663.n"], ["l.\u0663.n"]),
    ],
)
def test_a_collapsed_name_means_exactly_these_modules(names, text):
    assert collapse(names) == text
