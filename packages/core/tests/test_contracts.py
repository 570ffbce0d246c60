"""The contracts of the core: each reference is transformers' own maths, and known numbers come out of it."""

import math
import subprocess
import sys

import opslot
import pytest
import torch
from opslot.ops.cross_entropy_loss import cross_entropy_loss
from opslot.ops.glu import glu
from opslot.ops.load_balancing_loss import load_balancing_loss
from opslot.ops.moe_experts import moe_experts
from opslot.ops.rms_norm import rms_norm
from opslot.ops.rotary_pos_emb import rotary_pos_emb
from opslot.testing import check, poisoned_memory

CONTRACTS = opslot.registry().contracts()
DTYPES = [torch.float32, torch.bfloat16]


def slow(value):  # thirty contracts take a quarter of a minute a dtype
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def upstream():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    return modeling_qwen3_moe


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


def assert_same(ours, theirs, inputs):
    """Equal bits in outputs, and in every gradient for one random incoming gradient."""
    ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (ours, theirs))
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.dtype == yours.dtype
        torch.testing.assert_close(mine, yours, rtol=0, atol=0, equal_nan=True)
    incoming = [torch.randn_like(output) for output in ours]
    mine = torch.autograd.grad(ours, inputs, incoming, retain_graph=True)
    yours = torch.autograd.grad(theirs, inputs, incoming, retain_graph=True)
    for number, (a, b) in enumerate(zip(mine, yours, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=number: f"input {n}: {text}"
        )


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
@pytest.mark.parametrize("dtype", [slow("float64"), "float32", "bfloat16", slow("float16")])
def test_the_reference_keeps_its_own_contract(contract, dtype):
    # Manners do not depend on the dtype.
    checks = {} if dtype == "float32" else {"checks": ("values", "gradients")}
    with poisoned_memory():
        check(contract.op, contract.variant, contract.load_reference(), dtype=dtype, seed=1, **checks)


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_samples_are_reproducible_and_named_apart(contract):
    first, again = (list(contract.samples("cpu", torch.float32, 7)) for _ in range(2))
    other = list(contract.samples("cpu", torch.float32, 8))
    assert len({sample.name for sample in first}) == len(first) >= 8
    assert [s.name for s in first] == [s.name for s in again] == [s.name for s in other]
    for mine, same, different in zip(first, again, other, strict=True):
        tensors = [
            [t for t in s.args if isinstance(t, torch.Tensor) and t.requires_grad] for s in (mine, same, different)
        ]
        for a, b, c in zip(*tensors, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            assert a.numel() == 0 or not torch.equal(a, c)


def test_contracts_load_without_torch():
    code = "import sys, opslot.ops, opslot.testing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_the_config_fields_and_aliases():
    fields = {contract.key: contract.config_fields() for contract in CONTRACTS}
    assert "moe_implementation" in fields["moe_experts", "standard"]
    assert "swiglu_mlp" in fields["glu", "swiglu"]
    assert "apply_rotary_pos_emb_implementation" in fields["rotary_pos_emb", "full"]
    assert opslot.registry().contract("swiglu_mlp", "standard").key == ("glu", "swiglu")
    assert opslot.registry().contract("apply_rotary_pos_emb", "full").key == ("rotary_pos_emb", "full")


class TestRMSNorm:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
    def test_is_that_of_transformers(self, upstream, dtype, weight_dtype):
        norm = upstream.Qwen3MoeRMSNorm(48, eps=1e-5).to(weight_dtype)
        torch.nn.init.normal_(norm.weight)
        x = leaf(3, 7, 48, dtype=dtype)
        assert_same(rms_norm(x, norm.weight, 1e-5), norm(x), [x, norm.weight])

    def test_numbers(self):
        x, expected = torch.tensor([3.0, 4.0]), torch.tensor([0.848528, 1.131371])
        torch.testing.assert_close(rms_norm(x, torch.ones(2), 1e-12), expected, rtol=1e-5, atol=0)
        # What tells it from a zero-centred norm, whose weight is 1 + w.
        assert rms_norm(x, torch.zeros(2), 1e-12).tolist() == [0.0, 0.0]

    def test_rounds_before_the_weight_multiplies(self):
        x, weight = torch.tensor([1.0, 3.0]).bfloat16(), torch.tensor([3.0, 3.0]).bfloat16()
        normal = (x.float() * torch.rsqrt(torch.tensor(5.0))).bfloat16()
        assert torch.equal(rms_norm(x, weight, 0.0), weight * normal)
        assert rms_norm(x, weight.float(), 0.0).dtype is torch.float32


class TestRotary:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize("unsqueeze_dim", [1, 2])
    def test_is_that_of_transformers(self, upstream, dtype, batch, unsqueeze_dim):
        q, k = leaf(2, 5, 4, 16, dtype=dtype), leaf(2, 5, 2, 16, dtype=dtype)
        cos, sin = torch.randn(2, batch, 5, 16).to(dtype)
        order = (0, 2, 1, 3) if unsqueeze_dim == 1 else (0, 1, 2, 3)
        arguments = q.permute(order), k.permute(order), cos, sin, unsqueeze_dim
        assert_same(rotary_pos_emb(*arguments), upstream.apply_rotary_pos_emb(*arguments), [q, k])

    def test_numbers(self):
        q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        out, _ = rotary_pos_emb(q, q, torch.zeros(1, 1, 4), torch.ones(1, 1, 4))
        assert out.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]  # halves; pairs of neighbours would give -2, 1, -4, 3

    def test_sequences_do_not_see_the_positions_of_others(self):
        q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
        cos, sin = torch.randn(2, 2, 5, 8)
        before = rotary_pos_emb(q, k, cos, sin)
        cos[1], sin[1] = torch.randn(2, 5, 8)
        after = rotary_pos_emb(q, k, cos, sin)
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[0], new[0])
            assert not torch.equal(old[1], new[1])


class TestGLU:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_is_that_of_transformers(self, upstream, dtype):
        from transformers import Qwen3MoeConfig

        mlp = upstream.Qwen3MoeMLP(Qwen3MoeConfig(hidden_size=16, intermediate_size=24)).to(dtype)
        x = leaf(3, 16, dtype=dtype)
        ours = mlp.down_proj(glu(mlp.gate_proj(x), mlp.up_proj(x)))
        assert_same(ours, mlp(x), [x, *mlp.parameters()])

    def test_numbers(self):
        value = float(glu(torch.tensor(10.0, dtype=torch.float64), torch.tensor(-10.0, dtype=torch.float64)))
        assert value == pytest.approx(-99.995460, abs=1e-6)  # clamped at 7 it would be -48.955358


class TestExperts:
    @pytest.fixture
    def module(self, upstream):
        from transformers import Qwen3MoeConfig

        config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=12, num_experts=5)
        config._experts_implementation = "eager"
        module = upstream.Qwen3MoeExperts(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return module

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("case", ["routed", "with an empty expert", "with sentinels", "chosen twice"])
    def test_is_that_of_transformers(self, module, dtype, weights_dtype, case):
        module.to(dtype)
        index = torch.rand(9, 5).argsort(-1)[:, :2]
        if case == "with an empty expert":
            index[index == 3] = 4
        elif case == "with sentinels":
            index[::2] = 5
        elif case == "chosen twice":
            index[:, 1] = index[:, 0]
        x, weights = leaf(9, 16, dtype=dtype), leaf(9, 2, dtype=weights_dtype)
        gate_up, down = module.gate_up_proj, module.down_proj
        assert_same(
            moe_experts(x, index, weights, gate_up, down), module(x, index, weights), [x, weights, gate_up, down]
        )

    def test_sentinel_adds_nothing_and_empty_experts_get_zeros(self):
        x, weights = leaf(4, 8), leaf(4, 2)
        gate_up, down = leaf(3, 12, 8), leaf(3, 8, 6)
        index = torch.tensor([[0, 3], [3, 3], [0, 2], [2, 3]])
        out = moe_experts(x, index, weights, gate_up, down)
        assert not out[1].any()
        d_x, d_weights, d_gate_up, d_down = torch.autograd.grad(out.sum(), [x, weights, gate_up, down])
        assert not d_x[1].any()
        assert not d_weights[index == 3].any()
        assert not d_gate_up[1].any()
        assert not d_down[1].any()
        assert d_gate_up[0].any()

    def test_flat_indices_are_refused(self):
        with pytest.raises(ValueError, match=r"must both be \[T, K\], got \[4\] and \[2, 2\]"):
            moe_experts(leaf(2, 8), torch.zeros(4).long(), leaf(2, 2), leaf(3, 12, 8), leaf(3, 8, 6))


class TestCrossEntropy:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "keywords",
        [
            {},
            {"num_items_in_batch": 13},
            {"num_items_in_batch": torch.tensor(13)},
            {"ignore_index": 3},
            {"shift_labels": torch.arange(14).view(2, 7)},
            {"shift_labels": torch.arange(14).view(2, 7), "num_items_in_batch": 3},
        ],
        ids=lambda keywords: ", ".join(f"{k} {type(v).__name__}" for k, v in keywords.items()) or "plain",
    )
    def test_is_that_of_transformers(self, upstream, dtype, keywords):
        from transformers.loss.loss_utils import ForCausalLMLoss

        head = torch.nn.Linear(16, 20, bias=False, dtype=dtype)
        x, labels = leaf(2, 7, 16, dtype=dtype), torch.randint(20, (2, 7))
        labels[0, :3] = keywords.get("ignore_index", -100)
        theirs = ForCausalLMLoss(head(x), labels, 20, **keywords)
        assert_same(cross_entropy_loss(x, head.weight, labels, **keywords), theirs, [x, head.weight])

    @pytest.mark.parametrize("family", ["Gemma2", "Cohere"])
    def test_softcap_and_scale_are_those_of_transformers(self, upstream, family):
        """The whole model's loss: what stands between the head and the loss differs from family to family."""
        import transformers

        shape = {
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "pad_token_id": 0,
        }
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = getattr(transformers, f"{family}Config")(**shape, **heads)
        keywords = {"logit_scale": 3.0} if family == "Cohere" else {"logit_softcap": 2.0}
        if family == "Cohere":
            config.logit_scale = 3.0
        else:
            config.final_logit_softcapping, config.head_dim = 2.0, 8
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        torch.nn.init.normal_(model.lm_head.weight)
        words = torch.randint(1, 40, (2, 9))
        hidden = model.model(words).last_hidden_state
        ours = cross_entropy_loss(hidden, model.lm_head.weight, words, **keywords)
        plain = cross_entropy_loss(hidden, model.lm_head.weight, words)
        assert torch.equal(ours, model(words, labels=words).loss)
        assert not torch.equal(ours, plain)

    def test_micro_batches_add_up(self):
        """NLL {1, 1, 1} and {5}: four items, so 3 / 4 and 5 / 4, and not 1 and 5."""

        def with_nll(*values):
            # Two words, the target's logit 0, so that the NLL is log(1 + exp(other)).
            return torch.tensor([[0.0, math.log(math.expm1(value))] for value in values])

        identity = torch.eye(2)
        losses = [
            float(
                cross_entropy_loss(
                    with_nll(*values),
                    identity,
                    None,
                    shift_labels=torch.zeros(len(values)).long(),
                    num_items_in_batch=4,
                )
            )
            for values in ([1.0, 1.0, 1.0], [5.0])
        ]
        assert losses == pytest.approx([0.75, 1.25], rel=1e-6)

    def test_shifts_exactly_once(self):
        x, weight = torch.randn(1, 4, 8), torch.randn(12, 8)
        loss = cross_entropy_loss(x, weight, torch.tensor([[9, 1, 2, 3]]))
        same = cross_entropy_loss(x, weight, None, shift_labels=torch.tensor([[1, 2, 3, -100]]))
        assert torch.equal(loss, same)
        expected = torch.nn.functional.cross_entropy(x[0, :3] @ weight.t(), torch.tensor([1, 2, 3]))
        torch.testing.assert_close(loss, expected)

    def test_softcap_number(self):
        logits = torch.tensor([[60.0, 0.0]], dtype=torch.float64)
        loss = cross_entropy_loss(
            logits, torch.eye(2, dtype=torch.float64), None, shift_labels=torch.tensor([1]), logit_softcap=30.0
        )
        assert float(loss) == pytest.approx(28.920827, abs=1e-6)

    def test_bias_comes_before_scale_and_scale_before_softcap(self):
        x, weight, bias, target = leaf(3, 8), leaf(5, 8), leaf(5), torch.tensor([0, 4, 2])
        keywords = {"bias": bias, "logit_scale": 0.3, "logit_softcap": 1.5}
        ours = cross_entropy_loss(x, weight, None, shift_labels=target, **keywords)
        logits = 1.5 * torch.tanh((x @ weight.t() + bias) * 0.3 / 1.5)
        torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, target))

    @pytest.mark.parametrize(("count", "expected"), [(7, 0.0), (torch.tensor(7), 0.0), (None, math.nan)])
    def test_nothing_to_count(self, count, expected):
        x, weight = leaf(2, 5, 8), leaf(12, 8)
        loss = cross_entropy_loss(x, weight, torch.full((2, 5), -100), num_items_in_batch=count)
        assert loss.item() == pytest.approx(expected, abs=0, nan_ok=True)
        for gradient in torch.autograd.grad(loss, [x, weight]):
            assert not gradient.any()

    def test_no_labels_at_all_are_refused(self):
        with pytest.raises(ValueError, match="give labels, or shift_labels"):
            cross_entropy_loss(leaf(2, 8), leaf(5, 8), None)


class TestLoadBalancing:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("mask", [None, torch.int64, torch.float32, torch.bool])
    def test_is_that_of_transformers(self, upstream, dtype, mask):
        logits = tuple(leaf(14, 6, dtype=dtype) for _ in range(3))
        attention_mask = None if mask is None else torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]).to(mask)
        arguments = logits, 6, 2, attention_mask
        assert_same(load_balancing_loss(*arguments), upstream.load_balancing_loss_func(*arguments), list(logits))

    def test_anything_but_a_tuple_of_layers_is_zero(self, upstream):
        for nothing in (None, [torch.randn(3, 4)], torch.randn(3, 4)):
            assert load_balancing_loss(nothing, 4, 2) == upstream.load_balancing_loss_func(nothing, 4, 2) == 0
        assert load_balancing_loss((), 4, 2) == 0  # where upstream raises IndexError

    def test_numbers(self):
        even = (torch.zeros(6, 4),)
        assert float(load_balancing_loss(even, 4, 2)) == pytest.approx(2.0)
        collapsed = (torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(6, 1),)
        assert float(load_balancing_loss(collapsed, 4, 1)) == pytest.approx(4.0)
        raw = (torch.tensor([[0.97, 0.01, 0.01, 0.01]]).log().repeat(6, 1),)
        assert float(load_balancing_loss(raw, 4, 1)) == pytest.approx(3.88)  # 1.8616 if softmax were applied twice

    def test_padding_does_not_count(self):
        logits = (torch.tensor([[50.0, 0, 0, 0], [50.0, 0, 0, 0], [0, 50.0, 0, 0], [0, 50.0, 0, 0]]),)
        mask = torch.tensor([[1, 1, 0, 0]])
        assert float(load_balancing_loss(logits, 4, 1, mask)) == pytest.approx(4.0)
        assert float(load_balancing_loss(logits, 4, 1)) == pytest.approx(2.0)

    @pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 5), (2, 1, 2), (3,)])
    def test_other_masks_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\] with B \* S = 4"):
            load_balancing_loss((torch.randn(4, 4),), 4, 1, torch.ones(shape))

    def test_no_token_at_all_is_nan(self, upstream):
        logits, mask = (torch.randn(4, 4),), torch.zeros(1, 4)
        assert math.isnan(load_balancing_loss(logits, 4, 1, mask))
        assert math.isnan(upstream.load_balancing_loss_func(logits, 4, 1, mask))
