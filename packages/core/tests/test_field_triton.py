"""Faults of Triton kernels that users reported in public, planted and found without a GPU.

Named after the classes of docs/field-faults.md.
"""

import pytest
import torch
from opslot.testing import check, poisoned_memory, triton_interpreter

triton = pytest.importorskip("triton", reason="there is no triton for this platform")
pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy, which the core does not need")

import triton.language as tl  # noqa: E402


@pytest.fixture(autouse=True)
def _interpreter():
    with triton_interpreter():
        yield


@triton.jit
def expert_offsets(out, stride, WIDE: tl.constexpr):
    expert = tl.program_id(0)
    offset = (expert.to(tl.int64) if WIDE else expert) * stride
    tl.store(out + expert, offset)


@pytest.mark.parametrize("experts", [256, 257, 512])
def test_c07_the_weights_of_expert_256_begin_beyond_32_bits(experts):
    """E=512, H=4096, I=1024: a stride of 2**23 elements, right up to expert 255."""
    out = torch.zeros(experts, dtype=torch.int64)
    expert_offsets[(experts,)](out, 2 * 1024 * 4096, WIDE=True)
    assert out.tolist() == [2**23 * expert for expert in range(experts)]
    if experts == 256:
        expert_offsets[(experts,)](out, 2 * 1024 * 4096, WIDE=False)
        return
    with pytest.raises(AssertionError, match="int32 overflow detected for operation mul"):
        expert_offsets[(experts,)](out, 2 * 1024 * 4096, WIDE=False)


@triton.jit
def first_byte(out, row, row_bytes):
    tl.store(out, row * row_bytes)


def test_c07_one_token_more_and_its_bytes_begin_beyond_32_bits():
    """Rows of 24576 bytes: fine at 87382 tokens, a fault at 87383."""
    out = torch.zeros(1, dtype=torch.int64)
    first_byte[(1,)](out, 87382 - 1, 24576)
    assert out.item() == 87381 * 24576
    with pytest.raises(AssertionError, match="int32 overflow detected for operation mul"):
        first_byte[(1,)](out, 87383 - 1, 24576)


@triton.jit
def swiglu_rows(gate, up, out, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size if MASKED else at < size - 1
    x = tl.load(gate + at, mask=inside)
    tl.store(out + at, x * tl.sigmoid(x) * tl.load(up + at, mask=inside), mask=inside)


def swiglu(masked):
    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            gate, up = gate.contiguous(), up.contiguous()
            out = torch.empty_like(gate)
            if out.numel():
                swiglu_rows[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), BLOCK=1024, MASKED=masked)
            return out

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors
            return torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)

    return lambda gate, up: SwiGLU.apply(gate, up)


def test_c08_the_element_that_a_kernel_leaves_out_is_found():
    with poisoned_memory():
        check("glu", "swiglu", swiglu(masked=True))
        with pytest.raises(AssertionError, match=r"output 0 is wrong at 1 of .* max error inf"):
            check("glu", "swiglu", swiglu(masked=False))
