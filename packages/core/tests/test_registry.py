import functools
import inspect

import opslot
import pytest
import torch
from opslot import Backend, Device, KernelSpec, Priority

CPU = Device("cpu", "x86_64")
H200 = Device("cuda", "sm_90", "NVIDIA H200")


def test_resolve_gives_none_for_eager_and_the_callable_for_a_kernel(known):
    assert known.resolve("scale", "standard", "eager") is None
    assert known.resolve("scale", "standard", "fast", CPU)(torch.ones(1), torch.ones(1)) == 2


@pytest.mark.parametrize("name", ["fast", "fast_kernel", "fused_fast", "acme:fast"])
def test_a_kernel_is_found_by_name_alias_prefix_and_distribution(known, name):
    assert known.offer("scale", "standard", name).selector == "acme:fast"


def test_an_op_is_found_by_its_alias(known):
    assert known.contract("rescale").key == ("scale", "standard")


def test_list_available_is_eager_first_then_what_is_usable_here(known):
    assert known.list_available("scale", device=CPU) == ["eager", "fast", "half", "slow"]
    assert known.list_available("scale", device=H200) == ["eager", "cuda", "fast", "half", "slow"]


def test_unknown_names_list_the_valid_ones_and_the_nearest(known):
    with pytest.raises(LookupError, match=r"unknown op 'scael' \(did you mean 'scale'\?\); known: scale"):
        known.resolve("scael", "standard", "fast")
    with pytest.raises(opslot.UnknownOp, match=r"no variant 'othr'; scale has: other, standard"):
        known.resolve("scale", "othr", "fast")
    with pytest.raises(opslot.UnknownKernel, match=r"'fats'.*did you mean 'fast'.*known: eager, auto, cuda, fast"):
        known.resolve("scale", "standard", "fats")
    with pytest.raises(LookupError):
        known.resolve("scale", "standard", "fats")


def test_an_unusable_kernel_says_every_reason_and_what_would_work(known):
    with pytest.raises(RuntimeError, match=r"'cuda' for scale/standard cannot run here: needs a cuda device"):
        known.resolve("scale", "standard", "cuda", CPU)
    with pytest.raises(opslot.KernelUnavailable, match="Usable here: eager, fast, half, slow"):
        known.resolve("scale", "standard", "cuda", CPU)


def test_auto_takes_the_highest_usable_band_and_says_so(known):
    assert known.choose("scale", "standard", "auto", H200).offer.spec.name == "cuda"
    choice = known.choose("scale", "standard", "auto", CPU, ("float32",))
    assert choice.offer.spec.name == "fast"
    assert choice.reason == "auto: PORTABLE is the highest band usable on cpu"
    assert known.choose("scale", "standard", "auto", CPU, ("bfloat16",)).offer.spec.name == "half"


def test_auto_says_where_its_priority_was_measured(known, make_kernel):
    tuned = make_kernel("tuned", priority=Priority.TUNED, measured="docs/results/h200-bench.json")
    known.add(Backend(api=1, kernels=(tuned,)), "b")
    reason = known.choose("scale", "standard", "auto", CPU, ("float32",)).reason
    assert reason == "auto: TUNED is the highest band usable on cpu, measured in docs/results/h200-bench.json"


@pytest.mark.parametrize(
    "limit", [{"float32": 1.2}, ("float32", 1.2), (("float32", 1.0),), (("float32", "2"),), (("fp32", 1.2),), "float32"]
)
def test_a_limit_of_accuracy_is_pairs_of_a_dtype_and_a_factor(make_kernel, limit):
    with pytest.raises(opslot.SpecError, match=r"rms_error|torch's name of a floating dtype"):
        make_kernel("loose", rms_error=limit)
    assert make_kernel("loose", rms_error=(("float32", 1.2),)).rms_error == (("float32", 1.2),)


def test_auto_says_why_it_is_eager(known, make_kernel):
    assert known.choose("scale", "other", "auto", CPU).reason == "auto: no installed backend offers a kernel"
    known.add(Backend(api=1, kernels=(make_kernel("byname", variant="other", priority=Priority.BY_NAME),)), "b")
    assert known.choose("scale", "other", "auto", CPU).reason == "auto: byname is chosen only by name"


def test_auto_breaks_a_tie_by_name_and_says_so(known, make_kernel):
    known.add(Backend(api=1, kernels=(make_kernel("also"),)), "zeta")
    choice = known.choose("scale", "standard", "auto", CPU, ("float32",))
    assert choice.offer.spec.name == "also"
    assert "first by name before fast" in choice.reason


def test_a_name_that_two_distributions_offer_is_refused_bare(known, make_kernel):
    known.add(Backend(api=1, kernels=(make_kernel("fast"),)), "zeta")
    with pytest.raises(opslot.DuplicateError, match="choose one of: acme:fast, zeta:fast"):
        known.offer("scale", "standard", "fast")
    assert known.offer("scale", "standard", "zeta:fast").distribution == "zeta"
    assert known.list_available("scale", device=CPU)[1:3] == ["acme:fast", "zeta:fast"]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda k: (k("one"), k("one")), opslot.DuplicateError),
        (lambda k: (k("one"), k("two", aliases=("one",))), opslot.DuplicateError),
        (lambda k: (k("one"), k("two", op="nothing")), opslot.UnknownOp),
    ],
)
def test_a_backend_is_taken_whole_or_not_at_all(known, make_kernel, make_contract, bad, error):
    before = known.list_available("scale", device=CPU), known.contracts()
    with pytest.raises(error):
        known.add(Backend(api=1, kernels=bad(make_kernel), contracts=(make_contract("fresh"),)), "half-way")
    assert (known.list_available("scale", device=CPU), known.contracts()) == before


def test_a_contract_is_defined_once(known, make_contract):
    with pytest.raises(opslot.DuplicateError, match="contract scale/standard is defined already"):
        known.add(Backend(api=1, contracts=(make_contract(),)), "again")


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (
            2,
            r"version 2 of opslot's backend API; this opslot speaks versions 1 to 1\. opslot is the older side",
        ),
        (0, r"version 0 of .*\. the backend is the older side: upgrade the distribution that brings it"),
        ("1", "must be a number such as 1, got '1'"),
        (True, "must be a number such as 1, got True"),
    ],
)
def test_another_api_version_is_refused_and_the_older_side_named(api, words):
    with pytest.raises(opslot.SpecError, match=words):
        Backend(api=api)


def test_every_version_of_the_range_is_taken():
    assert [Backend(api=version).api for version in opslot.API_VERSIONS] == list(opslot.API_VERSIONS)
    assert opslot.API_VERSION in opslot.API_VERSIONS


def cell(factor):
    """What a notebook cell does each time it runs."""

    def scale_cell(x, weight, factor=2.0):
        return x * weight * factor

    return KernelSpec(op="scale", name="cell", target=scale_cell)


def test_a_cell_may_run_again_and_the_newest_function_counts(known):
    known.register(cell(1))
    newest = cell(2)
    known.register(newest)
    assert inspect.unwrap(known.resolve("scale", "standard", "cell", CPU)) is newest.target


def test_another_function_under_a_taken_name_is_refused_unless_replaced(known, make_kernel):
    known.register(cell(1))
    with pytest.raises(opslot.DuplicateError, match="replace=True"):
        known.register(make_kernel("cell"))
    known.register(make_kernel("cell"), replace=True)
    with pytest.raises(opslot.DuplicateError, match="choose another"):
        known.register(make_kernel("fast"), replace=True)


def test_a_process_local_kernel_for_an_unknown_op_is_refused(known, make_kernel):
    with pytest.raises(opslot.UnknownOp):
        known.register(make_kernel(op="nothing"))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "eager"},
        {"name": "has:colon"},
        {"target": "no_colon"},
        {"target": 3},
        {"aliases": ("auto",)},
        {"requires": "cuda"},
    ],
)
def test_a_spec_that_cannot_be_right_is_refused(make_kernel, fields):
    with pytest.raises(opslot.SpecError):
        make_kernel(**fields)


class Callable:
    def __call__(self, x, weight, factor=2.0):
        return x * weight * factor


class AutogradLike:
    @staticmethod
    def apply(x, weight, factor=2.0):
        return x


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (lambda x, weight: x, "does not take 'factor'"),
        (lambda x, weight, factor=1.0: x, "default of 'factor' must be 2.0"),
        (lambda weight, x, factor=2.0: x, "'x' must be its positional argument number 1"),
        (lambda x, weight, more, factor=2.0: x, "positional argument number 3"),
        (lambda x, weight, factor=2.0, *, more: x, "requires 'more'"),
        (lambda x, /, weight, factor=2.0: x, "'x' must be accepted by keyword"),
        (AutogradLike, "is a class.*name its `apply`"),
        (Callable, "is a class.*name a function or an instance"),
        ("opslot:nothing", "no attribute 'nothing'"),
        ("opslot.nowhere:nothing", "cannot be imported"),
        (
            functools.partial(lambda x, weight, factor: x, factor=2.0),
            "'factor' must be its positional argument number 3",
        ),
        (str.join, "does not take 'x'"),
        (getattr, "signature of .* is not readable"),
    ],
)
def test_a_callable_that_does_not_fit_its_contract_is_refused(known, make_kernel, target, problem):
    known.register(make_kernel("odd", target=target))
    with pytest.raises(opslot.TargetError, match=problem):
        known.resolve("scale", "standard", "odd", CPU)


@pytest.mark.parametrize(
    "target",
    [functools.partial(lambda x, weight, factor=2.0, extra=0: x, extra=1), Callable(), lambda *args, **kwargs: 0],
)
def test_partials_objects_and_variadic_functions_are_kernels(known, make_kernel, target):
    known.register(make_kernel("odd", target=target))
    assert known.resolve("scale", "standard", "odd", CPU) is target
    assert "odd" in repr(known.offer("scale", "standard", "odd"))


def test_an_exact_name_wins_over_one_with_the_prefix_taken_off(known, make_kernel):
    known.add(Backend(api=1, kernels=(make_kernel("fused_fast"),)), "zeta")
    assert known.offer("scale", "standard", "fused_fast").distribution == "zeta"
    assert known.offer("scale", "standard", "acme:fused_fast").distribution == "acme"


@pytest.mark.parametrize("name", ["my_dist:odd", "My-Dist:odd", "my.dist:odd"])
def test_a_distribution_is_found_by_any_spelling_of_its_name(known, make_kernel, name):
    known.add(Backend(api=1, kernels=(make_kernel("odd"),)), "my-dist")
    assert known.offer("scale", "standard", name).spec.name == "odd"


def test_a_contract_cannot_take_over_another_by_an_alias(known, make_contract):
    for alias in ("scale/standard", "rescale/standard"):
        with pytest.raises(opslot.DuplicateError, match=f"its alias '{alias}' is the name of another contract"):
            known.add(Backend(api=1, contracts=(make_contract("evil", aliases=(alias,)),)), "evil")


def test_a_contract_cannot_stand_under_the_alias_or_the_field_of_another(known, make_contract):
    with pytest.raises(opslot.DuplicateError, match="contract rescale/standard: this is an alias of scale/standard"):
        known.add(Backend(api=1, contracts=(make_contract("rescale"),)), "evil")
    with pytest.raises(opslot.DuplicateError, match="the config field 'scaling' is that of op 'scale'"):
        known.add(Backend(api=1, contracts=(make_contract("evil", fields=("scaling",)),)), "evil")
    assert [contract.op for contract in known.contracts()] == ["scale", "scale"]


@pytest.mark.parametrize(
    "wrong",
    [{"op": "strict"}, {"prefix": 3}, {"summary": None}, {"tolerances": None}, {"tolerances": {"float32": 1}},
     {"reference": None}, {"samples": None}],
)  # fmt: skip
def test_a_contract_that_would_break_later_is_refused_when_it_is_made(wrong):
    right = {"op": "a", "variant": "b", "summary": "", "reference": "m:f", "samples": "m:s", "tolerances": {}}
    with pytest.raises(opslot.SpecError):
        opslot.OpContract(**(right | wrong))


@pytest.mark.parametrize("wrong", [{"summary": None}, {"backward": "no"}, {"compile": [1]}])
def test_a_kernel_that_would_break_later_is_refused_when_it_is_made(make_kernel, wrong):
    with pytest.raises(opslot.SpecError):
        make_kernel(**wrong)


def test_a_kernel_whose_call_computes_nothing_is_refused(known, make_kernel):
    async def later(x, weight, factor=2.0):
        return x

    def pieces(x, weight, factor=2.0):
        yield x

    for target in (later, pieces):
        known.register(make_kernel(target.__name__, target=target))
        with pytest.raises(opslot.TargetError, match="is a coroutine or generator, whose call computes nothing"):
            known.resolve("scale", "standard", target.__name__, opslot.Device("cpu"))


def test_a_kernel_may_name_its_op_by_an_alias(known, make_kernel):
    known.add(Backend(api=1, kernels=(make_kernel("odd", op="rescale"),)), "zeta")
    assert known.offer("scale", "standard", "odd").distribution == "zeta"


def test_one_distribution_offers_a_name_once(known, make_kernel):
    with pytest.raises(opslot.DuplicateError, match="acme uses the name 'fast' twice"):
        known.add(Backend(api=1, kernels=(make_kernel("fast"),)), "acme")


def test_replacing_takes_the_place_of_every_kernel_that_had_one_of_the_names(known, make_kernel):
    known.register(make_kernel("p"))
    known.register(make_kernel("q"))
    known.register(make_kernel("r", aliases=("p", "q")), replace=True)
    assert {known.offer("scale", "standard", name).spec.name for name in ("p", "q", "r")} == {"r"}


def test_two_lambdas_do_not_replace_each_other(known, make_kernel):
    known.register(make_kernel("mine", target=lambda x, weight, factor=2.0: x))
    with pytest.raises(opslot.DuplicateError):
        known.register(make_kernel("mine", target=lambda x, weight, factor=2.0: weight))


@pytest.mark.parametrize(
    "fields",
    [
        {"op": ["x"]},
        {"priority": 15},
        {"priority": "high"},
        {"aliases": "abc"},
        {"dtypes": "bfloat16"},
        {"dtypes": ("bf16",)},
    ],
)
def test_a_spec_of_the_wrong_types_is_refused_where_it_is_made(make_kernel, fields):
    with pytest.raises(opslot.SpecError):
        make_kernel(**fields)
