"""adopt among what else a training script does to a model: accelerate, compile, checkpointing, quantisation, hooks."""

import copy
import importlib

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from opslot import BindError
from opslot_models import adopt, build_foundation_model, families, unadopt
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())
FUSED_LOSS = {"cross_entropy_loss": "chunk_loss", "default": "eager"}


@pytest.fixture
def accelerator(request):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision=getattr(request, "param", "no"))
    AcceleratorState._reset_state(reset_partial_state=True)


mixed = pytest.mark.parametrize("accelerator", ["bf16"], indirect=True)


def step(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def classes(model):
    return [type(module) for module in model.modules()]


def train(model, accelerator, batch):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
def test_adopt_then_prepare_trains_as_stock_does(config, batch, every_kernel, accelerator):
    expected, model = stock(config()), stock(config())
    binding = adopt(model, every_kernel, device="cpu").binding
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if accelerator.mixed_precision == "no" else {"rtol": 2e-2, "atol": 0}
    expected_losses = train(expected, accelerator, batch)
    with binding.proof() as proof:
        losses = train(model, accelerator, batch)
    proof.check()
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected_losses, **tolerance)


@mixed
def test_prepare_then_adopt_is_refused(config, accelerator):
    model = accelerator.prepare(stock(config()))
    before = classes(model)
    problem = r"Qwen3MoeForCausalLM has a forward of its own \(convert_outputs_to_fp32.*\. Adopt before .* \(accelerate"
    with pytest.raises(BindError, match=problem):
        adopt(model, "auto", device="cpu")
    assert classes(model) == before


def test_prepare_without_mixed_precision_changes_nothing_that_matters(config, batch, accelerator):
    model = adopted = accelerator.prepare(stock(config()))
    adopt(adopted, FUSED_LOSS, device="cpu")
    torch.testing.assert_close(step(model, batch), step(stock(config()), batch), rtol=1e-4, atol=1e-6)


@mixed
def test_unadopt_of_a_prepared_model_is_refused(config, accelerator):
    model = stock(config())
    adopt(model, "auto", device="cpu")
    model = accelerator.prepare(model)
    with pytest.raises(BindError, match="which calls the generated code: undo what set it, then unadopt"):
        unadopt(model)


def test_a_dispatched_model_is_refused_and_told_what_works(config, tmp_path, batch):
    model = stock(config())
    model.save_pretrained(tmp_path)
    dispatched = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert "forward" in vars(dispatched)
    problem = (
        r"has a forward of its own \(add_hook_to_module.*build_foundation_model\(path, ops, device_map=\.\.\.\) does"
    )
    with pytest.raises(BindError, match=problem):
        adopt(dispatched, "auto", device="cpu")
    built = build_foundation_model(tmp_path, FUSED_LOSS, device="cpu", device_map={"": "cpu"})
    assert built.train()(**batch).logits is None


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def one_layer_compiled(model):
    model.model.layers[1].compile(backend="eager")
    return model


class DeepSpeedEngine(torch.nn.Module):
    """What deepspeed.initialize returns, as far as it matters here."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def replicated(model):
    replicate = importlib.import_module("torch.distributed._composable.replicate")
    return replicate.replicate(model)


def sharded_1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WRAPPERS = {
    "torch.compile": (compiled, r"the model \(OptimizedModule\)"),
    "model.compile()": (compiled_in_place, r"the model \(Qwen3MoeForCausalLM\)"),
    "layer.compile()": (one_layer_compiled, r"model\.layers\.1 \(Qwen3MoeDecoderLayer\)"),
    "DDP": (DistributedDataParallel, r"the model \(DistributedDataParallel\)"),
    "replicate": (replicated, r"the model \(DDPQwen3MoeForCausalLM\)"),
    "FSDP1": (sharded_1, r"the model \(FullyShardedDataParallel\)"),
    "DataParallel": (torch.nn.DataParallel, r"the model \(DataParallel\)"),
    "DeepSpeed": (DeepSpeedEngine, r"the model \(DeepSpeedEngine\)"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_refused_and_told_the_order(config, batch, one_process, wrapper):
    wrap, where = WRAPPERS[wrapper]
    wrapped = wrap(stock(config()))
    before = classes(wrapped)
    with pytest.raises(
        BindError, match=f"^{where} is wrapped by .* already: adopt before wrapping: adopt\\(model, ops\\)"
    ):
        adopt(wrapped, "auto", device="cpu")
    assert classes(wrapped) == before


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS.keys() - {"DeepSpeed", "FSDP1"}))
def test_the_order_that_is_told_works_and_kernels_may_be_chosen_again(config, batch, one_process, wrapper):
    torch._dynamo.reset()
    plain = config(output_router_logits=False)
    model = stock(plain)
    adopt(model, "eager", device="cpu")
    wrapped = WRAPPERS[wrapper][0](model)
    again = adopt(wrapped, FUSED_LOSS, device="cpu")
    assert again.swapped == ()
    assert again.left == ()
    assert wrapped(**batch).logits is None
    expected, actual = step(stock(plain), batch), step(wrapped, batch)
    torch.testing.assert_close(list(actual.values()), list(expected.values()), rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_a_compiled_part_without_a_generated_class_is_no_obstacle(images):
    config, _ = images
    model = AutoModelForCausalLM.from_config(config.text_config)
    model.tower = torch.nn.Linear(2, 2)
    model.tower.compile(backend="eager")
    assert adopt(model, "auto", device="cpu").swapped


@every_family
@pytest.mark.parametrize("adopt_first", [True, False])
def test_gradient_checkpointing(config, routed_batch, every_kernel, adopt_first):
    plain = config(attention_dropout=0.0)
    expected, model = stock(plain), stock(plain)
    if adopt_first:
        binding = adopt(model, every_kernel, device="cpu").binding
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not adopt_first:
        binding = adopt(model, every_kernel, device="cpu").binding
    model.train()
    recomputed = []
    layers = next(module.layers for module in model.modules() if hasattr(module, "embed_tokens"))
    # Attention, or what stands in its place.
    next(layers[0].children()).register_forward_pre_hook(lambda *args: recomputed.append(1))
    with binding.proof() as proof:
        actual = step(model, routed_batch)
    proof.check()
    assert len(recomputed) == 2
    torch.testing.assert_close(actual, step(expected.train(), routed_batch), rtol=1e-3, atol=1e-5)


@every_family
def test_generate(config, batch, every_kernel):
    # Upstream's balancing loss does not fit the mask of a token that follows cached ones.
    plain = config(
        **({"output_router_logits": False} if hasattr(config().get_text_config(), "output_router_logits") else {})
    )
    expected, model = stock(plain), stock(plain)
    adopt(model, every_kernel, device="cpu")
    prompt = {"input_ids": batch["input_ids"][:, :6], "attention_mask": batch["attention_mask"][:, :6]}
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    theirs, ours = (one.eval().generate(**prompt, **settings) for one in (expected, model))
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.sequences, theirs.sequences)


class Int8Linear(torch.nn.Linear):
    """A quantised layer, as libraries make them: a subclass of Linear with integers, and a scale for each row."""

    @classmethod
    def of(cls, linear):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        rows = (linear.weight.detach() / made.scale).round().to(torch.int8)
        made.weight = torch.nn.Parameter(rows, requires_grad=False)
        made.bias = linear.bias
        return made

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantise(model, *, head):
    for module in list(model.modules()):
        for name, child in module.named_children():
            # GLM's indexer casts to the dtype of this weight, which its checkpoints do not quantise.
            if type(child) is torch.nn.Linear and (name == "lm_head") == head and name != "weights_proj":
                setattr(module, name, Int8Linear.of(child))


@every_family
@pytest.mark.parametrize("adopt_first", [True, False])
def test_quantised_projections(config, batch, every_kernel, adopt_first):
    model = stock(config(tie_word_embeddings=False))
    quantise(model, head=False)
    expected = copy.deepcopy(model)
    if adopt_first:
        model = stock(config(tie_word_embeddings=False))
        adopt(model, every_kernel, device="cpu")
        quantise(model, head=False)
    else:
        adopt(model, every_kernel, device="cpu")
    assert sum(type(module) is Int8Linear for module in model.modules()) > 4
    torch.testing.assert_close(step(model, batch), step(expected, batch), rtol=1e-3, atol=1e-5)


def test_a_quantised_head_gets_no_fused_loss(config, batch):
    model = stock(config())
    quantise(model, head=True)
    with pytest.raises(BindError, match=r"cannot use kernel 'chunk_loss'.*its head is not a plain nn\.Linear"):
        adopt(model, FUSED_LOSS, device="cpu")
    (row,) = [r for r in adopt(model, "auto", device="cpu").binding.rows if r.op == "cross_entropy_loss"]
    assert (row.kernel, row.reason) == ("eager", "auto: its head is not a plain nn.Linear")
    assert model(**batch).logits is not None


def test_torchs_own_dynamic_quantisation(config, batch):
    """For inference on a CPU: it replaces every Linear by a class that is none."""
    model = stock(config()).eval()
    expected = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    adopt(model, {"rms_norm": "torch", "glu": "torch", "moe_experts": "torch"}, device="cpu")
    actual = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert type(actual.lm_head) is type(expected.lm_head) is not torch.nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(actual(**batch).logits, expected(**batch).logits, rtol=1e-3, atol=1e-3)
