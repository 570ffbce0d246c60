"""Faults of patched models that users reported in public: what is trained, returned, compiled and really run.

Named after the classes of docs/field-faults.md.
"""

import opslot
import pytest
import torch
import transformers
from opslot import Backend, BindError, KernelSpec, Registry
from opslot.ops import BACKEND as CORE
from opslot_models import adopt, build_foundation_model, families
from torch._dynamo.testing import CompileCounterWithBackend

from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_family
def test_c02_a_fused_loss_under_autocast_over_float32_weights(config, batch):
    expected, ours = stock(config()), stock(config())
    adopt(ours, {"default": "eager", "cross_entropy_loss": "chunk_loss"}, device="cpu")
    losses = []
    for model in (expected, ours):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**batch).loss)
        losses[-1].backward()
    # Logits rounded to bfloat16, by each at its own place.
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-7, atol=0)
    assert {g.dtype for g in gradients(ours).values()} == {torch.float32}


@every_family
def test_c03_micro_batches_of_uneven_lengths_are_the_whole_batch(config, batch, every_kernel):
    """With as many items as the batch has, and not the mean of means that grew with the number of micro-batches."""
    whole, parts = stock(config(output_router_logits=False)), stock(config(output_router_logits=False))
    adopt(parts, every_kernel, device="cpu")
    items = int((batch["labels"][:, 1:] != -100).sum())
    assert int((batch["labels"][0, 1:] != -100).sum()) * 2 != items
    whole(**batch, num_items_in_batch=items).loss.backward()
    total = 0.0
    for row in range(2):
        loss = parts(**{k: v[row : row + 1] for k, v in batch.items()}, num_items_in_batch=torch.tensor(items)).loss
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        assert total == pytest.approx(whole(**batch).loss.item(), rel=1e-5)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-5)


@every_family
def test_c13_a_tied_head_gets_the_gradients_of_both_its_uses(config, batch):
    """Untied copies drifted apart by 5.895."""
    tied = config(tie_word_embeddings=True, output_router_logits=False)
    expected, ours = stock(tied), stock(tied)
    adopt(ours, {"default": "eager", "cross_entropy_loss": "chunk_loss"}, device="cpu")
    for model in (expected, ours):
        model(**batch).loss.backward()
    head, embedding = ours.lm_head.weight, ours.get_input_embeddings().weight
    assert head is embedding
    torch.testing.assert_close(head.grad, expected.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    torch.optim.SGD(ours.parameters(), 0.1).step()
    assert torch.equal(ours.lm_head.weight, ours.get_input_embeddings().weight)


def test_c13_a_head_with_lora_is_refused_and_told_so(config):
    peft = pytest.importorskip("peft", reason="opslot-models does not depend on peft")
    model = stock(config())
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(BindError, match=r"its head is not a plain nn\.Linear"):
        adopt(model, {"default": "eager", "cross_entropy_loss": "chunk_loss"}, device="cpu")


@every_family
def test_c14_an_output_has_the_fields_of_stock(config, batch, every_kernel):
    """router_logits went missing from a return written by hand; logits are None where a fused loss made none."""
    expected, ours = stock(config()), stock(config())
    adopt(ours, every_kernel, device="cpu")
    theirs, mine = expected(**batch), ours(**batch)
    assert set(theirs) - set(mine) == {"logits"}
    assert mine.logits is None
    with torch.no_grad():
        assert set(ours(**batch)) == set(expected(**batch))
    assert ours(**batch, return_dict=False)[0].shape == ()


def test_c15_what_cannot_run_here_is_refused_without_a_weight_in_memory(config):
    """It took 102 seconds of loading weights to hear of an unsupported architecture."""
    registry = Registry()
    registry.add(CORE, "opslot")
    needs = opslot.Requires(devices=("cuda",), archs=("sm_90", "sm_100"))
    glu = registry.contract("glu", "swiglu").load_reference()
    registry.register(KernelSpec(op="glu", variant="swiglu", name="native", target=glu, requires=needs))
    with torch.device("meta"):
        model = build_foundation_model(config(), "eager", device="cpu")
    with pytest.raises(opslot.KernelUnavailable, match="needs architecture sm_90 or sm_100, this is cuda"):
        opslot.bind(model, {"glu": "native"}, device=opslot.Device("cuda", "sm_120"), registry=registry)
    assert opslot.bind(model, {"glu": "native"}, device=opslot.Device("cuda", "sm_90"), registry=registry).rows
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_c23_layers_do_not_count_against_the_limit_of_recompilations(config, batch):
    """64 modules that each hold an attribute of their own: one graph for all of them, and one more when bound."""
    torch._dynamo.reset()
    plain = transformers.LlamaConfig(
        **{k: v for k, v in config().to_dict().items() if k in ("vocab_size", "pad_token_id")},
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=64,
    )  # fmt: skip
    model = build_foundation_model(plain, "eager", device="cpu")
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for ops in ("eager", {"rms_norm": "torch", "default": "eager"}):
        opslot.bind(model, ops, device="cpu")
        for _ in range(2):
            model(**batch, use_cache=False)
    assert counter.frame_count == 2
    torch._dynamo.reset()


@every_family
def test_c24_kernels_that_return_rubbish_are_seen_in_the_numbers(config, routed_batch):
    """A comparison that both sides run without the kernel passes for ever."""
    registry = Registry()
    registry.add(CORE, "opslot")

    def rubbish(contract):
        def kernel(*args, **kwargs):
            result = contract.load_reference()(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            wrong = tuple(value * 2 if value.is_floating_point() else value.flip(-2) for value in results)
            return wrong if isinstance(result, tuple) else wrong[0]

        kernel.__signature__ = contract.signature()
        return kernel

    kernels = [
        KernelSpec(op=contract.op, variant=contract.variant, name="rubbish", target=rubbish(contract))
        for contract in registry.contracts()
    ]
    registry.add(Backend(api=1, kernels=tuple(kernels)), "rubbish")
    model = build_foundation_model(config(rms_norm_eps=1e-6), "eager", device="cpu")  # so that no layer is faint
    expected = model(**routed_batch).loss
    ops = {row.op for row in opslot.bind(model, "auto", device="cpu", registry=registry).rows}
    for op in sorted(ops - {"rotary_pos_emb_vision"}):  # there are no images here
        binding = opslot.bind(model, {op: "rubbish", "default": "eager"}, device="cpu", registry=registry)
        with binding.proof() as proof:
            loss = model(**routed_batch).loss
            loss.backward()
        proof.check()
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(loss, expected, msg=lambda text, op=op: f"{op}: {text}")
