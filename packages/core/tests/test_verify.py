"""`opslot verify`: whatever a kernel does to its process is a finding with the command that shows it again."""

import datetime
import json
import re
from importlib import metadata

import pytest
import torch
from opslot.tools.cli import main

KERNELS = """
import os, threading, time
import torch
from opslot import KernelUnavailable
from opslot.ops.rms_norm import rms_norm

started = []

def good(x, weight, eps):
    print("a kernel that talks", flush=True)
    os.write(1, b"and one that writes past Python")
    return rms_norm(x, weight, eps)

def leaves_a_thread(x, weight, eps):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return rms_norm(x, weight, eps)

def leaves_a_process(x, weight, eps):
    if not started:
        started.append(os.fork())
        if started == [0]:
            time.sleep(600)
    return rms_norm(x, weight, eps)

def says_nothing(x, weight, eps):
    assert False

def hangs(x, weight, eps):
    time.sleep(600)

def dies(x, weight, eps):
    os.kill(os.getpid(), 9)

def leaves(x, weight, eps):
    raise SystemExit(0)

def greedy(x, weight, eps):
    return rms_norm(x, weight, eps) + torch.empty(2**52)[:1]

def stays_on_meta(x, weight, eps):
    return torch.empty_like(x, device="meta")

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no kernel image is available")

def breaks_in_backward(x, weight, eps):
    return Function.apply(x, weight, eps)

def reference(x):
    return x * 1

def samples(device, dtype, seed):
    return iter(())
"""
FAULTS = {
    "hangs": "takes more than 12 seconds",
    "dies": "ended its process with code -9",
    "leaves": "ended its process with code 0",
    "greedy": "raised RuntimeError: ",
    "stays_on_meta": "output 0 has device meta, the reference gives cpu",
    "breaks_in_backward": "raised RuntimeError: no kernel image is available",
}


def outcomes_of(site):
    names = ["good", *FAULTS]
    kernels = "".join(f"KernelSpec(op='rms_norm', name={n!r}, target='acme_kernels:{n}')," for n in names)
    npu = "requires=Requires(devices=('npu',))"
    kernels += f"KernelSpec(op='rms_norm', name='elsewhere', target='acme_kernels:good', {npu}),"
    kernels += "KernelSpec(op='nothing', name='unjudged', target='acme_kernels:reference'),"
    contract = (
        "OpContract(op='nothing', variant='standard', summary='', reference='acme_kernels:reference', "
        "samples='acme_kernels:samples', tolerances={'float32': Tolerance(0, 0)}),"
    )
    site.add("acme", site.offering(contract, kernels))
    (site.path / "acme_kernels.py").write_text(KERNELS)
    common = ("-m", "opslot", "verify", "--json", "--device", "cpu", "--dtype", "float32", "--check", "gradients")
    found = []
    for what in (("rms_norm/standard", "--seconds", "12"), ("nothing",)):
        printed = site.python(*common, *what, code=1)
        found.append(json.loads(printed[printed.index("{") :]))
    return found


@pytest.fixture
def found(site):
    return outcomes_of(site)


@pytest.mark.slow
def test_every_fault_is_a_finding(found):
    rms_norm, nothing = found
    problems = {}
    for outcome in rms_norm["outcomes"]:
        if outcome["problem"]:
            problems[outcome["kernel"]] = outcome["problem"]
    assert problems.keys() == FAULTS.keys()
    for kernel, words in FAULTS.items():
        assert words in problems[kernel]
        assert f"rms_norm/standard, kernel {kernel}" in problems[kernel]
        assert "seed 0" in problems[kernel]
    assert {outcome["kernel"] for outcome in rms_norm["outcomes"]} >= {*FAULTS, "good"}
    (absent,) = (kernel for kernel in rms_norm["not_run"] if "elsewhere" in str(kernel))  # others may be installed
    assert absent["kernel"] == "rms_norm/standard:elsewhere"
    assert absent["reason"].startswith("needs a npu device, this is cpu")
    (unjudged,) = [outcome for outcome in nothing["outcomes"] if outcome["problem"]]
    assert "nothing to judge by: the contract has no samples" in unjudged["problem"]


def test_the_table_and_the_command_that_shows_it_again(site):
    site.add("acme", site.offering("", "KernelSpec(op='rms_norm', name='dies', target='acme_kernels:dies'),"))
    (site.path / "acme_kernels.py").write_text(KERNELS)
    arguments = ("rms_norm/standard", "--kernel", "dies", "--device", "cpu", "--dtype", "float32")
    # One that dies does not take the checks after it along.
    printed = site.python("-m", "opslot", "verify", *arguments, "--check", "values", "--check", "gradients", code=1)
    assert "rms_norm/standard  dies    float32  0       values, gradients  0.0" in printed
    assert "likewise: gradients" in printed
    again = "opslot verify rms_norm/standard --kernel dies --device cpu --dtype float32 --check values --seed 0"
    assert f"again: {again}\n" in printed


def test_the_data_says_how_it_came_about(site):
    needs = "requires=Requires(packages=('packaging>=20',))"
    site.add("acme", site.offering("", f"KernelSpec(op='rms_norm', name='good', target='acme_kernels:good', {needs}),"))
    (site.path / "acme_kernels.py").write_text(KERNELS)
    arguments = ("rms_norm/standard", "--kernel", "good", "--device", "cpu", "--dtype", "float32", "--check", "values")
    printed = site.python("-m", "opslot", "verify", *arguments, "--json")
    data = json.loads(printed[printed.index("{") :])
    assert data["command"].startswith(f"opslot verify {' '.join(arguments)} --seed 0")
    assert datetime.date.fromisoformat(data["date"]) <= datetime.date.today()
    assert data["environment"]["torch"] == torch.__version__
    assert data["environment"]["libraries"] == {"acme": "1.0", "packaging": metadata.version("packaging")}


@pytest.mark.parametrize(
    ("kernel", "failed"),
    [("leaves_a_thread", 0), ("leaves_a_process", 0), ("says_nothing", 2)],
)
def test_what_a_kernel_leaves_behind_holds_nobody_up(site, kernel, failed):
    """And an assertion of the kernel's own, even one without a word, is no check that passed."""
    site.add("acme", site.offering("", f"KernelSpec(op='rms_norm', name={kernel!r}, target='acme_kernels:{kernel}'),"))
    (site.path / "acme_kernels.py").write_text(KERNELS)
    arguments = ("rms_norm/standard", "--kernel", kernel, "--device", "cpu", "--dtype", "float32", "--json")
    checks = ("--check", "values", "--check", "gradients")
    printed = site.python("-m", "opslot", "verify", *arguments, *checks, code=int(failed > 0))
    outcomes = json.loads(printed[printed.index("{") :])["outcomes"]
    assert [outcome["check"] for outcome in outcomes] == ["values", "gradients"]
    assert sum(bool(outcome["problem"]) for outcome in outcomes) == failed


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("rms_nrom",), "unknown op 'rms_nrom' \\(did you mean 'rms_norm'\\?\\)"),
        (("rms_norm/standard", "--kernel", "other"), "no kernel 'other' for rms_norm/standard"),
        (("--kernel", "other"), "no op has a kernel 'other'"),
        (("rms_norm", "--device", "cuda:99"), "device 'cuda:99'"),
        (("rms_norm", "--kernel", "eager", "--dtype", "float8"), "has tolerances for .*, not for 'float8'"),
    ],
)
def test_what_cannot_be_verified_says_why(capsys, arguments, error):
    assert main(["verify", *arguments]) == 2
    assert re.search(error, capsys.readouterr().err)


def test_eager_passes(site):
    arguments = ("glu/swiglu", "--kernel", "eager", "--device", "cpu", "--dtype", "float32", "--check", "values")
    printed = site.python("-m", "opslot", "verify", *arguments)
    assert "glu/swiglu  eager   float32  1       -" in printed


def test_a_kernel_of_some_variants_is_verified_for_these():
    import opslot
    from opslot.tools.verify import plan

    known = opslot.Registry()
    known.add(opslot.ops.BACKEND, "opslot")
    known.register(opslot.KernelSpec(op="rms_norm", variant="standard", name="mine", target=lambda x, weight, eps: x))
    jobs, absent = plan(known, "rms_norm", "mine", "cpu", ["float32"], ["values"], 0)
    assert [(job.variant, job.kernel) for job in jobs] == [("standard", "mine")]
    assert absent == []
    with pytest.raises(opslot.UnknownKernel, match="no kernel 'mien' for rms_norm"):
        plan(known, "rms_norm", "mien", "cpu", ["float32"], ["values"], 0)
    with pytest.raises(opslot.UnknownKernel, match="no kernel 'mine' for rms_norm/unweighted"):
        plan(known, "rms_norm/unweighted", "mine", "cpu", ["float32"], ["values"], 0)
