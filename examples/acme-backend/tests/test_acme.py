import subprocess
import sys

import opslot
from acme_opslot import BACKEND
from opslot.testing import KernelSuite


class TestConformance(KernelSuite):
    backend = "acme"
    dtypes = ("float32", "bfloat16")


def test_auto_chooses_acme():
    device = opslot.Device("cpu")
    for spec in BACKEND.kernels:
        assert opslot.registry().choose(spec.op, spec.variant, "auto", device).offer.spec is spec


def test_importing_the_backend_loads_no_torch():
    code = "import acme_opslot, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
