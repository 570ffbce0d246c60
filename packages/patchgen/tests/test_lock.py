"""What a lock says of a target, and what it counts as a dependency."""

import json

import pytest
from opslot_patchgen import EntryGuard, ForwardGuard, LockError, ModelSpec, Slot, SpecPackage, plan, read_lock

MODULE = "transformers.models.tiny.modeling_tiny"
SOURCE = '''\
from torch import nn

from ...modeling_utils import PreTrainedModel

SCALE = 2
if SCALE:
    from ...utils import other

    def pick(x):
        return other(x) * SCALE
else:
    def pick(x):
        return x


def unused(x):
    return x


def helper(x, /, y=(1,)):
    return pick(x)


class Cache:
    def get(self):
        return helper(1)


class TinyPreTrainedModel(PreTrainedModel):
    config: object


class Base(nn.Module):
    eps = 1e-6
    other = 3

    def __init__(self, dim):
        super().__init__()
        self.part = TinyMLP(dim)

    def fill(self):
        self.register_buffer("table", unused)

    def _norm(self, x):
        return helper(x)

    def reset(self):
        self.scale = 1

    def rename(self):
        self.name = 2


@wrapped(
    "a",  # why
    """one
two""",
    size=2,
)
class TinyNorm(Base):
    def forward(self, x: int, y: Cache = None, *rest, z: int = 3, **more) -> int:
        """Doc."""
        return self._norm(x) * self.scale + self.eps + self.part(self.table)


class TinyMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return Cache().get()


class TinyExperts(nn.Module):
    def __init__(self, dim):
        self.up = dim

    def forward(self, x, *, y):
        return x
'''
GUARDS = (
    EntryGuard(target="TinyNorm.forward", slot=Slot("rms_norm", "standard"), result="kernel(x)"),
    EntryGuard(target="TinyMLP.forward", slot=Slot("glu", "swiglu"), result="kernel(x)"),
    ForwardGuard(target="TinyExperts", slot=Slot("moe_experts", "standard"), attributes=("up",)),
)


@pytest.fixture
def lock(upstream, tmp_path):
    def write(source=SOURCE):
        spec = ModelSpec(family="tiny", source=MODULE, guards=GUARDS)
        planned = plan(SpecPackage("acme.patches", tmp_path / "acme/patches", (spec,)), upstream(source))
        assert planned.refusals == ()
        planned.write()
        return tmp_path / "acme/generated/v5_24/lock.json"

    return write


@pytest.fixture
def targets(lock):
    return read_lock(lock()).families["tiny"].targets


def test_the_file(lock):
    path = lock()
    data = json.loads(path.read_text())
    assert path.read_text() == json.dumps(data, indent=1, sort_keys=True) + "\n"
    assert data["transformers"] == "5.24.0"
    family = data["families"]["tiny"]
    assert sorted(family) == ["maths", "sha256", "source", "targets"]
    assert sorted(family["targets"]["TinyNorm.forward"]) == [
        "decorators",
        "depends",
        "guards",
        "maths",
        "parameters",
        "slots",
    ]
    assert read_lock(path).text() == path.read_text()


def test_targets(targets):
    assert {name: (target.slots, target.guards) for name, target in targets.items()} == {
        "TinyNorm.forward": (("rms_norm/standard",), ("EntryGuard",)),
        "TinyMLP.forward": (("glu/swiglu",), ("EntryGuard",)),
        "TinyExperts.forward": (("moe_experts/standard",), ("ForwardGuard",)),
    }
    assert targets["TinyNorm.forward"].code.parameters == ("self", "x", "y=None", "*rest", "z=3", "**more")
    assert targets["TinyExperts.forward"].code.parameters == ("self", "x", "*", "y")
    depends = targets["TinyNorm.forward"].depends
    assert depends["helper"].parameters == ("x", "/", "y=(1,)")
    assert depends["TinyNorm"].decorators == ('wrapped("a", """one\\ntwo""", size=2)',)


def test_dependencies_are_what_is_called_read_and_inherited(targets):
    """`rename` sets nothing that is read, `other` is not read, and TinyMLP is a submodule with a target of its own."""
    assert sorted(targets["TinyNorm.forward"].depends) == [
        "(statements)",
        "Base",
        "Base.__init__",
        "Base._norm",
        "Base.eps",
        "Base.fill",
        "Base.reset",
        "SCALE",
        "TinyNorm",
        "helper",
        "nn",
        "other",
        "pick",
        "unused",
    ]


def test_a_class_that_is_no_submodule_is_a_dependency_with_its_methods(targets):
    depends = sorted(targets["TinyMLP.forward"].depends)
    classes = ["Cache", "Cache.get", "SCALE", "TinyMLP", "TinyMLP.__init__"]
    assert depends == ["(statements)", *classes, "helper", "nn", "other", "pick"]


def test_every_definition_of_a_name_counts(lock, targets):
    other = read_lock(lock(SOURCE.replace("        return x\n\n\ndef unused", "        return -x\n\n\ndef unused")))
    before, after = (of["TinyNorm.forward"].depends for of in (targets, other.families["tiny"].targets))
    assert {name for name in before if before[name] != after[name]} == {"pick"}


# What changes how TinyNorm.forward runs, though neither it nor anything that it names is written in another way.
ELSEWHERE = {
    "an import from another module": ("from torch import nn", "from other import nn", "nn"),
    "an import that shadows": ("class Cache:", "from ...utils import helper\n\n\nclass Cache:", "helper"),
    "an import of all names": ("class Cache:", "from ...utils import *\n\n\nclass Cache:", "*"),
    "a call": ("class TinyMLP", "replace(globals())\n\n\nclass TinyMLP", "(statements)"),
    "a loop": ("class TinyMLP", "for each in (1,):\n    SCALE = each\n\n\nclass TinyMLP", "(statements)"),
    "a call in the class": ("    eps = 1e-6", "    replace(locals())\n    eps = 1e-6", "Base.(statements)"),
    "a condition": ("if SCALE:", "if SCALE > 3:", "(statements)"),
    "a decorator's body": ("return function", "return print", "wrapped"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_may_replace_a_dependency_is_one(case, lock):
    old, new, name = ELSEWHERE[case]
    source = SOURCE.replace("SCALE = 2", "def wrapped(*given, **more):\n    return function\n\n\nSCALE = 2")
    assert source.count(old) == 1
    texts = (source, source.replace(old, new))
    before, after = (read_lock(lock(text)).families["tiny"].targets["TinyNorm.forward"].depends for text in texts)
    assert {used for used in before.keys() | after.keys() if before.get(used) != after.get(used)} == {name}


def test_other_names_of_an_import_are_no_dependency(lock, targets):
    other = read_lock(lock(SOURCE.replace("from torch import nn", "from torch import fx, nn")))
    assert other.families["tiny"].targets == targets


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"transformers": "5.24.0", "families": {"tiny": {}}}'])
def test_what_is_not_a_lock_is_refused(text, lock):
    path = lock()
    path.write_text(text)
    with pytest.raises(LockError, match=r"lock\.json: not a lock .*`opslot-patchgen generate` writes it anew"):
        read_lock(path)


def test_no_lock_is_refused(tmp_path):
    with pytest.raises(LockError, match=r"lock\.json: no such file"):
        read_lock(tmp_path / "lock.json")
