"""A model from upstream's class beside ours: how both are made, called and compared."""

from collections import Counter

import torch
import transformers
from opslot_models import build_foundation_model


def both(config, architecture=None, ops="eager"):
    """The same model from upstream's class and from ours; a causal LM unless another is named."""
    architecture = architecture or language_model(config)
    torch.manual_seed(0)
    upstream = getattr(transformers, architecture)._from_config(config)
    torch.manual_seed(0)
    return upstream, build_foundation_model(config, ops, architecture=architecture, device="cpu")


def stock(config):
    """Upstream's model with a language model's head, the same weights at each call."""
    torch.manual_seed(0)
    return getattr(transformers, language_model(config))._from_config(config)


def language_model(config):
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return next(
        name + head for head in ("ForCausalLM", "ForConditionalGeneration") if hasattr(transformers, name + head)
    )


def perturb(*models):
    """The same noise for each: biases start as zeros and norms as ones, where a kernel that ignored them would pass."""
    for model in models:
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)


def plain(value):
    """A field of an output as tensors: a cache as what each of its layers holds."""
    if not hasattr(value, "layers"):
        return value
    states = ("keys", "values", "conv_states", "recurrent_states", "indexer_keys", "compressed_kv", "overlap_kv")
    return [{name: getattr(layer, name) for name in states if hasattr(layer, name)} for layer in value.layers]


def assert_equal(one, other, batch):
    """Initialisation, outputs field by field and every gradient."""
    for (name, expected), (ours, actual) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == ours
        assert torch.equal(expected, actual), name
    torch.manual_seed(2)  # the token classification head has a dropout
    expected = one(**batch)
    torch.manual_seed(2)
    actual = other(**batch)
    assert list(expected) == list(actual)
    for field in expected:
        torch.testing.assert_close(plain(actual[field]), plain(expected[field]), rtol=0, atol=0, msg=field)
    expected.loss.backward()
    actual.loss.backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


class Recorder:
    """A kernel that computes the reference and keeps what it was called with."""

    def __init__(self, contract):
        self.contract, self.calls = contract, []
        self.__signature__ = contract.signature()

    def __call__(self, *args, **kwargs):
        arguments = self.__signature__.bind(*args, **kwargs)
        self.calls.append(arguments.arguments)
        return self.contract.load_reference()(*args, **kwargs)


def every_op(registry):
    """A choice of the recorders for all that there is."""
    return {contract.config_fields()[0]: "recorder" for contract in registry.contracts()}


def calls_of(recorders):
    """How often the kernel of each contract ran."""
    return {f"{op}/{variant}": len(found.calls) for (op, variant), found in recorders.items() if found.calls}


def expected_calls(binding, not_here=frozenset()):
    """Each slot once, but: DeepSeek-V4 mixes its streams twice a layer, and norms them inside `mhc/pre` and `head`."""
    counts = Counter(f"{row.op}/{row.variant}" for row in binding.rows if not row.module.endswith("input_norm"))
    counts["mhc/post"] *= 2
    return {slot: count for slot, count in counts.items() if count and slot not in not_here}


def assert_close_with_gradients(upstream, ours, expected, actual):
    torch.testing.assert_close(actual.loss, expected.loss)
    expected.loss.backward()
    actual.loss.backward()
    for (name, a), b in zip(upstream.named_parameters(), ours.named_parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b[1].grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
