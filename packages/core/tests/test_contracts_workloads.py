"""What the elementwise contracts are measured with: shapes that fit their problems, and problems that run."""

import inspect
import math

import opslot
import pytest
import torch

OPS = {"rms_norm", "rms_norm_gated", "rotary_pos_emb", "rotary_pos_emb_vision", "glu"}
CONTRACTS = [contract for contract in opslot.registry().contracts() if contract.op in OPS]
ROWS = {"tokens", "batch", "patches"}


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_every_shape_is_one_of_the_problem(contract):
    sizes = inspect.signature(contract.workload.problem).parameters.keys() - {"device", "dtype", "seed"}
    for name, shape in {**contract.workload.shapes, "large": contract.workload.large}.items():
        assert shape.keys() == sizes, name
        assert min(shape.values()) > 0, name
    large = {name: size for name, size in contract.workload.large.items() if name not in ("kv_heads", "table")}
    assert 2**31 < math.prod(large.values()) < 2**31 + 2**24


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_problems_of_real_widths_run_forward_and_backward(contract, dtype):
    for name, shape in contract.workload.shapes.items():
        small = {size: min(value, 3) if size in ROWS else value for size, value in shape.items()}
        sample, again = (contract.workload.problem("cpu", dtype, seed, **small) for seed in (1, 1))
        for mine, same in zip(sample.args, again.args, strict=True):
            assert torch.equal(mine, same) if isinstance(mine, torch.Tensor) else mine == same, name
        outputs = contract.load_reference()(*sample.args, **sample.kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [arg for arg in sample.args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        for gradient in torch.autograd.grad([output.sum() for output in outputs], leaves):
            assert gradient.isfinite().all(), name
            assert gradient.any(), name


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_rows_are_independent(contract):
    """A row gives the same outputs alone as among others, in every argument that the contract says holds rows."""
    shape = next(iter(contract.workload.shapes.values()))
    small = {size: min(value, 3) if size in ROWS else value for size, value in shape.items()}
    # In float64, since how a sum over a row is split may depend on the number of rows.
    sample = contract.workload.problem("cpu", torch.float64, 0, **small)
    arguments = contract.signature().bind(*sample.args, **sample.kwargs).arguments
    reference = contract.load_reference()
    row = {name: arguments[name].narrow(dim, 1, 1) for name, dim in contract.rows.items()}
    whole, alone = reference(**arguments), reference(**{**arguments, **row})
    first = next(iter(contract.rows.values()))
    pairs = zip(whole, alone, strict=True) if isinstance(whole, tuple) else [(whole, alone)]
    for among, by_itself in pairs:
        torch.testing.assert_close(among.narrow(first, 1, 1), by_itself, rtol=1e-12, atol=1e-12)
