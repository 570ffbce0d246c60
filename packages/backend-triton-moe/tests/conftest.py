import pytest


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def interpreter():
    pytest.importorskip("triton", reason="there is no triton for this platform")
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    from opslot.testing import triton_interpreter

    with triton_interpreter():
        yield
