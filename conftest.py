"""For every test: one thread, and no vendor library that loads itself with torch. Set before torch is imported."""

import gc
import os

import pytest

# The tensors of tests are tiny, and two OpenMP teams on two cores wait for each other a hundred times longer than they
# compute. Inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch-npu without its toolkit makes `import torch` itself fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# cuBLAS wants this set before it promises anything.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--once", action="store_true", help="of each parametrised test only the first that needs no GPU")


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.once:
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """What is imported by now stays, so no collection of garbage looks at it: accelerate makes one a Trainer."""
    gc.collect()
    gc.freeze()
