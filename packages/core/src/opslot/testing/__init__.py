"""Conformance checks for kernels: is this one what its contract says, in values, gradients and manners?

from opslot.testing import KernelSuite, check, triton_interpreter

class TestMyKernels(KernelSuite):
    backend = "acme"

def test_my_triton_kernel_without_a_gpu():
    with triton_interpreter():
        check("rms_norm", "standard", my_rms_norm, dtype="float16")
"""

from ._checks import CHECKS as CHECKS
from ._interpreter import triton_interpreter as triton_interpreter
from ._memory import poisoned_memory as poisoned_memory
from ._suite import KernelSuite as KernelSuite
from ._suite import check as check
