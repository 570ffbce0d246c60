"""Faults of kernels that users reported in public, with their numbers: neither the eager code nor ours has them.

Named after the classes of docs/field-faults.md.
"""

import math

import opslot
import pytest
import torch
import torch.nn.functional as F
from opslot.testing import poisoned_memory
from opslot_backends.torch import cross_entropy_loss as chunks


def implementations(op, variant="standard"):
    """The eager code and every kernel of this backend, as a parameter `kernel`."""
    known = opslot.registry()
    offers = [o for o in known.offers(op, variant) if o.distribution == "opslot-backend-torch"]
    assert offers
    functions = [known.contract(op, variant).load_reference(), *map(known.load, offers)]
    return pytest.mark.parametrize("kernel", functions, ids=["eager", *(offer.spec.name for offer in offers)])


norms = implementations("rms_norm")
rotations = implementations("rotary_pos_emb", "full")
glus = implementations("glu", "swiglu")
losses = implementations("cross_entropy_loss", "causal")
experts = implementations("moe_experts")
balances = implementations("load_balancing_loss")


@pytest.fixture
def rows_a_chunk(monkeypatch):
    def limit(rows):
        monkeypatch.setattr(chunks, "_LEAST_ROWS", rows)
        monkeypatch.setattr(chunks, "_LOGITS_ON_CPU", 0)

    return limit


@pytest.fixture(autouse=True)
def _three_rows_a_chunk(rows_a_chunk):
    """So that problems as small as here are cut at all."""
    rows_a_chunk(3)


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


# C01: another formula.


@norms
def test_c01_a_standard_norm_is_not_a_zero_centred_one(kernel):
    x, zero, one = torch.tensor([[3.0, 4.0]]), torch.zeros(2), torch.ones(2)
    torch.testing.assert_close(kernel(x, one, 1e-12), torch.tensor([[0.848528, 1.131371]]), rtol=1e-6, atol=0)
    assert not kernel(x, zero, 1e-12).any()


@rotations
def test_c01_full_rotation_turns_halves_and_not_neighbours(kernel):
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    for out in kernel(q, q.clone(), torch.zeros(1, 1, 4), torch.ones(1, 1, 4)):
        assert out.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


@glus
def test_c01_swiglu_is_neither_clamped_nor_another_activation(kernel):
    gate, up = torch.tensor([10.0, -10.0, 2.5]).double(), torch.tensor([-10.0, 10.0, 1.0]).double()
    # Clamped at 7 the first would be -48.955358; the last with GELU 2.484476, with its tanh form 2.484916.
    assert kernel(gate, up).tolist() == pytest.approx([-99.995460, -0.004540, 2.310354], abs=1e-6)


@losses
def test_c01_a_softcap_is_applied(kernel):
    logits, head, target = torch.tensor([[60.0, 0.0]]).double(), torch.eye(2).double(), torch.tensor([1])
    capped = kernel(logits, head, None, shift_labels=target, logit_softcap=30.0)
    assert float(capped) == pytest.approx(28.920827, abs=1e-6)
    assert float(kernel(logits, head, None, shift_labels=target)) == pytest.approx(60.0, abs=1e-6)
    half = kernel(logits, head, None, shift_labels=target, logit_scale=0.5)
    assert float(half) == pytest.approx(30.0, abs=1e-6)


# C02: where the casts are, and in what sums are kept.


@norms
def test_c02_the_norm_is_rounded_before_the_weight(kernel):
    x, weight = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.ones(2)
    # 1 / sqrt(5) is 0.4472136, and 0.447265625 in bfloat16.
    assert float(kernel(x, weight, 0.0)[0, 0]) == 0.447265625


@losses
@pytest.mark.parametrize("rows", [64, 1])
def test_c02_many_chunks_keep_the_weights_gradient(kernel, rows, rows_a_chunk):
    """16 and 1024 chunks; sums kept in bfloat16 made the error 1.34 and 7.31 times that of one chunk."""
    torch.manual_seed(3)
    x, weight = leaf(1024, 16, dtype=torch.bfloat16), leaf(32, 16, dtype=torch.bfloat16, scale=0.25)
    target = torch.randint(32, (1024,))

    def gradient(x, weight):
        return torch.autograd.grad(kernel(x, weight, None, shift_labels=target), weight)[0].double()

    exact = F.cross_entropy(x.detach().double() @ (head := weight.detach().double().requires_grad_()).T, target)
    (exact,) = torch.autograd.grad(exact, head)
    rows_a_chunk(1024)
    one = (gradient(x, weight) - exact).norm()
    rows_a_chunk(rows)
    assert (gradient(x, weight) - exact).norm() <= 2 * one


@losses
def test_c02_autocast_over_float32_and_two_half_precisions(kernel):
    x, weight, labels = leaf(1, 7, 16), leaf(11, 16), torch.randint(11, (1, 7))
    with torch.autocast("cpu", torch.bfloat16):
        loss = kernel(x, weight, labels)
        logits = F.linear(x, weight).float()
    assert loss.dtype is torch.float32
    # Logits of bfloat16 on both sides, rounded alike or by one unit apart.
    torch.testing.assert_close(loss, F.cross_entropy(logits[0, :-1], labels[0, 1:]), rtol=2**-7, atol=0)
    assert [g.dtype for g in torch.autograd.grad(loss, [x, weight])] == [torch.float32] * 2
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)bfloat16.*(half|float16)"):
        kernel(x.bfloat16(), weight.half(), labels)


# C03: what a loss is divided by, and which label belongs to which row.


@losses
@pytest.mark.parametrize("count", [4, torch.tensor(4)], ids=["int", "tensor"])
def test_c03_micro_batches_add_up(kernel, count):
    """Negative log-likelihoods of 1, 1, 1 and 5 in batches of three tokens and one: 0.75 + 1.25, not 3 or 6."""
    states = torch.tensor([[0.0, math.log(math.expm1(nll))] for nll in (1.0, 1.0, 1.0, 5.0)]).requires_grad_()
    target = torch.zeros(4, dtype=torch.long)
    parts = [
        kernel(states[rows], torch.eye(2), None, shift_labels=target[rows], num_items_in_batch=count)
        for rows in (slice(3), slice(3, 4))
    ]
    assert [part.item() for part in parts] == pytest.approx([0.75, 1.25], rel=1e-6)
    whole = kernel(states, torch.eye(2), None, shift_labels=target)
    torch.testing.assert_close(
        torch.autograd.grad(sum(parts), states), torch.autograd.grad(whole, states), rtol=0, atol=1e-6
    )


@losses
def test_c03_labels_are_shifted_exactly_once(kernel):
    x, weight = torch.randn(1, 4, 8), torch.randn(12, 8)
    expected = F.cross_entropy(x[0, :3] @ weight.T, torch.tensor([1, 2, 3]))
    torch.testing.assert_close(kernel(x, weight, torch.tensor([[9, 1, 2, 3]])), expected)
    shifted = torch.tensor([[1, 2, 3, -100]])
    torch.testing.assert_close(kernel(x, weight, None, shift_labels=shifted), expected)
    both = kernel(x, weight, torch.tensor([[9, 9, 9, 9]]), shift_labels=shifted)
    torch.testing.assert_close(both, expected)


@losses
@pytest.mark.parametrize(("tokens", "rows"), [(4096, 32), (4096, 4096), (2049, 1024), (2049, 2048), (2049, 4096)])
def test_c03_the_loss_is_that_of_one_chunk(kernel, tokens, rows, rows_a_chunk):
    """A mean of each chunk, summed, was 128 times the loss at 4096 tokens in chunks of 32."""
    x, weight, target = torch.randn(tokens, 4), torch.randn(7, 4), torch.randint(7, (tokens,))
    rows_a_chunk(rows)
    loss = kernel(x, weight, None, shift_labels=target)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, target), rtol=1e-6, atol=0)


# C04: inputs at the edge.


@losses
def test_c04_all_labels_ignored(kernel):
    x, weight, ignored = leaf(1, 10, 8), leaf(5, 8), torch.full((1, 10), -100)
    counted = kernel(x, weight, ignored, num_items_in_batch=7)
    assert counted.item() == 0.0
    assert math.isnan(kernel(x, weight, ignored).item()), "the mean of nothing, as in torch"
    for loss in (counted, kernel(x, weight, ignored)):
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [x, weight]))


@losses
@pytest.mark.parametrize("training", [True, False])
def test_c04_four_rows_of_three_words(kernel, training):
    """The loss was 0.0 where no gradient was asked for."""
    rows = [[-0.1118, 0.0162, 0.0956], [-0.1134, 0.0088, 0.1046], [-0.1737, 0.1315, 0.0422], [-0.0921, 0.0728, 0.0194]]
    logits = torch.tensor(rows, requires_grad=training)
    loss = kernel(logits, torch.eye(3), None, shift_labels=torch.zeros(4, dtype=torch.long))
    # The report gives the logits to four places.
    assert loss.item() == pytest.approx(1.2258632, abs=5e-5)


@losses
@pytest.mark.parametrize("words", [1, 3, 129, 1025])
def test_c04_a_likelihood_is_none_above_one(kernel, words):
    """Vocabularies of one more than a tile; a fused log-probability was once 123.7."""
    x, weight = torch.randn(6, 8) * 20, torch.randn(words, 8)
    each = [kernel(x[i : i + 1], weight, None, shift_labels=torch.tensor([words - 1])) for i in range(6)]
    assert all(math.isfinite(loss) and float(loss) >= 0 for loss in each)
    torch.testing.assert_close(
        torch.stack(each), F.cross_entropy(x @ weight.T, torch.full((6,), words - 1), reduction="none")
    )


@norms
@pytest.mark.parametrize("shape", [(0, 8), (1, 0, 8)])
def test_c04_no_tokens_at_all(kernel, shape):
    x, weight = leaf(*shape), leaf(8)
    out = kernel(x, weight, 1e-6)
    assert out.shape == shape
    of_x, of_weight = torch.autograd.grad(out.sum(), [x, weight])
    assert of_x.shape == shape
    assert not of_weight.any()


# C05: what is not the kernel's to change.


@losses
def test_c05_an_input_that_others_need_stays_as_it_is(kernel):
    """softmax keeps its output for its own backward; a loss that writes its gradient there breaks it without a word."""
    z, target = leaf(5, 7), torch.tensor([0, 6, -100, 3, 3])
    states = z.softmax(-1)
    before = states.detach().clone()
    loss = kernel(states, torch.eye(7), None, shift_labels=target)
    once = torch.autograd.grad(loss, z, retain_graph=True)[0]
    assert torch.equal(states, before)
    expected = torch.autograd.grad(F.cross_entropy(z.softmax(-1), target), z)[0]
    torch.testing.assert_close(once, expected)
    z.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(z.grad, 2 * once)


@norms
def test_c05_a_gradient_that_a_residual_needs_stays_as_it_is(kernel):
    """y = norm(norm(x)) + x: the residual's gradient is the one that the outer norm was handed."""
    x, weight = leaf(4, 16), leaf(16)
    (got,) = torch.autograd.grad((kernel(kernel(x, weight, 1e-6), weight, 1e-6) + x).square().sum(), x)

    def plain(x):
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    (expected,) = torch.autograd.grad((plain(plain(x)) + x).square().sum(), x)
    # Two norms forward and backward: some twenty roundings of numbers of a few units.
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


# C06: strides.

# The same values, lying otherwise; `expanded` repeats the first row.
LAYOUTS = {
    "rows": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "columns": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}


def results(function, inputs, incoming):
    """The output and all gradients, for inputs and an incoming gradient that lie as they are given."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, incoming)]


def assert_layouts_do_not_matter(function, inputs, incoming):
    copies = [tensor.contiguous() for tensor in inputs]
    for got, expected in zip(
        results(function, inputs, incoming), results(function, copies, incoming.contiguous()), strict=True
    ):
        # The same numbers, of a few units, added in another order.
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=4e-6)


@norms
@pytest.mark.parametrize("incoming", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c06_the_layouts_of_a_norm(kernel, layout, incoming):
    x, weight, given = LAYOUTS[layout](torch.randn(2, 6, 16)), torch.randn(32)[::2], torch.randn(2, 6, 16)
    assert_layouts_do_not_matter(lambda x, weight: kernel(x, weight, 1e-6), (x, weight), LAYOUTS[incoming](given))


@norms
def test_c06_a_sum_over_a_norm_has_a_gradient(kernel):
    """It is one number, expanded: all strides are 0."""
    x, weight = leaf(2, 1024, 256, dtype=torch.bfloat16), leaf(256)
    kernel(x, weight, 1e-6).sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.isfinite().all()


@glus
@pytest.mark.parametrize("incoming", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c06_the_layouts_of_a_glu(kernel, layout, incoming):
    gate, up, given = torch.randn(3, 2, 6, 16)
    assert_layouts_do_not_matter(kernel, (LAYOUTS[layout](gate), LAYOUTS[layout](up)), LAYOUTS[incoming](given))


@rotations
def test_c06_each_row_of_a_batch_has_its_own_positions(kernel):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = torch.randn(2, 2, 5, 8)
    before = kernel(q, k, cos, sin)
    alone = kernel(q[1:], k[1:], cos[1:], sin[1:])
    cos[1], sin[1] = torch.randn(2, 5, 8)
    for old, new, single in zip(before, kernel(q, k, cos, sin), alone, strict=True):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1], new[1])
        assert torch.equal(old[1:], single)
    for shared, each in zip(kernel(q, k, cos[:1], sin[:1]), kernel(q, k, cos[[0, 0]], sin[[0, 0]]), strict=True):
        assert torch.equal(shared, each)


@experts
def test_c06_experts_of_odd_and_transposed_weights(kernel):
    """Rows of 1025 elements do not start at multiples of 16 bytes."""
    torch.manual_seed(0)
    x, weights = leaf(8, 1025, dtype=torch.bfloat16), torch.ones(8, 1).bfloat16()
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]).view(8, 1)
    gate_up = (torch.randn(4, 1025, 512) * 1025**-0.5).bfloat16().transpose(1, 2)
    down = (torch.randn(4, 256, 1025) * 16**-1).bfloat16().transpose(1, 2)
    out = kernel(x, index, weights, gate_up, down)
    gate, up = torch.einsum("tph,th->tp", gate_up.double()[index[:, 0]], x.double()).chunk(2, -1)
    exact = torch.einsum("thi,ti->th", down.double()[index[:, 0]], F.silu(gate) * up)
    # Rounded to bfloat16 after each product and each step of the activation: five times half a unit of the largest.
    assert float((out.double() - exact).abs().max()) <= 5 * 2**-9 * float(exact.abs().max())


# C07: more than 2**31 elements.


@pytest.mark.gpu
@norms
def test_c07_the_last_row_of_a_tensor_beyond_32_bits(kernel):
    x = torch.empty(524289, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        last = kernel(x, weight, 1e-6)[-2:].clone()
        torch.testing.assert_close(last, kernel(x[-2:].clone(), weight, 1e-6), rtol=0, atol=0)


# C08 and C09: memory that nobody wrote, and experts that nobody chose.


@experts
def test_c08_rows_that_no_expert_takes_over_dirty_memory(kernel):
    """Half of the slots hold the sentinel; the step after the first was NaN."""
    torch.manual_seed(0)
    x, weights, gate_up, down = leaf(8, 4), leaf(8, 2), leaf(4, 12, 4), leaf(4, 4, 6)
    index = torch.tensor([[0, 4], [4, 4], [2, 4], [4, 0], [4, 4], [4, 4], [0, 2], [2, 0]])
    index[:3] = torch.tensor([[0, 4], [0, 2], [0, 4]])
    inputs = [x, weights, gate_up, down]
    for _ in range(2):
        with poisoned_memory():
            out = kernel(x, index, weights, gate_up, down)
            found = torch.autograd.grad(out.square().sum(), inputs)
        assert all(tensor.isfinite().all() for tensor in (out, *found))
        assert not out[4].any()
        assert not found[0][4].any()
        assert not found[1][index == 4].any()
        assert not found[2][1].any(), "an expert without tokens"


@experts
def test_c09_both_experts_of_a_token_count(kernel):
    """Flattened indices read as one expert a token gave fluent and wrong text."""
    x, weights, gate_up, down = leaf(2, 4), leaf(2, 2), leaf(3, 12, 4), leaf(3, 4, 6)
    index = torch.tensor([[0, 2], [1, 1]])

    def one(x, expert):
        gate, up = (gate_up[expert] @ x).chunk(2)
        return down[expert] @ (F.silu(gate) * up)

    expected = torch.stack([sum(weights[t, k] * one(x[t], index[t, k]) for k in range(2)) for t in range(2)])
    torch.testing.assert_close(kernel(x, index, weights, gate_up, down), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        kernel(x, index.flatten(), weights.flatten(), gate_up, down)


@experts
@pytest.mark.parametrize("number", [1, 2, 16, 17, 128])
def test_c09_every_number_of_experts_up_to_all_of_them_chosen(kernel, number):
    x, gate_up, down = leaf(3, 4), leaf(number, 6, 4), leaf(number, 4, 3)
    index = torch.rand(3, number).argsort(-1)
    out = kernel(x, index, torch.ones(3, number), gate_up, down)
    gate, up = torch.einsum("eph,th->tep", gate_up.double(), x.double()).chunk(2, -1)
    exact = torch.einsum("ehi,tei->th", down.double(), F.silu(gate) * up)
    # A sum of up to 128 terms in float32.
    assert float((out.double() - exact).abs().max()) <= 128 * torch.finfo(torch.float32).eps * float(exact.abs().max())


@experts
def test_c09_the_sentinel_adds_nothing(kernel):
    x, weights, gate_up, down = leaf(4, 8), leaf(4, 2), leaf(3, 12, 8), leaf(3, 8, 6)
    index = torch.tensor([[0, 3], [3, 3], [0, 2], [2, 3]])
    out = kernel(x, index, weights, gate_up, down)
    assert not out[1].any()
    _, of_weights, of_gate_up, of_down = torch.autograd.grad(out.sum(), [x, weights, gate_up, down])
    assert not of_weights[index == 3].any()
    assert not of_gate_up[1].any()
    assert not of_down[1].any()


# C10: the loss that balances experts.


@balances
def test_c10_known_values(kernel):
    even, collapsed = torch.zeros(6, 4), torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(6, 1)
    assert float(kernel((even,), 4, 2)) == pytest.approx(2.0)
    assert float(kernel((collapsed,), 4, 1)) == pytest.approx(4.0)
    raw = torch.tensor([[0.97, 0.01, 0.01, 0.01]]).log().repeat(6, 1)
    assert float(kernel((raw,), 4, 1)) == pytest.approx(3.88), "raw logits: softmax twice would give 1.8616"
    chosen = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    share = chosen.softmax(-1)[0]  # over all experts, also those that are not chosen
    assert float(kernel((chosen,), 4, 2)) == pytest.approx(4 * float(share[1] + share[2]))


@balances
def test_c10_padding_does_not_count(kernel):
    logits = (torch.tensor([[50.0, 0, 0, 0], [50.0, 0, 0, 0], [0, 50.0, 0, 0], [0, 50.0, 0, 0]]),)
    assert float(kernel(logits, 4, 1, torch.tensor([[1, 1, 0, 0]]))) == pytest.approx(4.0)
    assert float(kernel(logits, 4, 1)) == pytest.approx(2.0)
    assert math.isnan(kernel(logits, 4, 1, torch.zeros(1, 4)))


@balances
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 4, 1), (1, 5)])
def test_c10_a_mask_of_another_rank_or_length_is_refused(kernel, shape):
    with pytest.raises(ValueError, match="attention_mask"):
        kernel((torch.randn(4, 4),), 4, 1, torch.ones(shape))


@balances
def test_c10_what_is_no_tuple_of_layers_is_zero(kernel):
    assert kernel(None, 4, 2) == kernel(torch.randn(4, 4), 4, 2) == 0


# C12: gradients where they are asked for, and only there.


@losses
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("training", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_c12_every_demand_for_gradients(kernel, mode, training):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape) for shape in ((256, 512), (1000, 512)))
    target = torch.randint(1000, (256,))
    expected = F.cross_entropy(x @ weight.T, target)
    x.requires_grad_(training[0])
    weight.requires_grad_(training[1])
    with mode():
        loss = kernel(x, weight, None, shift_labels=target)
    torch.testing.assert_close(loss, expected)
    asked = mode is torch.enable_grad and any(training)
    assert loss.requires_grad is asked
    if asked:
        loss.backward()
    assert [tensor.grad is not None for tensor in (x, weight)] == [asked and wanted for wanted in training]
