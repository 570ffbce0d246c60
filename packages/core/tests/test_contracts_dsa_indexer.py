"""dsa_indexer/glm and dsa_indexer/deepseek_v4: the choices of transformers' indexers, and known numbers."""

import opslot
import pytest
import torch
from opslot.ops.dsa_indexer import dsa_indexer_deepseek_v4, dsa_indexer_glm
from opslot.testing import check

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def glm():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

    return modeling_glm_moe_dsa


@pytest.fixture
def deepseek_v4():
    pytest.importorskip("transformers", reason="the core does not depend on transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("boolean", [True, False], ids=["boolean mask", "additive mask"])
@pytest.mark.parametrize("top_k", [1, 4, 64])
def test_glm_is_that_of_transformers(glm, dtype, boolean, top_k):
    from transformers import GlmMoeDsaConfig

    heads, dim, length = 3, 8, 9
    config = GlmMoeDsaConfig(
        hidden_size=16, num_hidden_layers=1, q_lora_rank=heads * dim, index_n_heads=heads, index_head_dim=dim
    )
    indexer = glm.GlmMoeDsaIndexer(config, 0).to(dtype)
    # What comes before the scores is not the contract's: queries are passed through and nothing is rotated.
    indexer.qk_rope_head_dim, indexer.index_topk = 0, top_k
    torch.nn.init.eye_(indexer.wq_b.weight)
    hidden, q = torch.randn(2, length, 16).to(dtype), torch.randn(2, length, heads, dim).to(dtype)
    k, weights = indexer.k_norm(indexer.wk(hidden)), indexer.weights_proj(hidden)
    allowed = torch.ones(length, length).tril().bool().repeat(2, 1, 1)
    allowed[1, :, :3] = False
    mask = allowed if boolean else additive(allowed, dtype)

    ours = dsa_indexer_glm(q, k, weights, mask, top_k)
    nothing = torch.empty(2, length, 0, dtype=dtype)
    theirs = indexer(hidden, q.flatten(2), (nothing, nothing), mask, None)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    seen = allowed.gather(-1, theirs.long())
    assert torch.equal(ours[seen], theirs[seen])
    assert torch.equal(allowed.gather(-1, ours.long()), seen)
    # What the model makes of it.
    masks = [torch.zeros_like(allowed).scatter(-1, chosen.long(), True) & allowed for chosen in (ours, theirs)]
    assert torch.equal(*masks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 17, 32])
@pytest.mark.parametrize("top_k", [1, 3, 64])
def test_deepseek_v4_is_that_of_transformers(deepseek_v4, dtype, length, top_k):
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=8,
        index_n_heads=3,
        index_head_dim=16,
        index_topk=top_k,
        partial_rotary_factor=0.5,
    )
    indexer = deepseek_v4.DeepseekV4Indexer(config)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    indexer.to(dtype)
    seen = []
    indexer.scorer.register_forward_pre_hook(lambda module, args: seen.extend(args))
    hidden, residual = torch.randn(2, length, 16).to(dtype), torch.randn(2, length, 8).to(dtype)
    positions = torch.arange(length).repeat(2, 1)
    theirs = indexer(hidden, residual, positions, None, 0)
    q, k, _ = seen
    weights = indexer.scorer.weights_proj(hidden)
    for given in (positions, positions[:1]):
        ours = dsa_indexer_deepseek_v4(q, k, weights, given, 4, top_k)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_numbers():
    """Scores 3, 5, 0, -4 and 2: relu cuts a head off, its weight may be negative."""
    k = torch.tensor([[[3.0, 0.0], [5.0, 0.0], [-9.0, 0.0], [0.0, 4.0], [2.0, 0.0]]])
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    weights = torch.tensor([[[1.0, -1.0]]])
    everything = torch.ones(1, 1, 5).bool()
    assert dsa_indexer_glm(q, k, weights, everything, 5).tolist() == [[[1, 0, 4, 2, 3]]]
    assert dsa_indexer_glm(q, k, weights, everything, 2).tolist() == [[[1, 0]]]
    assert dsa_indexer_deepseek_v4(q, k, weights, torch.tensor([[19]]), 4, 5).tolist() == [[[1, 0, 4, 2, 3]]]


def test_what_there_is_too_few_of():
    """The query at position 11 sees three windows of four tokens; position 2 sees none."""
    q, k, weights = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]), torch.ones(1, 2, 1)
    chosen = dsa_indexer_deepseek_v4(q, k, weights, torch.tensor([[2, 11]]), 4, 4)
    assert chosen.tolist() == [[[-1, -1, -1, -1], [2, 1, 0, -1]]]
    mask = torch.tensor([[[True, False, True, False], [False] * 4]])
    # Never negative, or the mask that transformers builds from it would raise an IndexError.
    assert dsa_indexer_glm(q, k, weights, mask, 3).tolist() == [[[2, 0, 1], [0, 0, 0]]]


def test_other_shapes_are_refused():
    q, k, weights = torch.ones(2, 3, 4, 5), torch.ones(2, 6, 5), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S, T\] = \[2, 3, 6\].* got \[2, 6\]"):
        dsa_indexer_glm(q, k, weights, torch.ones(2, 6).bool(), 2)
    with pytest.raises(ValueError, match=r"position_ids must be \[B, S\] = \[2, 3\] or \[1, S\], got \[3\]"):
        dsa_indexer_deepseek_v4(q, k, weights, torch.arange(3), 4, 2)
    for bad in ((q[0], k, weights), (q, k[:1], weights), (q, k.unsqueeze(1), weights), (q, k, weights[..., :1])):
        with pytest.raises(ValueError, match="dsa_indexer/glm: q must be"):
            dsa_indexer_glm(*bad, torch.ones(2, 3, 6).bool(), 2)
        with pytest.raises(ValueError, match="dsa_indexer/deepseek_v4: q must be"):
            dsa_indexer_deepseek_v4(*bad, torch.zeros(2, 3).long(), 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["glm", "deepseek_v4"])
def test_no_rounding_decides_in_a_sample(variant, dtype):
    """Scores of a sample are exact, so a correct kernel finds the same indices whatever it rounds."""
    contract = opslot.registry().contract("dsa_indexer", variant)
    for sample in contract.samples("cpu", dtype, 3):
        q, k, weights = (tensor.detach().double() for tensor in sample.args[:3])
        scores = torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", q, k).relu())
        assert torch.equal(scores, scores.float().double())
        for row in scores.flatten(0, 1):
            assert len(row.unique()) == len(row), sample.name


def without_relu(q, k, weights, attention_mask, top_k):
    # Twice the heads: relu(x) - relu(-x) is x.
    return dsa_indexer_glm(torch.cat([q, -q], dim=2), k, torch.cat([weights, -weights], dim=2), attention_mask, top_k)


def with_rounded_products(q, k, weights, attention_mask, top_k):
    """Products in bfloat16, as scores, taken up by one-hot keys."""
    products = torch.einsum("bshd,btd->bsht", q.bfloat16(), k.bfloat16())
    keys = torch.eye(k.shape[1]).expand(len(k), -1, -1)
    return dsa_indexer_glm(products.float(), keys, weights, attention_mask, top_k)


def without_mask(q, k, weights, attention_mask, top_k):
    return dsa_indexer_glm(q, k, weights, torch.ones_like(attention_mask, dtype=torch.bool), top_k)


def with_sentinels(q, k, weights, attention_mask, top_k):
    indices = dsa_indexer_glm(q, k, weights, attention_mask, top_k)
    allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    return indices.masked_fill(~allowed.expand(len(q), -1, -1).gather(-1, indices.long()), -1)


def in_int64(q, k, weights, attention_mask, top_k):
    return dsa_indexer_glm(q, k, weights, attention_mask, top_k).long()


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (without_relu, "float32"),
        (with_rounded_products, "bfloat16"),
        (without_mask, "float32"),
        (with_sentinels, "float32"),
        (in_int64, "float32"),
    ],
)
def test_wrong_kernels_are_caught(kernel, dtype):
    with pytest.raises(AssertionError, match=f"dsa_indexer/glm, kernel {kernel.__name__}.*output 0"):
        check("dsa_indexer", "glm", kernel, dtype=dtype)


def one_window_early(q, k, weights, position_ids, compress_rate, top_k):
    return dsa_indexer_deepseek_v4(q, k, weights, position_ids + 1, compress_rate, top_k)


def in_int32(q, k, weights, position_ids, compress_rate, top_k):
    return dsa_indexer_deepseek_v4(q, k, weights, position_ids, compress_rate, top_k).int()


@pytest.mark.parametrize("kernel", [one_window_early, in_int32])
def test_wrong_kernels_for_deepseek_v4_are_caught(kernel):
    with pytest.raises(AssertionError, match=f"dsa_indexer/deepseek_v4, kernel {kernel.__name__}.*output 0"):
        check("dsa_indexer", "deepseek_v4", kernel)


@pytest.mark.parametrize("variant", ["glm", "deepseek_v4"])
def test_the_workload_is_a_problem_of_the_contract(variant):
    contract = opslot.registry().contract("dsa_indexer", variant)
    shape = {"queries": 6, "keys": 10, "heads": 2, "head_dim": 8, "top_k": 4}
    sample = contract.workload.problem("cpu", torch.bfloat16, 0, **shape)
    assert contract.load_reference()(*sample.args, **sample.kwargs).shape == (1, 6, 4)
    assert contract.workload.flops(**shape) == 2 * 6 * 10 * 2 * 9
