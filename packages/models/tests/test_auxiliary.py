"""The states for a drafter are those of hooks placed by hand, and cost nothing when off."""

import copy
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import pytest
import torch
import transformers
from opslot import OpslotError
from opslot_models import adopt, build_foundation_model, families
from opslot_models._families import generated_module
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend

from packages.models.tests import tiny
from packages.models.tests.parity import stock

every_family = pytest.mark.parametrize("family", families())


@runtime_checkable
class SupportsDrafter(Protocol):
    """As serving engines write it; a check by `isinstance` wants each member, attributes too."""

    supports_eagle3: ClassVar[Literal[True]] = True
    has_own_lm_head: bool = False
    has_own_embed_tokens: bool = False

    def set_aux_hidden_state_layers(self, layers): ...

    def get_eagle3_default_aux_hidden_state_layers(self): ...


LM_HEADS = ("ForCausalLM", "ForConditionalGeneration")


def built(config, ops="eager"):
    torch.manual_seed(0)
    return build_foundation_model(config, ops, device="cpu")


@pytest.fixture
def model(config):
    """Three layers of the family that has every op."""
    return built(config(output_router_logits=False))


def by_hand(model, stack, layers, batch):
    """What enters the layers in one call of a model, and its output."""
    seen = {}

    def hook(index):
        return lambda module, args, kwargs: seen.__setitem__(index, args[0] if args else kwargs["hidden_states"])

    handles = [stack[i].register_forward_pre_hook(hook(i), with_kwargs=True) for i in layers]
    output = model(**batch)
    for handle in handles:
        handle.remove()
    return tuple(seen[i] for i in layers), output


def assert_same(states, expected):
    assert type(states) is tuple
    assert len(states) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


def hooks(model):
    return [
        hook
        for module in model.modules()
        for found in (module._forward_hooks, module._forward_pre_hooks)
        for hook in found.values()
    ]


@every_family
def test_the_states_are_those_of_hooks_on_the_stock_model(config, batch, deterministic):
    model = stock(config(output_router_logits=False))  # to record which transformers would leave hooks behind
    stack = getattr(model.model, "language_model", model.model).layers
    layers = [0, len(stack) - 1]
    expected, _ = by_hand(model, stack, layers, batch)
    recorded = copy.deepcopy(model)(**batch, output_hidden_states=True).hidden_states
    adopt(model, "eager", device="cpu")
    model.set_aux_hidden_state_layers(layers)
    states = model(**batch).aux_hidden_states
    assert_same(states, expected)
    assert_same(states, [recorded[i] for i in layers])


def test_with_bound_kernels_and_a_loss_without_logits(config, batch, every_kernel):
    model = built(config(), every_kernel)
    expected, before = by_hand(model, model.model.layers, [1, 2], batch)
    model.set_aux_hidden_state_layers([1, 2])
    out = model(**batch)
    assert out.logits is None
    assert torch.equal(out.loss, before.loss)
    assert_same(out.aux_hidden_states, expected)


MULTIMODAL = [family for family in families() if family in tiny.COMPOSED or family in tiny.TEXT]


@pytest.fixture
def multimodal(media):
    """A stock model, what to call it with, and the same adopted."""
    config, batch = media
    torch.manual_seed(0)
    name = type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"
    upstream = getattr(transformers, name)._from_config(config).eval()
    ours = copy.deepcopy(upstream)
    adopt(ours, "eager", device="cpu")
    return upstream, batch, ours


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_multimodal_wrapper(multimodal):
    upstream, batch, ours = multimodal
    # In transformers 5.17 the thinker of Qwen3-Omni holds its text model itself.
    wrappers = [ours, ours.model] if hasattr(ours.model, "language_model") else [ours]
    stack = getattr(upstream.model, "language_model", upstream.model).layers
    layers = [0, len(stack) - 1]
    expected, _ = by_hand(upstream, stack, layers, batch)
    inner = {name: value for name, value in batch.items() if name != "output_router_logits"}
    for wrapper in wrappers:
        given = batch if wrapper is ours else inner
        wrapper.set_aux_hidden_state_layers(layers)
        assert_same(wrapper(**given).aux_hidden_states, expected)
        wrapper.set_aux_hidden_state_layers(())
        assert not hasattr(wrapper(**given), "aux_hidden_states")


@pytest.mark.parametrize("family", ["gemma3"])
def test_a_model_and_the_models_in_it_are_set_by_themselves(multimodal):
    upstream, batch, ours = multimodal
    texts = {"input_ids": batch["input_ids"]}
    text = ours.model.language_model
    expected, _ = by_hand(upstream, upstream.model.language_model.layers, [0, 1, 2], batch)
    alone, _ = by_hand(upstream.model.language_model, upstream.model.language_model.layers, [1], texts)
    text.set_aux_hidden_state_layers([1])
    assert not hasattr(ours(**batch), "aux_hidden_states")
    ours.set_aux_hidden_state_layers([0, 2])
    ours.model.set_aux_hidden_state_layers([2])
    assert_same(ours(**batch).aux_hidden_states, expected[::2])
    assert_same(ours.model(**batch).aux_hidden_states, expected[2:])
    assert_same(text(**texts).aux_hidden_states, alone)
    for one in (ours, ours.model, text):
        one.set_aux_hidden_state_layers(())
    assert hooks(ours) == []


@every_family
def test_the_protocol_holds_for_models_of_text_and_their_lm_heads_alone(family, config):
    module = generated_module(family)
    heads = [getattr(module, name) for name in module.__all__ if "For" in name and "PreTrainedModel" not in name]
    for cls in heads:
        if cls.config_class is type(config()):
            with torch.device("meta"):
                head = cls(config())
            assert isinstance(head, SupportsDrafter) == cls.__name__.endswith(LM_HEADS), cls
    with torch.device("meta"):
        model = stock(config())
    adopt(model, "eager", device="cpu")
    inner = ["model.language_model"] if hasattr(model.model, "language_model") else []
    assert [name for name, part in model.named_modules() if isinstance(part, SupportsDrafter)] == ["", "model", *inner]


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_protocol_holds_for_a_multimodal_wrapper_and_no_tower(multimodal):
    upstream, _, ours = multimodal
    for model in (ours, ours.model, getattr(ours.model, "language_model", ours.model)):
        assert isinstance(model, SupportsDrafter)
        assert (model.supports_eagle3, model.has_own_lm_head, model.has_own_embed_tokens) == (True, False, False)
    names = ("vision_tower", "visual", "audio_tower")
    towers = [tower for name, tower in ours.named_modules() if name.rpartition(".")[2] in names]
    assert towers
    assert not any(isinstance(tower, SupportsDrafter) for tower in towers)
    assert not isinstance(upstream, SupportsDrafter)


def gradients(model, states, output):
    model.zero_grad()
    (output.loss + sum((i + 2) * state.square().mean() for i, state in enumerate(states))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_flow_through_the_states(model, batch, deterministic):
    expected = gradients(model, *by_hand(model, model.model.layers, [0, 2], batch))
    model.set_aux_hidden_state_layers([0, 2])
    out = model(**batch)
    actual = gradients(model, out.aux_hidden_states, out)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    without = gradients(model, (), model(**batch))
    assert not torch.equal(without["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_activation_checkpointing(model, batch, deterministic, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    expected = gradients(model, *by_hand(model, model.model.layers, [0, 2], batch))
    model.set_aux_hidden_state_layers([0, 2])
    out = model(**batch)
    actual = gradients(model, out.aux_hidden_states, out)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_layers_that_run_again_in_backward_record_nothing(model, batch):
    """Whatever transformers does, these run with their hooks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model.set_aux_hidden_state_layers([0, 2])
    states = model(**batch).aux_hidden_states
    (record,) = {hook.record for hook in hooks(model)}
    runs = []
    model.model.layers[2].register_forward_pre_hook(lambda module, args: runs.append(module))
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) is kind)
    out = model(**batch, use_cache=False)
    assert_same(out.aux_hidden_states, states)
    out.loss.backward()
    assert len(runs) == 2
    assert record.end() == {}


def test_a_tuple_gets_them_as_its_last_element(model, batch):
    del batch["labels"]
    for one in (model, model.model):
        before = one(**batch, return_dict=False, use_cache=False)
        one.set_aux_hidden_state_layers([1])
        *rest, states = one(**batch, return_dict=False, use_cache=False)
        assert len(rest) == len(before)
        assert torch.equal(rest[0], before[0])
        assert_same(states, one(**batch).aux_hidden_states)
        one.set_aux_hidden_state_layers(())


def test_the_rest_of_the_output_and_generation_are_as_without(model, batch):
    tokens = {"input_ids": batch["input_ids"], "max_new_tokens": 4, "do_sample": False}
    before, generated = model(**batch), model.generate(**tokens)
    model.set_aux_hidden_state_layers([0, 1])
    after = model(**batch)
    assert list(after) == list(before)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(model.generate(**tokens), generated)


def test_off_leaves_nothing(model, batch):
    names = set(vars(model))
    keys = list(model.state_dict())
    assert hooks(model) == []
    model.set_aux_hidden_state_layers([0, 1])
    model.set_aux_hidden_state_layers([1, 2])
    assert len(hooks(model)) == 4
    assert list(model.state_dict()) == keys
    assert len(model(**batch).aux_hidden_states) == 2
    model.set_aux_hidden_state_layers(())
    assert hooks(model) == []
    assert set(vars(model)) == names
    assert not hasattr(model(**batch), "aux_hidden_states")


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copy_records_for_itself(model, batch, copied):
    model.set_aux_hidden_state_layers([0, 2])
    expected = model(**batch).aux_hidden_states
    other = copied(model)
    assert_same(other(**batch).aux_hidden_states, expected)
    other.set_aux_hidden_state_layers(())
    assert hooks(other) == []
    assert_same(model(**batch).aux_hidden_states, expected)


@pytest.mark.parametrize("family", ["qwen3"])
def test_compiled_it_is_one_graph(config, batch):
    model = built(config())
    model.set_aux_hidden_state_layers([0, 1])
    expected = model(**batch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(**batch).aux_hidden_states, expected.aux_hidden_states)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_peft(config, batch):
    model = get_peft_model(built(config()), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected, _ = by_hand(model, model.base_model.model.model.layers, [2], batch)
    model.set_aux_hidden_state_layers([2])
    assert_same(model(**batch).aux_hidden_states, expected)


def test_calls_in_several_threads_do_not_mix(model, batch):
    """Both are in the middle of the model at once."""
    batches = [{"input_ids": batch["input_ids"][i : i + 1]} for i in range(2)]
    model.set_aux_hidden_state_layers([0, 2])
    expected = [model(**one).aux_hidden_states for one in batches]
    barrier = threading.Barrier(2, timeout=60)

    def meet(module, args):
        barrier.wait()

    model.model.layers[1].register_forward_pre_hook(meet)
    found = [None, None]
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, model(**batches[i]).aux_hidden_states))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for states, wanted in zip(found, expected, strict=True):
        assert_same(states, wanted)


def test_a_call_that_fails_holds_no_states(model, batch):
    model.set_aux_hidden_state_layers([0])
    expected = model(**batch).aux_hidden_states
    handle = model.model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    handle.remove()
    (record,) = {hook.record for hook in hooks(model)}
    assert record.end() == {}
    assert_same(model(**batch).aux_hidden_states, expected)


def test_a_layer_that_was_replaced_is_named(model, batch):
    model.set_aux_hidden_state_layers([0, 2])
    model.model.layers[2] = copy.deepcopy(model.model.layers[2])
    with pytest.raises(OpslotError, match=r"layers \[2\] of Qwen3MoeForCausalLM did not run.*replaced"):
        model(**batch)


@pytest.mark.parametrize(
    "layers", [[3], [-1], [0, 0], [2, 1], [True], [1.0], ["1"], "01", 1, None, {0, 1}, torch.tensor([1])], ids=repr
)
def test_layers_that_are_refused(model, batch, layers):
    model.set_aux_hidden_state_layers([1])
    with pytest.raises(OpslotError, match=r"increasing integers from 0 to 2, or \(\) to turn it off"):
        model.set_aux_hidden_state_layers(layers)
    assert len(model(**batch).aux_hidden_states) == 1


def test_the_default_layers(config):
    with torch.device("meta"):
        deep, shallow = (built(config(num_hidden_layers=depth, mlp_only_layers=[])) for depth in (9, 6))
    assert deep.get_eagle3_default_aux_hidden_state_layers() == (2, 4, 6)
    assert deep.model.get_eagle3_default_aux_hidden_state_layers({"architectures": ["Drafter"]}) == (2, 4, 6)
    with pytest.raises(OpslotError, match=r"has 6 layers, and the default .* needs 7. Choose .* with set_aux_hidden"):
        shallow.get_eagle3_default_aux_hidden_state_layers()


@pytest.mark.parametrize(
    ("drafter", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, (0, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, (1,)),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, (1, 2)),
        ({"dspark_target_layer_ids": [1]}, (2,)),
        ({"target_layer_ids": [0, 1]}, (1, 2)),
        ({"eagle_aux_hidden_state_layer_ids": [], "target_layer_ids": [1]}, (2,)),
        ({"eagle_aux_hidden_state_layer_ids": [1], "dflash_config": {"target_layer_ids": [1]}}, (1,)),
    ],
    ids=repr,
)
def test_the_layers_of_a_drafter_win(model, drafter, layers):
    """Those that DFlash and DSpark name are left by the states that these drafters read: the next one gets them."""
    for config in (drafter, SimpleNamespace(**drafter)):
        assert model.get_eagle3_default_aux_hidden_state_layers(config) == layers
    model.set_aux_hidden_state_layers(layers)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (
            {"target_layer_ids": [2]},
            r"target_layer_ids is \[2\], and .* has 3 layers: .* from 0 to 1, since .*, and the state",
        ),
        ({"target_layer_ids": [0, 0]}, "increasing integers"),
        ({"target_layer_ids": [1, 0]}, "increasing integers from 0 to 1, since states come in the order of layers"),
        ({"dflash_config": {"target_layer_ids": "all"}}, r"dflash_config\.target_layer_ids is 'all'"),
        ({"eagle_aux_hidden_state_layer_ids": [3]}, r"from 0 to 2, .*of layers\. Is this the drafter of another model"),
    ],
)
def test_a_drafter_of_another_model_is_refused(model, drafter, words):
    with pytest.raises(OpslotError, match=words):
        model.get_eagle3_default_aux_hidden_state_layers(drafter)


@pytest.mark.parametrize("drafter", ["path/to/drafter", Path("config.json"), [1, 2]], ids=repr)
def test_what_is_no_config_of_a_drafter_is_refused(model, drafter):
    with pytest.raises(OpslotError, match=r"pass the drafter's config, AutoConfig\.from_pretrained\(path\) or what"):
        model.get_eagle3_default_aux_hidden_state_layers(drafter)
