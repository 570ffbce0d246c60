"""chunk_loss: chunks, memory, autocast and what it refuses."""

import math

import pytest
import torch
from opslot.ops.cross_entropy_loss import cross_entropy_loss
from opslot.testing import check, poisoned_memory
from opslot_backends.torch import cross_entropy_loss as module
from opslot_backends.torch.cross_entropy_loss import chunk_loss
from torch.utils._python_dispatch import TorchDispatchMode


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor):
                self.seen.add(tuple(output.shape))
        return result


@pytest.fixture
def rows_a_chunk(monkeypatch):
    def limit(rows):
        monkeypatch.setattr(module, "_LEAST_ROWS", rows)
        monkeypatch.setattr(module, "_LOGITS_ON_CPU", 0)

    return limit


@pytest.fixture(autouse=True)
def _one_chunk(rows_a_chunk):
    """By default all rows in one chunk; without this, problems as small as here are left to plain operations."""
    rows_a_chunk(512)


def problem(tokens, hidden, vocabulary, dtype=torch.float32):
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden) * hidden**-0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize("rows", [1, 3, 17, 2000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_chunks_keep_the_contract(rows_a_chunk, rows, dtype):
    rows_a_chunk(rows)
    with poisoned_memory():
        check("cross_entropy_loss", "causal", chunk_loss, dtype=dtype)


@pytest.mark.parametrize("num_items_in_batch", [None, 77])
def test_the_loss_does_not_depend_on_the_chunk(rows_a_chunk, num_items_in_batch):
    x, weight, labels = problem(2049, 8, 11)
    losses = []
    for rows in (1, 32, 1024, 2048, 4096):
        rows_a_chunk(rows)
        losses.append(chunk_loss(x, weight, None, shift_labels=labels, num_items_in_batch=num_items_in_batch))
    expected = cross_entropy_loss(x, weight, None, shift_labels=labels, num_items_in_batch=num_items_in_batch)
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_chunks_are_even_and_cover_every_row(rows_a_chunk):
    rows_a_chunk(1024)
    for tokens, sizes in ((0, []), (1, [1]), (1024, [1024]), (1025, [513, 512]), (2049, [683, 683, 683])):
        chunks = list(module._slices(torch.empty(tokens, 1), 5))
        assert [chunk.stop - chunk.start for chunk in chunks] == sizes
        assert [chunk.start for chunk in chunks] == [sum(sizes[:n]) for n in range(len(sizes))]


def test_many_chunks_do_not_lose_the_weight_gradient_in_half_precision(rows_a_chunk):
    """Added up in bfloat16, 1024 chunks would multiply the error by seven."""
    x, weight, labels = problem(2048, 16, 32, torch.bfloat16)
    inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    (exact,) = torch.autograd.grad(cross_entropy_loss(*inputs, None, shift_labels=labels), inputs[1:])
    errors = []
    for rows in (2048, 2):
        rows_a_chunk(rows)
        (got,) = torch.autograd.grad(chunk_loss(x, weight, None, shift_labels=labels), [weight])
        errors.append(float((got.double() - exact).norm() / exact.norm()))
    assert errors[1] < 2 * errors[0] < 0.05


def test_half_precision_keeps_gradients_that_a_large_count_would_lose():
    """1 / count is below the smallest float16; scaled by the loss as a grad scaler does, the gradient is not."""
    x, weight, labels = problem(8, 16, 32, torch.float16)
    count, scale = 2**26, 2.0**24
    loss = chunk_loss(x, weight, None, shift_labels=labels, num_items_in_batch=count)
    got = torch.autograd.grad(loss * scale, [x, weight])
    inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = torch.autograd.grad(
        cross_entropy_loss(*inputs, None, shift_labels=labels, num_items_in_batch=count) * scale, inputs
    )
    for mine, true in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_what_is_all_but_certain(dtype):
    """p - 1 of a target with p = 1 - 1e-6: nothing would be left of it if p were rounded to bfloat16 first."""
    x, weight = torch.ones(1, 1, dtype=dtype).requires_grad_(), torch.tensor([[14.0], [0.0]], dtype=dtype)
    loss = chunk_loss(x, weight, None, shift_labels=torch.tensor([0]))
    (got,) = torch.autograd.grad(loss, [x])
    assert float(got) == pytest.approx(-14 / (1 + math.exp(14)), rel=0.02)


@pytest.fixture
def seen_inside(monkeypatch):
    """A dispatch mode sees the loss as one operator; here it shall see what happens inside."""
    monkeypatch.setattr(module, "is_watched", lambda: False)


@pytest.mark.usefixtures("seen_inside")
def test_the_logits_of_all_tokens_never_exist(rows_a_chunk):
    rows_a_chunk(5)
    x, weight, labels = problem(20, 8, 11)
    with Shapes() as shapes:
        torch.autograd.grad(chunk_loss(x, weight, None, shift_labels=labels), [x, weight])
    assert (5, 11) in shapes.seen
    assert (20, 11) not in shapes.seen


@pytest.mark.usefixtures("seen_inside")
@pytest.mark.parametrize("frozen", ["head", "states", "bias"])
def test_what_is_frozen_costs_no_memory(frozen):
    x, weight, labels = problem(20, 8, 11)
    bias = torch.randn(11).requires_grad_()
    part = {"head": weight, "states": x, "bias": bias}[frozen].requires_grad_(False)
    with Shapes() as shapes:
        loss = chunk_loss(x, weight, None, shift_labels=labels, bias=bias)
        torch.autograd.grad(loss, [tensor for tensor in (x, weight, bias) if tensor.requires_grad])
    if frozen != "states":  # the rows of the states are sliced, so that shape appears either way
        assert tuple(part.shape) not in shapes.seen
    with torch.no_grad(), Shapes() as shapes:
        chunk_loss(x, weight, None, shift_labels=labels, bias=bias)
    assert (11, 8) not in shapes.seen


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_weights(hidden_dtype):
    x, weight, labels = problem(21, 16, 13)
    x = x.detach().to(hidden_dtype).requires_grad_()
    keywords = {"shift_labels": labels, "bias": torch.randn(13).requires_grad_(), "logit_softcap": 5.0}
    inputs = [x, weight, keywords["bias"]]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = chunk_loss(x, weight, None, **keywords), cross_entropy_loss(x, weight, None, **keywords)
    assert ours.dtype is theirs.dtype is torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)
    for mine, eager in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        assert mine.dtype is eager.dtype
        torch.testing.assert_close(mine, eager, rtol=2**-6, atol=2**-6 * float(eager.abs().max()))


def test_on_the_cpu_what_fits_one_chunk_is_left_to_plain_operations(monkeypatch):
    monkeypatch.setattr(module, "_LOGITS_ON_CPU", 20 * 11)
    for tokens, name in ((20, "DivBackward0"), (21, "_LossBackward")):
        x, weight, labels = problem(tokens, 8, 11)
        keywords = {"shift_labels": labels, "num_items_in_batch": 9, "logit_softcap": 3.0, "logit_scale": 0.5}
        loss = chunk_loss(x, weight, None, **keywords)
        assert type(loss.grad_fn).__name__ == name
        torch.testing.assert_close(loss, cross_entropy_loss(x, weight, None, **keywords))
    monkeypatch.undo()
    check("cross_entropy_loss", "causal", "chunk_loss")


def test_refusals():
    x, weight, labels = problem(6, 8, 11)
    with pytest.raises(ValueError, match=r"hidden_states torch.bfloat16 and lm_head_weight torch.float16"):
        chunk_loss(x.bfloat16(), weight.half(), labels)
    with pytest.raises(ValueError, match=r"hidden_states torch.float32 and bias torch.float64"):
        chunk_loss(x, weight, labels, bias=torch.zeros(11).double())
    with pytest.raises(ValueError, match="got 5 labels for 6 rows"):
        chunk_loss(x, weight, None, shift_labels=labels[:5])
    with pytest.raises(ValueError, match="give labels, or shift_labels"):
        chunk_loss(x, weight, None)
    for wrong in (-1, 11):
        labels[2] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            chunk_loss(x, weight, labels)
