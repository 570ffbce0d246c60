"""What docs/stability.md promises: the public names, backends of every supported API version, opslot in a zip."""

import dataclasses
import enum
import hashlib
import importlib.metadata
import inspect
import json
import re
import sys
import zipfile
from pathlib import Path

import opslot
import opslot.autograd
import opslot.testing
import pytest

DATA = Path(__file__).parent / "data"
FROZEN = DATA / "opslot_backend_frozen-1.0-py3-none-any.whl"
SURFACE = DATA / "public-names.json"
WORDS = "see docs/stability.md"
TESTING = ("CHECKS", "KernelSuite", "check", "poisoned_memory", "triton_interpreter")
# Callers read these; opslot constructs them.
MADE_BY_OPSLOT = (opslot.BackendRecord, opslot.Binding, opslot.Choice, opslot.Offer, opslot.Row)


def surface() -> dict[str, dict]:
    """Every public name with what a caller may rely on: parameters, members, values, bases."""
    public = {name: getattr(opslot, name) for name in opslot.__all__}
    public |= {f"testing.{name}": getattr(opslot.testing, name) for name in TESTING}
    public |= {f"autograd.{name}": getattr(opslot.autograd, name) for name in opslot.autograd.__all__}
    return {name: described(value) for name, value in sorted(public.items())}


def described(value) -> dict:
    if not isinstance(value, type):
        return {"parameters": parameters(value)} if callable(value) else {}
    if issubclass(value, enum.Enum):
        return {"members": {item.name: {} for item in value}, "values": {item.name: item.value for item in value}}
    if issubclass(value, Exception):
        return {"bases": [base.__name__ for base in value.__mro__ if base not in (value, object)]}
    names = {name for name in (*dir(value), *getattr(value, "__annotations__", ())) if not name.startswith("_")}
    if not dataclasses.is_dataclass(value) and "__init__" in vars(value):
        names |= set(re.findall(r"\bself\.([a-z]\w*)(?:: .*)? = ", inspect.getsource(value.__init__)))
    made = value in MADE_BY_OPSLOT
    members = {n: m for n in names if not (inspect.ismethod(m := getattr(value, n, None)) and made)}
    return {
        "parameters": {} if made else parameters(value),
        "members": {
            name: {"parameters": parameters(member)} if inspect.isfunction(member) or inspect.ismethod(member) else {}
            for name, member in members.items()
        },
    }


def parameters(function) -> dict[str, list]:
    """Name: kind, whether it may be left out, and for those that may be passed by position their place."""
    found = {}
    for place, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        found[name] = [parameter.kind.name, parameter.default is not parameter.empty, place if positional else None]
    return found


def breaks(old: dict, new: dict | None, where: str) -> list[str]:
    """What a caller who relies on `old` meets in `new`. Additions are none of it."""
    if new is None:
        return [f"{where} has disappeared"]
    found = []
    for base in old.get("bases", []):
        if base not in new["bases"]:
            found.append(f"{where} is no {base} any more")
    for name, value in old.get("values", {}).items():
        if new["values"].get(name) != value:
            found.append(f"{where}.{name} is not {value} any more")
    for name, member in old.get("members", {}).items():
        found += breaks(member, new["members"].get(name), f"{where}.{name}")
    before, now = old.get("parameters", {}), new.get("parameters", {})
    for name, (kind, optional, place) in before.items():
        if name not in now:
            found.append(f"{where} does not take {name!r} any more")
        elif optional and not now[name][1]:
            found.append(f"{where} requires {name!r} now")
        elif (now[name][0], now[name][2]) != (kind, place):
            found.append(f"{where} takes {name!r} in another way: {kind} {place} before, {now[name]} now")
    for name, (kind, optional, _) in now.items():
        if name not in before and before and not optional and not kind.startswith("VAR_"):
            found.append(f"{where} requires the new {name!r}")
    return found


def test_nothing_public_has_disappeared_or_become_required():
    now = surface()
    found = []
    for name, old in json.loads(SURFACE.read_text(encoding="utf-8")).items():
        found += breaks(old, now.get(name), name)
    assert not found, f"{'; '.join(found)}: {WORDS}"


def test_every_public_name_is_frozen():
    added = set(surface()) - set(json.loads(SURFACE.read_text(encoding="utf-8")))
    assert not added, f"write them down with `python packages/core/tests/test_stability.py`: {sorted(added)}, {WORDS}"


def test_specs_take_keywords_alone_so_that_fields_can_be_added():
    """Those that an author of a backend writes and that may grow."""
    for kind in (opslot.Backend, opslot.KernelSpec, opslot.OpContract, opslot.Requires, opslot.DeviceKind):
        assert {p.kind for p in inspect.signature(kind).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}, WORDS


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda a, b=1: 0, lambda a: 0, "f does not take 'b' any more"),
        (lambda a, b=1: 0, lambda a, b: 0, "f requires 'b' now"),
        (lambda a, b=1: 0, lambda b, a=1: 0, "f takes 'a' in another way"),
        (lambda a, b=1: 0, lambda a, b=1, *, c: 0, "f requires the new 'c'"),
        (lambda a: 0, lambda *, a: 0, "f takes 'a' in another way"),
    ],
)
def test_the_comparison_sees_a_break(before, after, words):
    (found, *_) = breaks(described(before), described(after), "f")
    assert found.startswith(words)
    assert breaks(described(before), None, "f") == ["f has disappeared"]


def test_the_comparison_lets_additions_pass():
    assert breaks(described(lambda a: 0), described(lambda a, b=1, *, c=2, **more: 0), "f") == []


def test_the_frozen_wheel_is_the_one_that_was_published():
    digest = hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    assert digest == "f270d7d8e04d5f8b40a5eb75f73955229a45f9a0edd510fd346407658791649b", f"never rebuild it: {WORDS}"
    archive = zipfile.ZipFile(FROZEN)
    for source in DATA.glob("frozen/src/*/*.py"):
        assert archive.read(source.relative_to(DATA / "frozen/src").as_posix()) == source.read_bytes(), source


@pytest.mark.slow
def test_a_backend_of_api_version_1_loads_binds_and_runs_from_its_wheel(site):
    """A wheel on the path is a zip, so neither module nor metadata is a file."""
    code = """
import opslot, sys, torch
from opslot.testing import check

known = opslot.registry()
(record,) = [r for r in known.records if r.distribution == "opslot-backend-frozen"]
if record.error:
    raise record.error
assert record.version == "1.0" and record.backend.api == 1 and record.imported == (), record
assert ".whl" in sys.modules["opslot_frozen"].__file__
assert known.contract("frozen_rescale").key == ("frozen_scale", "standard")
(reason, *_) = known.offer("frozen_scale", "standard", "frozen_elsewhere").spec.unmet(opslot.Device("cpu"))
assert "needs a frozen device" in reason, reason

class Scale(torch.nn.Module):
    frozen_scale_op = opslot.OpSlot("frozen_scale", "standard")
    def forward(self, x):
        kernel = self.frozen_scale_op.kernel
        if kernel is not None:
            return kernel(x)
        return x * 2.0

for config in ({"frozen_scale": "frozen"}, {"frozen_scaling": "fused_frozen_kernel"}, None):
    model, x = Scale(), torch.ones(2, requires_grad=True)
    binding = opslot.bind(model, config, device="cpu")
    assert binding.rows[0].kernel == "frozen", binding
    y = model(x)
    y.sum().backward()
    assert "_Scale" in type(y.grad_fn).__name__ and x.grad.tolist() == [2, 2]
    binding.unbind()
    assert "_Scale" not in type(model(x).grad_fn).__name__
for name in ("frozen", "frozen_by_name"):
    check("frozen_scale", "standard", name)
print("frozen ran")
"""
    assert site.python("-c", code, PYTHONPATH=str(FROZEN)).splitlines()[-1] == "frozen ran"


@pytest.mark.slow
def test_opslot_in_a_zip_with_a_backend_finds_lists_and_binds(site, tmp_path):
    """As zipapp bundles what `pip install --target` wrote: modules and metadata."""
    archive = tmp_path / "application.pyz"
    package, info = Path(opslot.__file__).parent, importlib.metadata.distribution("opslot")
    site.add("bundled", site.offering("", "kernel('rms_norm', 'bundled', 'bundled:norm'),") + "norm = None\n")
    (site.path / "bundled.py").write_text(
        site.offering("", "KernelSpec(op='rms_norm', name='bundled', target='bundled_norm:norm'),")
    )
    (site.path / "bundled_norm.py").write_text("def norm(x, weight, eps): return x * weight\n")
    main = "import opslot.tools.cli as c, sys\nsys.exit(c.main())\n"
    with zipfile.ZipFile(archive, "w") as file:
        for source in package.rglob("*.py"):
            file.write(source, source.relative_to(package.parent))
        for name in ("METADATA", "entry_points.txt"):
            file.writestr(f"opslot-{info.version}.dist-info/{name}", info.read_text(name))
        for source in site.path.rglob("*"):
            if source.is_file() and "__pycache__" not in source.parts:
                file.write(source, source.relative_to(site.path))
        file.writestr("__main__.py", main)
    code = f"""
import opslot, torch
assert opslot.__file__.startswith({str(archive)!r}), opslot.__file__
known = opslot.registry()
records = {{r.distribution: r for r in known.records}}
assert {{d: r.error for d, r in records.items() if r.error}} == {{}}
assert "application.pyz/opslot-" in records["opslot"].remark.split(" is used")[0], records["opslot"].remark
assert known.list_available("rms_norm", device=opslot.Device("cpu"))[:2] == ["eager", "bundled"]

class Norm(torch.nn.Module):
    rms_norm_op = opslot.OpSlot("rms_norm", "standard")
    def forward(self, x):
        kernel = self.rms_norm_op.kernel
        return kernel(x, torch.full_like(x, 3.0), 1e-6) if kernel is not None else x

model = Norm()
binding = opslot.bind(model, {{"rms_norm": "bundled", "default": "eager"}}, device="cpu")
assert model(torch.ones(1)).item() == 3.0 and "bundled 1.0" in str(binding)
binding.to_json()
opslot.registry().contract("rms_norm").doc()
print("bound")
"""
    empty = type(site)(tmp_path / "empty")
    assert empty.python("-c", code, PYTHONPATH=str(archive)).splitlines()[-1] == "bound"
    listing = empty.python(str(archive), "list")
    assert any(line.split()[:4] == ["rms_norm/standard", "bundled", "bundled", "yes"] for line in listing.splitlines())


def write() -> None:
    """Write the surface down, once a release: what stood there before must still hold."""
    SURFACE.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
