"""The balancing loss of all layers at once: which experts are chosen, how layers share launches, what is odd."""

import opslot
import pytest
import torch
from opslot import KernelUnavailable
from opslot.ops.load_balancing_loss import load_balancing_loss as reference
from opslot.testing import poisoned_memory

pytest.importorskip("triton", reason="there is no triton for this platform")

from opslot_backends.triton_moe import load_balancing_loss as module

kernel = module.load_balancing_loss


def layers_of(count, tokens, experts, dtype=torch.float32):
    return tuple(torch.randn(tokens, experts).to(dtype).requires_grad_() for _ in range(count))


def results(function, layers, *arguments):
    loss = function(layers, *arguments)
    return [loss, *torch.autograd.grad(loss, [x for x in layers if x.requires_grad], loss.detach().cos() + 1)]


def assert_as_the_reference(layers, *arguments):
    exact = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in layers)
    for got, expected in zip(results(kernel, layers, *arguments), results(reference, exact, *arguments), strict=True):
        limit = 2**-10 if got.dtype == torch.float16 else 2e-6
        largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got.double(), expected, rtol=limit, atol=limit * largest)


def counts_of(logits, top_k):
    """How many tokens chose each expert, from the slope."""
    _, slope = module._forward([logits], [1], None, top_k)
    return slope * logits.shape[0] ** 2 / logits.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 3), (16, 4), (60, 4), (128, 8), (5, 5)])
def test_of_equal_logits_the_first_are_chosen(experts, top_k, dtype, interpreter):
    logits = torch.randint(-2, 3, (40, experts)).to(dtype)  # ties in every row
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    expected = torch.bincount(order.reshape(-1), minlength=experts).float()
    torch.testing.assert_close(counts_of(logits, top_k), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_largest_of_numbers_of_every_size_and_sign(dtype, interpreter):
    limits = torch.finfo(dtype)
    odd = [limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal / 4, -3e-5, 3e-5, 0.0, 1.0, -1.0]
    logits = torch.stack([torch.tensor(odd, dtype=dtype)[torch.randperm(len(odd))] for _ in range(30)])
    for top_k in (1, 4, 9):
        expected = torch.bincount(logits.topk(top_k).indices.reshape(-1), minlength=len(odd)).float()
        torch.testing.assert_close(counts_of(logits, top_k), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_experts_that_are_switched_off(dtype, interpreter):
    layers = layers_of(2, 9, 6, dtype)
    with torch.no_grad():
        for x in layers:
            x[:, 2] = x[4, 2:] = float("-inf")
    assert_as_the_reference(layers, 6, 2)
    # Fewer that can be chosen than choices: the first of the others.
    torch.testing.assert_close(counts_of(layers[0][4:5].detach(), 4), torch.tensor([1.0, 1, 1, 1, 0, 0]))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, of the interpreter
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_logit_that_is_no_number_is_seen_in_the_loss(dtype, value, interpreter):
    layers = layers_of(2, 9, 6, dtype)
    with torch.no_grad():
        layers[1][3, 2] = float(value)
        layers[1][4] = -float(value)
    loss, _, second = results(kernel, layers, 6, 2)
    assert loss.isnan()
    assert second[3].isnan().all()


def test_a_row_of_nan_has_as_many_choices_as_another(interpreter):
    for value in ("nan", "inf", "-inf"):
        counts = counts_of(torch.full((7, 20), float(value)), 3)
        torch.testing.assert_close(counts, torch.tensor([7.0] * 3 + [0.0] * 17))
    negative = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32)  # NaN with a sign
    assert counts_of(negative.expand(7, 20).contiguous(), 3).sum() == 21


@pytest.mark.parametrize("most", [1, 4, 64])
def test_layers_of_all_kinds_in_any_order(most, interpreter, monkeypatch):
    monkeypatch.setattr(module, "_LAYERS", most)
    halves = layers_of(2, 5, 4, torch.float16)
    layers = (*layers_of(3, 5, 4), *halves, *layers_of(1, 9, 4), *layers_of(2, 5, 4), *layers_of(1, 0, 4))
    exact = tuple(x.detach().double().requires_grad_() for x in layers)
    for got, expected in zip(results(kernel, layers, 4, 2), results(reference, exact, 4, 2), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)
    if most == 64:
        assert module._groups(layers, False) == [3, 2, 1, 2, 1]


@pytest.mark.parametrize(("programs", "elements"), [(1, 8), (6, 64), (1000, 4096)])
def test_the_number_of_programs_changes_nothing(programs, elements, interpreter, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    monkeypatch.setattr(module, "_ELEMENTS", elements)
    monkeypatch.setattr(module, "_WARPS", 1)
    mask = torch.rand(130) - 0.2
    assert_as_the_reference(layers_of(2, 130, 6), 6, 2, mask)
    rows = module._tile(torch.empty(130, 6))[1]
    assert rows < 130 / 4


def test_the_same_bits_twice(interpreter, monkeypatch):
    monkeypatch.setattr(module, "_WARPS", 1)
    layers = layers_of(3, 100, 20)
    first, second = (results(kernel, layers, 20, 4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_three_launches_for_all_layers(interpreter, monkeypatch):
    launched = []

    def watched(name):
        function = getattr(module._kernels, name)

        class Watched:
            def __getitem__(self, grid):
                launched.append(name)
                return function[grid]

        return Watched()

    for name in ("sums", "total", "gradient"):
        monkeypatch.setattr(module._kernels, name, watched(name))
    results(kernel, layers_of(48, 2, 4), 4, 2)
    assert launched == ["sums", "total", "gradient"]


def test_the_gradients_of_trained_layers_alone_are_computed(interpreter, monkeypatch):
    made = []
    backward = module._backward

    def watched(*arguments):
        made.extend(backward(*arguments))
        return made

    monkeypatch.setattr(module, "_backward", watched)
    layers = layers_of(4, 6, 4)
    for frozen in (0, 2):
        layers[frozen].requires_grad_(False)
    assert_as_the_reference(layers, 4, 2)
    assert [tuple(stack.shape) for stack in made] == [(2, 6, 4)]


@pytest.mark.parametrize("frozen", [(0,), (0, 2), (1, 3)])
def test_frozen_layers_among_layers_of_different_length(frozen, interpreter):
    layers = (*layers_of(2, 6, 4), *layers_of(2, 9, 4), *layers_of(1, 6, 4))
    for number in frozen:
        layers[number].requires_grad_(False)
    assert_as_the_reference(layers, 4, 2)


def test_nothing_is_read_that_nobody_wrote(interpreter):
    with poisoned_memory():
        for tokens, experts in ((1, 1), (33, 5), (7, 60)):
            assert_as_the_reference(layers_of(2, tokens, experts), experts, 1)


def test_no_tokens_at_all(interpreter):
    loss, gradient = results(kernel, layers_of(1, 0, 4), 4, 2)
    assert loss.isnan()
    assert gradient.shape == (0, 4)


@pytest.mark.parametrize("given", [None, (), [torch.randn(3, 4)], torch.randn(3, 4)])
def test_what_is_no_tuple_of_layers_has_no_loss(given):
    assert kernel(given, 4, 2) == reference(given, 4, 2) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.float64], ids=str)
def test_masks_of_every_dtype(dtype, interpreter):
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    assert_as_the_reference(layers_of(2, 6, 4), 4, 2, mask)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_with_a_mask_and_frozen_layers(dynamic, interpreter):
    torch._dynamo.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (6, 10):
        layers = layers_of(3, tokens, 4)
        layers[1].requires_grad_(False)
        arguments = layers, 4, 2, torch.rand(2, tokens // 2)
        for got, expected in zip(results(compiled, *arguments), results(reference, *arguments), strict=True):
            torch.testing.assert_close(got, expected)


def test_tiles_have_a_row_within_a_warp():
    for dtype in (torch.float32, torch.bfloat16):
        for experts in (1, 2, 3, 8, 60, 64, 128, 160, 256, 512, 1024, 4096):
            parts, rows, width = module._tile(torch.empty(1, experts, dtype=dtype))
            assert experts <= parts * width < 2 * experts
            assert width * dtype.itemsize <= 32 * 16
            assert rows >= 4
            assert all(size & (size - 1) == 0 for size in (parts, rows, width))


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("cuda", 80, 32), ("hip", "gfx942", 64)], ids=str)
@pytest.mark.parametrize("count", [48, 70])
def test_compiles_for_as_many_layers_as_models_have(count, target, offline):
    made = offline(*target)
    kernel(tuple(torch.randn(64, 128, dtype=torch.bfloat16) for _ in range(count)), 128, 8)
    assert [name for name, _ in made] == ["sums", *["sums"] * (count > 64), "total"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", [1, 3, 60, 1024, 4096])
def test_compiles_for_few_and_many_experts(experts, dtype, offline):
    offline("cuda", 80, 32)
    kernel(layers_of(2, 64, experts, dtype), experts, min(experts, 8)).backward()


def test_refusals():
    layers = layers_of(2, 6, 4)
    for experts, top_k in ((5, 2), (4, 5), (4, 0)):
        with pytest.raises(ValueError, match=f"num_experts={experts} and top_k={top_k}"):
            kernel(layers, experts, top_k)
    with pytest.raises(ValueError, match=r"got \[\[6, 4\], \[6, 5\]\]"):
        kernel((*layers_of(1, 6, 4), *layers_of(1, 6, 5)), 4, 2)
    with pytest.raises(ValueError, match=r"got \[\[2, 3, 4\]\] with"):
        kernel((torch.randn(2, 3, 4),), 4, 2)
    with pytest.raises(KernelUnavailable, match="up to 4096 experts, got 5000: choose eager"):
        kernel(layers_of(1, 2, 5000), 5000, 2)
    with pytest.raises(ValueError, match=r"\[B, S\] or \[B \* S\].*got \[2, 1, 3, 3\] for layers of \[6\] tokens"):
        kernel(layers, 4, 2, torch.ones(2, 1, 3, 3))
    with pytest.raises(ValueError, match=r"got \[9\] for layers of \[9, 6\] tokens"):
        kernel((*layers_of(1, 9, 4), *layers_of(1, 6, 4)), 4, 2, torch.ones(9))


def test_a_mask_that_wants_a_gradient_is_refused():
    mask = torch.ones(4, requires_grad=True)
    with pytest.raises(opslot.KernelUnavailable, match="gives attention_mask no gradient"):
        kernel((torch.randn(4, 3),), 3, 1, mask)
