import pytest
from opslot import Device, Requires, SpecError


@pytest.mark.parametrize(
    ("archs", "arch", "met"),
    [
        (("sm_90",), "sm_90", True),
        (("sm_90",), "sm_100", False),
        (("sm_90", "sm_100"), "sm_100", True),
        (("sm_90", "sm_100"), "sm_121", False),
        (("sm_80..",), "sm_75", False),
        (("sm_80..",), "sm_80", True),
        (("sm_80..",), "sm_120", True),
        (("sm_80..sm_90",), "sm_86", True),
        (("sm_80..sm_90",), "sm_100", False),
        # Numbers in gfx names are names: 942 and 90a must never pass for compute capability 9.0 and up.
        (("sm_90..",), "gfx942", False),
        (("sm_90..",), "gfx90a", False),
        (("gfx942",), "gfx942", True),
        (("Ascend910B*",), "Ascend910B3", True),
        (("Ascend910B*",), "Ascend950", False),
    ],
)
def test_architectures(archs, arch, met):
    reasons = Requires(archs=archs).unmet(Device("any", arch))
    assert (reasons == ()) is met


def test_a_rocm_device_is_not_cuda():
    (reason,) = Requires(devices=("cuda",), archs=("sm_90..",)).unmet(Device("rocm", "gfx942", "AMD MI300X"))
    assert reason == "needs a cuda device, this is rocm (gfx942, AMD MI300X)"


def test_every_reason_is_given():
    reasons = Requires(
        devices=("npu",), packages=("opslot>=99", "no-such-dist>=1"), modules=("json", "no_such_module")
    ).unmet(Device("cpu"))
    assert [reason.split(",")[0] for reason in reasons] == [
        "needs a npu device",
        "needs opslot>=99",
        "needs no-such-dist>=1",
        "needs the module 'no_such_module'",
    ]
    assert "which is not installed (pip install 'no-such-dist>=1')" in reasons[2]


@pytest.mark.parametrize(
    "field",
    [{"devices": "cuda"}, {"archs": ("sm_80..gfx942",)}, {"archs": ("gfx90a..",)}, {"archs": ("sm_90..sm_80",)}],
)
def test_requirements_that_cannot_be_right(field):
    with pytest.raises(SpecError):
        Requires(**field)


def test_a_requirement_that_does_not_parse_names_itself():
    with pytest.raises(SpecError, match="'torch >>= 2' is not a PEP 508 requirement"):
        Requires(packages=("torch >>= 2",))


def test_what_is_taken_for_right_without_packaging_is_right_for_packaging():
    """Over everything of up to eight characters that the two could see differently, and some more."""
    import itertools

    from opslot._requires import _PLAIN
    from packaging.requirements import Requirement

    pieces = ("a", "-", ".", "_", "1", ">=", "==", "!=", "<", ",", ".0", " ", ";")
    plain = [text for n in range(1, 6) for text in map("".join, itertools.product(pieces, repeat=n))]
    plain = [text for text in plain if _PLAIN.fullmatch(text)]
    assert len(plain) > 1000
    for text in (*plain, "liger-kernel>=0.8.5,<0.9", "torch"):
        assert _PLAIN.fullmatch(text)
        Requirement(text)  # raises for one that is not right
    for text in ("a>=1;python_version>'3'", "a[b]", "a~=1", "a @ file:///b", "a>=1.*", "a >=1"):
        assert not _PLAIN.fullmatch(text)
