"""Where a choice holds: globs, shared modules, wrappers, layers of configuration, and for how long."""

import copy
import logging
import pickle
import random

import opslot
import pytest
import torch
from opslot import BindError, Binding, ConfigError, OpsConfig, OpSlot, OpslotError, bind, bound
from opslot._modules import canonical_modules, glob_pattern, matches
from torch.utils.checkpoint import checkpoint


class Layer(torch.nn.Module):
    def __init__(self, scale_class) -> None:
        super().__init__()
        self.norm = scale_class()
        self.mlp = torch.nn.Sequential(scale_class())

    def forward(self, x):
        return self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, scale_class, layers: int = 12) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(scale_class) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model(scale_class):
    return Model(scale_class)


def kernels(binding):
    return {row.module: row.kernel for row in binding.rows}


def layers_with(binding, kernel):
    return sorted({int(row.module.split(".")[1]) for row in binding.rows if row.kernel == kernel})


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("layers.1", ["layers.1"], ["layers.10", "layers.1.norm", "x.layers.1"]),
        ("layers.1*", ["layers.1", "layers.10"], ["layers.2", "layers.1.norm"]),
        ("layers.*.norm", ["layers.1.norm"], ["layers.norm", "layers.1.x.norm", "layers.1.norm.x"]),
        ("layers.1.**", ["layers.1", "layers.1.norm", "layers.1.mlp.0"], ["layers.10.norm", "layers"]),
        ("**.norm", ["norm", "layers.1.norm", "a.b.c.norm"], ["layers.1.norm2", "anorm", "layers.norm.x"]),
        ("**.norm.**", ["norm", "a.norm", "a.norm.b.c"], ["anorm.b"]),
        ("**", ["", "a", "a.b"], []),
        ("*", ["a", "layers"], ["", "a.b"]),
        ("", [""], ["a"]),
        ("a.+", ["a.+"], ["a.aa"]),
        ("l.{0-2,5}.*", ["l.0.n", "l.1.n", "l.2.n", "l.5.n"], ["l.3.n", "l.12.n", "l.{0-2,5}.n"]),
    ],
)
def test_globs_stay_within_the_parts_of_a_name(glob, yes, no):
    pattern = glob_pattern(glob)
    assert [name for name in yes + no if matches(pattern, name)] == yes


def test_a_glob_chooses_for_its_modules_and_the_last_match_wins(model, known):
    config = {
        "scale": "slow",
        "modules": {
            "layers.*.norm": {"scale": "fast"},
            "layers.1.**": {"scale": "eager"},
            "layers.1.mlp.*": {"scaling": "fast"},
        },
    }
    chosen = kernels(bind(model, config, device="cpu", registry=known))
    assert chosen["layers.0.norm"] == chosen["layers.10.norm"] == "fast"
    assert chosen["layers.0.mlp.0"] == chosen["layers.11.mlp.0"] == "slow"
    assert (chosen["layers.1.norm"], chosen["layers.1.mlp.0"]) == ("eager", "fast")


def test_the_report_says_which_rule_decided(model, known):
    binding = bind(model, {"modules": {"layers.3.**": {"scale": "slow"}}}, device="cpu", registry=known)
    row = next(row for row in binding.rows if row.module == "layers.3.norm")
    assert row.reason == "asked for: modules 'layers.3.**': scale in code"


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ({"layer.*.norm": {"scale": "fast"}}, r"modules 'layer\.\*\.norm': scale in code: no module of Model matches"),
        ({"layers.3.nrom": {"scale": "fast"}}, r"no module of Model matches \(did you mean 'layers\.3\.norm'\?\)"),
        (
            {"layers.*": {"scale": "fast"}},
            r"12 modules, such as 'layers\.0', but none has a slot of scale\. Modules with one: layers\.0\.mlp",
        ),
    ],
)
def test_a_glob_that_chooses_for_nothing_is_an_error(model, known, modules, problem):
    before = bind(model, "eager", device="cpu", registry=known).fingerprint
    with pytest.raises(ConfigError, match=problem):
        bind(model, {"scale": "fast", "modules": modules}, device="cpu", registry=known)
    assert not any("scale_op" in vars(module) for module in model.modules())
    assert bind(model, "eager", device="cpu", registry=known).fingerprint == before


def test_a_variant_that_the_modules_lack_is_an_error_too(model, known):
    with pytest.raises(ConfigError, match=r"such as 'layers\.0\.norm', but none has a slot of scale/other"):
        bind(model, {"modules": {"layers.0.norm": {"scale/other": "eager"}}}, device="cpu", registry=known)


def test_a_slot_of_a_bound_model_is_not_bound_alone(known, scale_class):
    """Modules with one choice share one slot object: binding it would change all of them behind the report."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))
            self.op = OpSlot("scale")

    model = torch.nn.Sequential(Own(), Own())
    for choice in ("slow", "eager"):
        binding = bind(model, {"scale": choice}, device="cpu", registry=known)
        with pytest.raises(BindError, match=r"belongs to a model, where modules share it; bind the model"):
            model[0].op.bind("eager")
        assert binding.verify() == ()


def test_a_class_attribute_that_holds_a_kernel_is_refused(known, scale_class):
    declared = OpSlot("scale")
    declared.kernel = copy.copy
    kind = type("Bound", (scale_class,), {"scale_op": declared})
    with pytest.raises(BindError, match=r"Bound\.scale_op is a class attribute that holds a kernel"):
        bind(kind(), "eager", device="cpu", registry=known)


def test_a_shared_module_that_goes_from_one_of_its_places_is_noticed(model, known, scale_class):
    model.layers[5].norm = model.layers[4].norm
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    model.layers[5].norm = scale_class()
    (problem,) = binding.verify()
    assert "replaced or removed after bind where it is called 'layers.5.norm'" in problem
    assert binding.to_dict()["changed"] == [problem]


def test_modules_in_a_circle_are_met_once(scale_class, known):
    model = Model(scale_class, 1)
    model.layers[0].up = model
    assert [name for name, _ in canonical_modules(model)][:2] == ["", "layers"]
    assert bind(model, {"scale": "fast"}, device="cpu", registry=known).verify() == ()


def test_a_shared_module_has_one_kernel(model, known):
    model.layers[5].norm = model.layers[4].norm
    binding = bind(model, {"modules": {"layers.5.norm": {"scale": "slow"}}}, device="cpu", registry=known)
    assert [row.kernel for row in binding.rows if row.module == "layers.4.norm"] == ["slow"]
    assert "layers.5.norm" not in kernels(binding)
    two = {"modules": {"layers.4.norm": {"scale": "fast"}, "layers.5.norm": {"scale": "slow"}}}
    with pytest.raises(
        ConfigError, match=r"one shared module cannot have two kernels for scale/standard: as 'layers\.4"
    ):
        bind(model, two, device="cpu", registry=known)
    assert kernels(binding)["layers.4.norm"] == "slow"
    assert binding.verify() == ()


def test_names_are_those_of_the_model_without_its_wrappers(scale_class, known):
    class Tuner(torch.nn.Module):
        __module__ = "peft.tuners.lora.model"

    plain = Model(scale_class, 2)
    names = [name for name, _ in canonical_modules(plain)]
    adapted, inner = Tuner(), Tuner()
    adapted.base_model, inner.model = inner, copy.deepcopy(plain)
    compiled = torch.compile(copy.deepcopy(plain))
    compiled.layers[0] = torch.compile(compiled.layers[0])
    for wrapped in (adapted, compiled):
        assert list(dict.fromkeys(name for name, _ in canonical_modules(wrapped))) == names
        binding = bind(wrapped, {"modules": {"layers.0.norm": {"scale": "slow"}}}, device="cpu", registry=known)
        assert kernels(binding)["layers.0.norm"] == "slow"
        assert binding.verify() == ()
    # FSDP2 makes classes that derive from the wrapper's, and so do users.
    sharded = type("FSDPTuner", (type("FSDPModule", (), {}), Tuner), {"__module__": "torch.distributed.fsdp"})()
    sharded.base_model = copy.deepcopy(plain)
    assert list(dict.fromkeys(name for name, _ in canonical_modules(sharded))) == names
    parallel = type("Mine", (torch.nn.DataParallel,), {})(copy.deepcopy(plain))
    assert list(dict.fromkeys(name for name, _ in canonical_modules(parallel))) == names


def test_a_module_of_the_users_own_named_module_keeps_its_name():
    outer = torch.nn.Module()
    outer.module = torch.nn.Linear(1, 1)
    assert [name for name, _ in canonical_modules(outer)] == ["", "module"]


def test_two_models_and_two_layers_hold_different_kernels(scale_class, known):
    one, two = Model(scale_class, 2), Model(scale_class, 2)
    first = bind(one, {"scale": "slow", "modules": {"layers.0.**": {"scale": "eager"}}}, device="cpu", registry=known)
    second = bind(two, {"scale": "fast"}, device="cpu", registry=known)
    assert layers_with(first, "slow") == [1]
    assert layers_with(second, "fast") == [0, 1]
    assert first.verify() == second.verify() == ()
    assert [layer.norm.scale_op.offer and layer.norm.scale_op.offer.spec.name for layer in one.layers] == [None, "slow"]


def test_the_environment_chooses_for_this_run_and_the_report_says_so(model, known, monkeypatch):
    monkeypatch.setenv("OPSLOT_OPS", "scale=slow")
    config = {"scale": "fast", "modules": {"layers.0.norm": {"scale": "eager"}}}
    binding = bind(model, config, device="cpu", registry=known)
    assert set(kernels(binding).values()) == {"slow"}
    assert {row.reason for row in binding.rows} == {"asked for: scale in OPSLOT_OPS"}
    monkeypatch.setenv("OPSLOT_OPS", "default=eager")
    assert set(kernels(bind(model, None, device="cpu", registry=known)).values()) == {"eager"}


def test_a_choice_without_effect_is_warned_about_and_refused_when_strict(model, known, caplog, monkeypatch):
    wanted = {"rms_norm_gated": "fla", "scale": {"other": "fast"}, "mhc": "eager", "dsa_indexer": "auto"}
    known.add(opslot.Backend(api=1, kernels=(opslot.KernelSpec(op="scale", variant="other", name="fast",
              target=copy.copy),)), "other")  # fmt: skip
    with caplog.at_level(logging.WARNING, "opslot"):
        binding = bind(model, wanted, device="cpu", registry=known)
    assert binding.unused == ("rms_norm_gated: fla in code", "scale.other: fast in code")
    assert "rms_norm_gated: fla in code has no effect" in caplog.text
    with pytest.raises(
        ConfigError, match=r"Model has no slot for rms_norm_gated: fla in code; .*Its ops: scale\. Leave"
    ):
        bind(model, {**wanted, "strict": True}, device="cpu", registry=known)
    with pytest.raises(ConfigError, match="has no slot for"):
        bind(model, OpsConfig.parse({"strict": True}).over(wanted), device="cpu", registry=known)
    monkeypatch.setenv("OPSLOT_STRICT", "1")
    with pytest.raises(ConfigError, match="has no slot for"):
        bind(model, wanted, device="cpu", registry=known)


def test_the_explicit_configuration_reproduces_a_binding(model, known):
    model.layers[5].norm = model.layers[4].norm
    config = {"modules": {"layers.1.**": {"scale": "slow"}, "layers.2.norm": {"scale": "eager"}}}
    binding = bind(model, config, device="cpu", registry=known)
    frozen = binding.config()
    tree = frozen.to_dict()
    assert tree["default"] == "eager"
    assert tree["scale/standard"] == "acme:fast"
    assert tree["modules"] == {
        "layers.1.norm": {"scale/standard": "acme:slow"},
        "layers.1.mlp.0": {"scale/standard": "acme:slow"},
        "layers.2.norm": {"scale/standard": "eager"},
    }
    binding.unbind()
    for again in (frozen, tree):
        assert bind(model, again, device="cpu", registry=known).fingerprint == binding.fingerprint


def test_a_name_that_no_glob_can_say_is_refused(known, scale_class):
    model = torch.nn.ModuleDict({"ab": scale_class(), "a*": scale_class(), "c": scale_class()})
    binding = bind(
        model, {"modules": {"a*": {"scale": "eager"}, "ab": {"scale": "fast"}}}, device="cpu", registry=known
    )
    with pytest.raises(BindError, match=r"module 'a\*' has a name that no glob can say"):
        binding.config()


def test_bound_gives_back_what_was_there(model, known):
    outer = bind(model, {"scale": "slow"}, device="cpu", registry=known)
    x = torch.ones(4)
    with bound(model, {"scale": "fast"}, device="cpu", registry=known) as inner:
        assert set(kernels(inner).values()) == {"fast"}
        assert inner.verify() == ()
        assert outer.verify()
        model(x)
    assert outer.verify() == ()
    outer.unbind()
    with pytest.raises(ZeroDivisionError), bound(model, "auto", device="cpu", registry=known):
        _ = 1 / 0
    assert not any("scale_op" in vars(module) for module in model.modules())
    with pytest.raises(opslot.UnknownKernel), bound(model, {"scale": "nothing"}, device="cpu", registry=known):
        pass
    with pytest.raises(BindError, match=r"3 is not a torch\.nn\.Module"), bound(3, registry=known):
        pass
    with bound(model, {"scale": "fast"}, device="cpu", registry=known):
        bind(model, {"scale": "slow"}, device="cpu", registry=known)
    assert not any("scale_op" in vars(module) for module in model.modules())


def test_binding_while_activations_are_recomputed_is_refused(model, known):
    binding = bind(model, {"scale": "fast"}, device="cpu", registry=known)
    seen = []

    def block(x):
        if seen:  # the second time is the recomputation
            for action in (binding.unbind, binding.apply, lambda: bind(model, "eager", device="cpu", registry=known)):
                with pytest.raises(BindError, match=r"cannot be (un)?bound during backward"):
                    action()
        seen.append(1)
        return model(x)

    x = torch.ones(4, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert binding.verify() == ()
    binding.unbind()


def test_no_configuration_gives_anything_but_a_binding_or_a_named_error(known, scale_class):
    """Random trees, of words that mean something and values that do not. After an error the model is as it was."""
    model = Model(scale_class, 2)
    draw = random.Random(0)
    words = ["scale", "scaling", "scale/standard", "scale/other", "default", "modules", "model", "ops_implementation"]
    words += ["strict", "attn_implementation", "standard", "other", "rms_norm", "liger", "scale/", "/", ":", "", "x"]
    words += ["auto", "eager", "fast", "slow", "half", "cuda", "fused_fast", "fused", "acme:fast", "acme:", ":fast"]
    words += ["**", "a.*", "layers.0.norm", "layers.*.norm"]

    def value(depth: int) -> object:
        kind = draw.randrange(8)
        if kind == 0 and depth < 4:
            return {key(): value(depth + 1) for _ in range(draw.randrange(4))}
        return draw.choice([None, True, 3, 2.5, [], "fast", *words]) if kind < 3 else draw.choice(words)

    def key() -> object:
        return draw.choice([*words, 1, None]) if draw.random() < 0.1 else draw.choice(words)

    bound_ones = 0
    for _ in range(3000):
        tree = {key(): value(0) for _ in range(draw.choice((1, 1, 1, 2, 3)))}
        before = [vars(module).get("scale_op") for module in model.modules()]
        try:
            binding = bind(model, tree, device="cpu", registry=known)
        except OpslotError:
            assert [vars(module).get("scale_op") for module in model.modules()] == before
        else:
            assert isinstance(binding, Binding)
            assert binding.verify() == ()
            bound_ones += 1
    assert 20 < bound_ones < 2900


def test_an_unbound_model_needs_no_kernel_where_it_is_loaded(known, make_kernel, scale_class):
    """Also when the model carries its binding, as those of build_foundation_model do."""
    known.register(make_kernel("mine"))
    binding = bind(scale_class(), {"scale": "mine"}, device="cpu", registry=known)
    with pytest.raises(opslot.KernelUnavailable, match="process-local"):
        pickle.dumps(binding)
    binding.unbind()
    again = pickle.loads(pickle.dumps(binding))
    assert "the slot was unbound" in again.verify()[0]
    again.apply()
    assert "scale_op" not in vars(again._model)
