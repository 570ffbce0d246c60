"""Bound models that are copied, saved, loaded and sent to other processes, with a backend that is really installed."""

import subprocess
import sys

import pytest

MODULE = """
import torch
from opslot import Backend, KernelSpec, OpContract, OpSlot


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


CONTRACT = OpContract(op="scale", variant="standard", summary="", reference=scale, samples=scale, tolerances={})
BACKEND = Backend(
    api=1, contracts=(CONTRACT,), kernels=(KernelSpec(op="scale", name="fast", target="saved_model:scale"),)
)


class Model(torch.nn.Module):
    scale_op = OpSlot("scale")

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


def say(model, word):
    print(word, model.scale_op, flush=True)
"""

SCRIPT = """
import copy
import multiprocessing
import shutil
import sys

sys.path.insert(0, ".")
import opslot
import torch
from saved_model import Model, say

model = Model()
opslot.bind(model, {"scale": "fast"}, device="cpu")
say(copy.deepcopy(model), "copied")
torch.save(model, "model.pt")
say(torch.load("model.pt", weights_only=False), "loaded")
torch.save(model.state_dict(), "state.pt")
model.load_state_dict(torch.load("state.pt", weights_only=True))
say(model, "kept")
try:
    torch.load("model.pt", weights_only=True)
except Exception as error:
    print("refused by torch" if "Unsupported global" in str(error) else error, flush=True)
worker = multiprocessing.get_context("spawn").Process(target=say, args=(model, "spawned"))
worker.start()
worker.join()
shutil.rmtree("saved-1.0.dist-info")
opslot._discovery._registry = None
try:
    torch.load("model.pt", weights_only=False)
except opslot.UnknownOp as error:
    print("missed", "a slot scale/standard was pickled with kernel saved:fast 1.0" in str(error), flush=True)
"""


@pytest.mark.slow
def test_a_bound_model_survives_copies_files_and_processes(tmp_path):
    (tmp_path / "saved_model.py").write_text(MODULE)
    info = tmp_path / "saved-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saved\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opslot.backends]\nsaved = saved_model:BACKEND\n")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    slot = "OpSlot(scale/standard -> fast)"
    assert done.stdout.splitlines() == [
        f"copied {slot}", f"loaded {slot}", f"kept {slot}", "refused by torch", f"spawned {slot}", "missed True"
    ]  # fmt: skip
