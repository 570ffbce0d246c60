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


class Driver:
    """In the place of a device's: says what to compile for."""

    def __init__(self, *target):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*target)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return f"none, but compile for {self.target.arch}"

    def get_current_stream(self, device):
        return None


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Set it to a target, and launches compile for that and do no more. Gives what was compiled, in a list."""
    import triton
    from triton.runtime.jit import JITFunction

    made = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **keywords):
        made.append((self.__name__, run(self, *arguments, grid=grid, warmup=True, **keywords)))

    def set_target(*target):
        monkeypatch.setattr(triton.runtime.driver, "_active", Driver(*target))
        return made

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return set_target
