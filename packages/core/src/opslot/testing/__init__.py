"""Conformance checks for kernels: is this one what its contract says, in values, gradients and manners?

from opslot.testing import KernelSuite

class TestMyKernels(KernelSuite):
    backend = "acme"
"""

from ._checks import CHECKS as CHECKS
from ._memory import poisoned_memory as poisoned_memory
from ._suite import KernelSuite as KernelSuite
from ._suite import check as check
