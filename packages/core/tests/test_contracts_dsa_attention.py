"""dsa_attention/glm and dsa_attention/deepseek_v4: transformers' eager attention with a choice of keys, bit for bit."""

import opslot
import pytest
import torch
from opslot.ops.dsa_attention import dsa_attention_deepseek_v4, dsa_attention_glm
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


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def assert_same(ours, theirs, inputs):
    """Equal bits in the output, and in every gradient for one random incoming gradient."""
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    incoming = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, inputs, incoming, allow_unused=True)
    yours = torch.autograd.grad(theirs, inputs, incoming, allow_unused=True)
    for a, b in zip(mine, yours, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("merged", [False, True], ids=["plain mask", "mask with the choice in it"])
def test_glm_is_that_of_transformers(glm, dtype, merged):
    """The whole attention module, with the contract between its cache and its o_proj."""
    from transformers import GlmMoeDsaConfig

    config = GlmMoeDsaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=8,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        head_dim=4,
        indexer_types=["shared"],
    )
    config._attn_implementation = "eager"
    module = randomised(glm.GlmMoeDsaAttention(config, 0)).to(dtype)
    x, length = leaf(2, 9, 16, dtype=dtype), 9
    cos, sin = torch.randn(2, 2, length, 4).to(dtype)
    chosen = torch.rand(2, length, length).argsort(-1)[..., :4].int()
    chosen[..., 0] = torch.arange(length)  # every row has a key, as transformers needs
    causal = torch.ones(length, length).tril().bool().expand(2, 1, -1, -1)
    mask = additive(causal, dtype)
    theirs, _, _ = module(x, (cos, sin), mask, prev_topk_indices=chosen)

    residual = module.q_a_layernorm(module.q_a_proj(x))
    q = module.q_b_proj(residual).view(2, length, 3, 10).transpose(1, 2)
    q_nope, q_rot = q.split([6, 4], dim=-1)
    latent, k_rot = module.kv_a_proj_with_mqa(x).split([12, 4], dim=-1)
    latent = module.kv_a_layernorm(latent).unsqueeze(1)
    q_rot, k_rot = glm.apply_rotary_pos_emb_interleave(q_rot, k_rot.unsqueeze(1), cos, sin)
    if merged:
        named = torch.zeros(2, 1, length, length).bool().scatter(-1, chosen.long().unsqueeze(1), True)
        mask = mask.masked_fill(~named, torch.finfo(dtype).min)
    ours = dsa_attention_glm(q_nope, q_rot, latent, k_rot, module.kv_b_proj.weight, chosen, module.scaling, mask)
    assert ours.shape == (2, length, 3, 5)
    assert_same(module.o_proj(ours.flatten(2)), theirs, [x, *module.parameters()])
    # A boolean mask and -1 in the place of what it forbids are the same.
    again = [
        dsa_attention_glm(q_nope, q_rot, latent, k_rot, module.kv_b_proj.weight, *rest)
        for rest in (
            (chosen, module.scaling, causal),
            (chosen.masked_fill(~causal[:, 0].gather(-1, chosen.long()), -1), module.scaling),
        )
    ]
    assert all(torch.equal(ours, other) for other in again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"])
def test_deepseek_v4_is_that_of_transformers(deepseek_v4, monkeypatch, dtype, kind):
    """The whole attention module, with the contract in the place of its attention function."""
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=3,
        index_head_dim=16,
        index_topk=2,
        sliding_window=3,
        partial_rotary_factor=0.5,
        layer_types=[kind],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 5},
    )
    config._attn_implementation = "eager"
    module = randomised(deepseek_v4.DeepseekV4Attention(config, 0)).to(dtype)
    module.sinks.data = module.sinks.data.float()  # as transformers keeps them
    x, length = leaf(2, 17, 16, dtype=dtype), 17
    tables = {label: tuple(torch.randn(2, 2, length, 4).to(dtype)) for label in ("main", "compress")}
    near = torch.ones(length, length).tril().triu(-2).bool().expand(2, 1, -1, -1)
    calls = []

    def attention(module, query, key, value, attention_mask, scaling, **keywords):
        assert key is value
        # The columns of the mask's zeros; rows have different numbers of them.
        allowed = attention_mask[:, 0] == 0
        width = int(allowed.sum(-1).max())
        order = allowed.long().sort(dim=-1, descending=True).indices[..., :width]
        indices = torch.where(allowed.gather(-1, order), order, -1)
        calls.append(indices.shape)
        return dsa_attention_deepseek_v4(query, key, module.sinks, indices, scaling), None

    def run():
        return module(x, tables, torch.arange(length).repeat(2, 1), additive(near, dtype))[0]

    theirs = run()
    monkeypatch.setattr(deepseek_v4, "eager_attention_forward", attention)
    ours = run()
    width = {"sliding_attention": 3, "compressed_sparse_attention": 5, "heavily_compressed_attention": 6}[kind]
    assert calls == [(2, length, width)]
    assert_same(ours, theirs, [x, *module.parameters()])


def rows_without_a_key():
    q, kv, sinks, latent = leaf(1, 2, 3, 4), leaf(1, 1, 5, 4), leaf(2), leaf(1, 1, 5, 6)
    indices = torch.tensor([[[0, 3], [-1, 5], [4, -1]]])
    yield q, [kv, sinks], lambda *a: dsa_attention_deepseek_v4(*a, indices, 0.5)
    rest = [leaf(1, 2, 3, 2), latent, leaf(1, 1, 5, 2), leaf(14, 6)]
    yield q, rest, lambda *a: dsa_attention_glm(*a, indices, 0.5)
    mask = torch.ones(1, 1, 3, 5).bool()
    mask[:, :, 1] = False
    named = torch.tensor([[[0, 3], [1, 2], [4, 4]]])
    yield q, rest, lambda *a: dsa_attention_glm(*a, named, 0.5, mask)
    yield q, rest, lambda *a: dsa_attention_glm(*a, named, 0.5, additive(mask, torch.float32))
    infinite = torch.zeros(1, 1, 3, 5).masked_fill(~mask, float("-inf"))
    yield q, rest, lambda *a: dsa_attention_glm(*a, named, 0.5, infinite)


@pytest.mark.parametrize("case", range(5))
def test_b046_a_row_without_an_index_gives_zeros_and_finite_gradients(case):
    q, rest, function = list(rows_without_a_key())[case]
    out = function(q, *rest)
    assert not out[:, 1].any()
    assert out[:, 0].all()
    assert out[:, 2].all()
    # The row alone, then all of them.
    alone = torch.autograd.grad(out[:, 1].sum(), [q, *rest], retain_graph=True)
    assert not any(gradient.any() for gradient in alone)  # NaN would be true
    gradients = torch.autograd.grad(out.sum(), [q, *rest])
    assert not gradients[0][:, :, 1].any()
    assert gradients[0][:, :, 0].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("variant", ["glm", "deepseek_v4"])
def test_b108_samples_have_24_and_32_heads(variant):
    contract = opslot.registry().contract("dsa_attention", variant)
    assert {24, 32} <= {sample.args[0].shape[1] for sample in contract.samples("cpu", torch.float32, 0)}


def test_numbers():
    """Two keys with logits log 3 and 0; with a sink of log 4 beside them half of it is lost."""
    kv = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]]])
    q = torch.tensor([[[[3.0, 1.0]]]]).log()
    indices = torch.tensor([[[1, 0, -1]]])
    out = dsa_attention_deepseek_v4(q, kv, torch.tensor([4.0]).log(), indices, 1.0)
    torch.testing.assert_close(out, torch.tensor([[[[0.375, 0.125]]]]))
    # The latent gives key and value; half of the key is rotated and the same for all heads.
    weight, nothing = torch.eye(2).repeat(2, 1), torch.zeros(1, 1, 3, 2)
    out = dsa_attention_glm(q, torch.zeros(1, 1, 1, 2), kv, nothing, weight, indices, 1.0)
    torch.testing.assert_close(out, torch.tensor([[[[0.75, 0.25]]]]))
    rotated = torch.tensor([[[[0.0, 0.0], [3.0, 0.0], [0.0, 0.0]]]]).log1p()[..., :1]
    out = dsa_attention_glm(q * 0, torch.ones(1, 1, 1, 1), kv, rotated, weight, indices, 1.0)
    torch.testing.assert_close(out, torch.tensor([[[[0.2, 0.8]]]]))


def test_other_shapes_are_refused():
    q, kv, sinks, indices = torch.ones(2, 3, 4, 6), torch.ones(2, 1, 5, 6), torch.ones(3), torch.zeros(2, 4, 2).long()
    latents = torch.ones(2, 3, 4, 2), torch.ones(2, 1, 5, 7), torch.ones(2, 1, 5, 2), torch.ones(27, 7)
    for bad in (indices[0], indices[:1], indices[:, :1], indices.float()):
        with pytest.raises(ValueError, match="dsa_attention/deepseek_v4: indices must be"):
            dsa_attention_deepseek_v4(q, kv, sinks, bad, 1.0)
        with pytest.raises(ValueError, match="dsa_attention/glm: indices must be"):
            dsa_attention_glm(q, *latents, bad, 1.0)
    for bad in ((kv.expand(-1, 3, -1, -1), sinks), (kv, sinks[:1])):
        with pytest.raises(ValueError, match=r"kv must be \[B, 1, T, D\] and sinks \[H\] = \[3\]"):
            dsa_attention_deepseek_v4(q, *bad, indices, 1.0)
    with pytest.raises(ValueError, match="kv_latent and k_rot must have one head"):
        dsa_attention_glm(q, latents[0], latents[1].expand(-1, 3, -1, -1), *latents[2:], indices, 1.0)
    for shape in ((2, 5), (4, 5), (2, 3, 4, 5), (2, 1, 1, 5)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, 1, S, T\] = \[2, 1, 4, 5\]"):
            dsa_attention_glm(q, *latents, indices, 1.0, torch.ones(shape).bool())


def without_sinks(q, kv, sinks, indices, scaling):
    return dsa_attention_deepseek_v4(q, kv, sinks * 0 - 1e4, indices, scaling)


def first_key_for_none(q, kv, sinks, indices, scaling):
    return dsa_attention_deepseek_v4(q, kv, sinks, indices.masked_fill(indices < 0, 0), scaling)


def sinks_without_gradient(q, kv, sinks, indices, scaling):
    return dsa_attention_deepseek_v4(q, kv, sinks.detach(), indices, scaling)


@pytest.mark.parametrize("kernel", [without_sinks, first_key_for_none, sinks_without_gradient])
def test_wrong_kernels_for_deepseek_v4_are_caught(kernel):
    with pytest.raises(AssertionError, match=f"dsa_attention/deepseek_v4, kernel {kernel.__name__}"):
        check("dsa_attention", "deepseek_v4", kernel, dtype="bfloat16")


def on_the_latents(q_nope, q_rot, kv_latent, k_rot, kv_b_weight, indices, scaling, attention_mask=None, *, empty=0.0):
    """As the kernels of the field do it: no key is expanded, the chosen latents are gathered."""
    (batch, heads, _, nope), (keys, rank) = q_nope.shape, kv_latent.shape[2:]
    weight = kv_b_weight.view(heads, -1, rank)
    q = torch.cat([torch.einsum("bhsn,hnr->bhsr", q_nope, weight[:, :nope]), q_rot], dim=-1)
    valid = (indices >= 0) & (indices < keys)
    at = torch.where(valid, indices, 0).long()
    if attention_mask is not None:
        seen = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        valid = valid & (seen.expand(batch, -1, -1).gather(-1, at) if keys else valid)
    if not keys:
        at = at[..., :0]
        valid = valid[..., :0]
    rows = torch.arange(batch).view(-1, 1, 1)
    # Through float32, in which the gradients of a key that many queries chose are then summed.
    wide = torch.promote_types(q.dtype, torch.float32)
    latent, rot = (t[:, 0].to(wide)[rows, at].to(q.dtype) for t in (kv_latent, k_rot))
    logits = torch.einsum("bhsd,bskd->bhsk", q, torch.cat([latent, rot], dim=-1)) * scaling
    logits = logits.masked_fill(~valid.unsqueeze(1), torch.finfo(logits.dtype).min)
    p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    p = p.masked_fill(~valid.any(-1)[:, None, :, None], empty).to(q.dtype)
    out = torch.einsum("bhsk,bskr->bhsr", p, latent)
    return torch.einsum("bhsr,hvr->bshv", out, weight[:, nope:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_kernel_that_attends_to_the_latents_passes(dtype):
    check("dsa_attention", "glm", on_the_latents, dtype=dtype)


def average_where_there_is_none(*args, **keywords):
    return on_the_latents(*args, **keywords, empty=0.25)


def without_mask(q_nope, q_rot, kv_latent, k_rot, kv_b_weight, indices, scaling, attention_mask=None):
    return dsa_attention_glm(q_nope, q_rot, kv_latent, k_rot, kv_b_weight, indices, scaling)


def values_first(q_nope, q_rot, kv_latent, k_rot, kv_b_weight, indices, scaling, attention_mask=None):
    by_head = kv_b_weight.unflatten(0, (q_nope.shape[1], -1)).flip(1).flatten(0, 1)
    return dsa_attention_glm(q_nope, q_rot, kv_latent, k_rot, by_head, indices, scaling, attention_mask)


@pytest.mark.parametrize(
    ("kernel", "sample"),
    [
        (average_where_there_is_none, "ordinary"),
        (without_mask, "boolean mask"),
        (values_first, "ordinary"),
    ],
)
def test_wrong_kernels_for_glm_are_caught(kernel, sample):
    with pytest.raises(AssertionError, match=f"kernel {kernel.__name__}, sample '{sample}'"):
        check("dsa_attention", "glm", kernel, dtype="bfloat16")


@pytest.mark.parametrize("variant", ["glm", "deepseek_v4"])
def test_the_workload_is_a_problem_of_the_contract(variant):
    contract = opslot.registry().contract("dsa_attention", variant)
    shape = {"queries": 3, "keys": 5, "heads": 2, "top_k": 4}
    sample = contract.workload.problem("cpu", torch.bfloat16, 0, **shape)
    width = {"glm": 256, "deepseek_v4": 512}[variant]
    assert contract.load_reference()(*sample.args, **sample.kwargs).shape == (1, 3, 2, width)
    flops = 2 * 3 * 4 * 2 * (512 if variant == "glm" else 1024)
    assert contract.workload.flops(**shape) == flops + (2 * 5 * 512 * 2 * 448 if variant == "glm" else 0)
