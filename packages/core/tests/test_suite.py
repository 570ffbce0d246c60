"""KernelSuite as its users see it: pytest over a file of a few lines."""

import re
import subprocess
import sys

HEAD = """
import time
import torch
from opslot import KernelUnavailable
from opslot.ops.glu import glu
from opslot.testing import CHECKS, KernelSuite

def wrong(gate, up):
    return glu(gate, up) * 1.1

def slow(gate, up):
    time.sleep(30)
    return glu(gate, up)

def refusing_half(gate, up):
    if gate.dtype is torch.bfloat16:
        raise KernelUnavailable("float32 only")
    return glu(gate, up)
"""


def run(tmp_path, body, *arguments):
    file = tmp_path / "test_mine.py"
    file.write_text(HEAD + body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(file), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_a_function_in_four_lines(tmp_path):
    out = run(
        tmp_path,
        """
class TestMine(KernelSuite):
    op, variant = "glu", "swiglu"
    kernel = staticmethod(glu)
    dtypes = ("float32",)
""",
    )
    assert "23 passed" in out
    assert "test_kernel[glu/swiglu:glu-float32-accuracy-cpu]" in out


def test_a_wrong_function_fails_and_says_where(tmp_path):
    out = run(
        tmp_path,
        """
class TestMine(KernelSuite):
    op, variant = "glu", "swiglu"
    kernel = staticmethod(wrong)
    dtypes = ("float32",)
    checks = ("values", "no_grad", "deterministic")
""",
    )
    assert "2 failed, 1 passed" in out
    assert "glu/swiglu, kernel wrong, sample 'three dimensions' (float32 on cpu, seed 0): output 0 is wrong" in out


def test_one_that_does_not_come_back_is_stopped(tmp_path):
    out = run(
        tmp_path,
        """
class TestMine(KernelSuite):
    op, variant = "glu", "swiglu"
    kernel = staticmethod(slow)
    checks = ("values",)
    dtypes = ("float32",)
    seconds = 0.5
""",
    )
    assert "TimeoutError: check 'values' of glu/swiglu:slow takes more than 0.5 seconds" in out
    assert "1 failed" in out


def test_a_dtype_that_is_refused_altogether_cannot_be_judged(tmp_path):
    out = run(
        tmp_path,
        """
class TestMine(KernelSuite):
    op, variant = "glu", "swiglu"
    kernel = staticmethod(refusing_half)
    checks = ("values",)
    dtypes = ("float32", "bfloat16")
""",
    )
    assert "1 failed, 1 passed" in out
    assert "nothing to judge by: the kernel refuses all: 'three dimensions': float32 only" in out


def test_a_device_that_is_not_there_is_skipped_with_the_reason(tmp_path):
    out = run(
        tmp_path,
        """
class TestMine(KernelSuite):
    op, variant, kernel = "glu", "swiglu", "eager"
    devices = ("cpu", "cuda:99")
    checks = ("values",)
    dtypes = ("float32",)
""",
    )
    assert "1 passed, 1 skipped" in out
    assert "there is no such device" in out


def test_what_is_missing_is_named(tmp_path):
    out = run(
        tmp_path,
        """
class TestNothing(KernelSuite):
    pass

class TestBackend(KernelSuite):
    backend = "acne"

class TestKernel(KernelSuite):
    op, kernel = "glu", "other"

class TestCheck(KernelSuite):
    op, variant, kernel = "glu", "swiglu", "eager"
    checks = ("valves",)
    dtypes = ("float32",)
""",
        "--continue-on-collection-errors",
    )
    assert "TestNothing: set backend, or op and kernel" in out
    assert "no kernel of a backend 'acne'" in out
    assert "op 'glu' has no variant 'standard'; glu has: " in out
    assert "unknown checks valves" in out
    assert re.search(r"1 failed,.* 3 errors", out)  # and a warning, without numpy
