"""moe_experts: both paths, every number of experts, memory, and what it refuses."""

import pytest
import torch
from opslot.ops.moe_experts import moe_experts as reference
from opslot.testing import check, poisoned_memory
from opslot_backends.torch import moe_experts as module
from opslot_backends.torch.moe_experts import moe_experts


def problem(tokens, hidden, inner, experts, top_k, *, device="cpu", dtype=torch.float32):
    def leaf(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(device, dtype).requires_grad_()

    x, weights = leaf(tokens, hidden), leaf(tokens, top_k)
    index = torch.rand(tokens, experts).argsort(-1)[:, :top_k].to(device)
    gate_up = leaf(experts, 2 * inner, hidden, scale=hidden**-0.5)
    return x, index, weights, gate_up, leaf(experts, hidden, inner, scale=inner**-0.5)


def assert_like_the_reference(arguments, tolerance):
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    ours, theirs = moe_experts(*arguments), reference(*arguments)
    incoming = torch.randn_like(theirs)
    for mine, exact in zip(
        [ours, *torch.autograd.grad(ours, leaves, incoming)],
        [theirs, *torch.autograd.grad(theirs, leaves, incoming)],
        strict=True,
    ):
        torch.testing.assert_close(mine, exact, rtol=0, atol=tolerance * float(exact.detach().abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["grouped", "loop"])
def test_both_paths_keep_the_contract(monkeypatch, path, dtype):
    """Which one runs depends on sizes; where grouped_mm cannot take a sample the loop has to."""
    taken = []
    has_grouped_mm = module._has_grouped_mm

    def choose(*arguments):
        taken.append(path == "grouped" and has_grouped_mm(*arguments))
        return taken[-1]

    monkeypatch.setattr(module, "_has_grouped_mm", choose)
    with poisoned_memory():
        check("moe_experts", "standard", moe_experts, dtype=dtype)
    assert any(taken) == (path == "grouped")
    assert not all(taken)


@pytest.mark.parametrize("experts", [1, 2, 16, 17, 128])
@pytest.mark.parametrize("top_k", [1, 8])
def test_numbers_of_experts(experts, top_k):
    assert_like_the_reference(problem(24, 16, 8, experts, min(top_k, experts)), 1e-5)


@pytest.mark.parametrize(("hidden", "inner"), [(1025, 16), (16, 1025), (18, 20), (20, 18)])
def test_sizes_that_grouped_mm_refuses(hidden, inner):
    arguments = problem(9, hidden, inner, 3, 2, dtype=torch.bfloat16)
    assert not module._has_grouped_mm(arguments[0], *arguments[3:])
    assert_like_the_reference(arguments, 0.04)


def test_weights_that_start_in_the_middle_of_memory():
    x, index, weights, gate_up, down = problem(9, 16, 8, 3, 2)
    shifted = torch.empty(gate_up.numel() + 1)[1:].view_as(gate_up).copy_(gate_up.detach()).requires_grad_()
    assert not module._has_grouped_mm(x, shifted, down)
    assert_like_the_reference((x, index, weights, shifted, down), 1e-5)


@pytest.mark.parametrize("path", ["grouped", "loop"])
def test_backward_keeps_one_activation(monkeypatch, path):
    if path == "loop":
        monkeypatch.setattr(module, "_has_grouped_mm", lambda *arguments: False)
    arguments = problem(32, 64, 48, 4, 2)
    given = {tensor.untyped_storage().data_ptr() for tensor in arguments}
    kept = []

    def pack(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe_experts(*arguments)
    assert sorted(kept) == [(65, 1), (65, 96)]  # routing weights and gate_up, by row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_weights(dtype):
    """Also for tokens that have autocast's dtype already, as what a linear layer returns."""
    x, *others = problem(24, 16, 8, 4, 2)
    arguments = x.detach().to(dtype).requires_grad_(), *others
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = moe_experts(*arguments), reference(*arguments)
    assert ours.dtype is theirs.dtype is dtype
    incoming = torch.randn_like(theirs)
    for mine, eager in zip(
        [ours, *torch.autograd.grad(ours, leaves, incoming)],
        [theirs, *torch.autograd.grad(theirs, leaves, incoming)],
        strict=True,
    ):
        assert mine.dtype is eager.dtype
        torch.testing.assert_close(mine, eager, rtol=0, atol=0.04 * float(eager.detach().abs().max()))


def test_refusals():
    x, index, weights, gate_up, down = problem(6, 16, 8, 4, 2)
    with pytest.raises(ValueError, match=r"top_k_index and top_k_weights of one shape \[T, K\], got \[12\]"):
        moe_experts(x, index.flatten(), weights, gate_up, down)
    with pytest.raises(ValueError, match=r"got \[12\] and \[12\]"):
        moe_experts(x, index.flatten(), weights.flatten(), gate_up, down)
    with pytest.raises(ValueError, match=r"hidden_states torch.bfloat16, gate_up torch.float32"):
        moe_experts(x.bfloat16(), index, weights, gate_up, down)


@pytest.mark.gpu
class TestOnCuda:
    def test_the_grouped_path_never_waits_for_the_device(self):
        if torch.cuda.get_device_capability()[0] not in (9, 10):
            pytest.skip("grouped_mm has no kernel for this architecture")
        arguments = problem(64, 128, 64, 8, 2, device="cuda", dtype=torch.bfloat16)
        leaves = [tensor for tensor in arguments if tensor.requires_grad]
        incoming = torch.randn_like(arguments[0])
        assert module._has_grouped_mm(arguments[0], *arguments[3:])
        torch.autograd.grad(moe_experts(*arguments), leaves, incoming)
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(moe_experts(*arguments), leaves, incoming)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize(("hidden", "inner"), [(1025, 520), (512, 256)])
    def test_transposed_weights_of_any_size(self, dtype, hidden, inner):
        x, index, weights, *stored = problem(33, hidden, inner, 4, 2, device="cuda", dtype=dtype)
        turned = [w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in stored]
        with poisoned_memory():
            assert_like_the_reference((x, index, weights, *turned), 0.04 if dtype is torch.bfloat16 else 1e-5)

    def test_two_steps_with_sentinels_over_dirty_memory(self):
        """Step 1 fine, step 2 NaN is how uninitialised rows show: freed memory is used again."""
        arguments = problem(64, 128, 64, 4, 2, device="cuda", dtype=torch.bfloat16)
        arguments[1][::2] = 4
        arguments[1][arguments[1] == 2] = 4
        leaves = [tensor for tensor in arguments if tensor.requires_grad]
        for _ in range(3):
            dirty = [torch.full((2**n,), float("nan"), device="cuda") for n in range(8, 22)]
            del dirty
            gradients = torch.autograd.grad(moe_experts(*arguments).sum(), leaves)
            assert all(gradient.isfinite().all() for gradient in gradients)
            assert not gradients[2][2].any()
            assert not gradients[3][2].any()
