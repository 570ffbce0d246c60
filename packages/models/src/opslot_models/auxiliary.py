"""Auxiliary hidden states: what a drafter of the EAGLE3 family reads of its target model.

Generated modules decorate their text models and the models that hold one; users call the two methods that this gives.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import torch
from opslot import OpslotError
from transformers.utils.generic import ModelOutput

Model = TypeVar("Model", bound=type[torch.nn.Module])


def auxiliary_states(cls: Model) -> Model:
    """Give a model class the members for which serving engines look, by a runtime-checkable protocol, on each class.

    They are attributes and no base class: an engine's own class may derive from a model and from its protocols.
    """
    target: Any = cls
    target.supports_eagle3 = True
    # A drafter without an embedding or a head uses those of the model.
    target.has_own_lm_head = False
    target.has_own_embed_tokens = False
    target.set_aux_hidden_state_layers = set_aux_hidden_state_layers
    target.get_eagle3_default_aux_hidden_state_layers = get_eagle3_default_aux_hidden_state_layers
    return cls


def set_aux_hidden_state_layers(self: torch.nn.Module, layers: Sequence[int]) -> None:
    """From the next call on, return the states that enter these decoder layers, before their input norm.

    They are a tuple in the order of the layers, `aux_hidden_states`: an attribute of the output and no item of it, or
    its last element with `return_dict=False`. They are what the layers get, not copied, and gradients flow through.
    `layers`: increasing numbers from 0, which gets the embeddings, to the last; `()` turns it off, and then nothing is
    left on any module. A model and the text model in it are set by themselves: each returns what was asked of it.

    Raises `OpslotError` for layers that the model does not have. After an error the model is as it was.
    """
    stack = _decoder_layers(self)
    chosen = _require_layers(layers, len(stack), type(self).__name__)
    remove_auxiliary_hooks(self)
    if chosen:
        record = _Record()
        begin = self.register_forward_pre_hook(_Begin(record))
        keep = [stack[i].register_forward_pre_hook(_Keep(record, i), with_kwargs=True) for i in chosen]
        # After an exception too, or the states of that call would be held until the next.
        attach = self.register_forward_hook(_Attach(record, chosen), always_call=True)
        setattr(self, _HANDLES, (begin, *keep, attach))


def remove_auxiliary_hooks(model: torch.nn.Module) -> None:
    """What `set_aux_hidden_state_layers(())` does, on a module of any class."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()


def get_eagle3_default_aux_hidden_state_layers(self: torch.nn.Module, drafter_config: Any = None) -> tuple[int, ...]:
    """The layers that the drafter of this config was trained on, else (2, L // 2, L - 3) of L layers.

    `drafter_config`: a config object or a mapping, as the drafter's `config.json` has it. It may name layers as
    `eagle_aux_hidden_state_layer_ids` (or in its `eagle_config`), which are those that a state enters; or as
    `target_layer_ids` (or in its `dflash_config`) or `dspark_target_layer_ids`, which are those that it leaves, so
    that it enters the next: `[1, 9]` gives `(2, 10)`. Where it has several of these, the first named here counts.

    Raises `OpslotError` for layers that the model does not have or that do not increase, for a model too shallow for
    the default, and for what is no config: a path is not read.
    """
    if isinstance(drafter_config, str | PathLike | Sequence):
        raise OpslotError(
            f"drafter_config is {drafter_config!r}: pass the drafter's config, AutoConfig.from_pretrained(path) or "
            "what json.load gives of its config.json"
        )
    depth, name = len(_decoder_layers(self)), type(self).__name__
    named = _named_layers(drafter_config)
    if named is not None:
        field, ids, shift = named
        if not (_is_sequence(ids) and all(_is_layer(i, depth - shift) for i in ids) and list(ids) == sorted(set(ids))):
            raise OpslotError(
                f"the drafter's {field} is {ids!r}, and {name} has {depth} layers: there it takes increasing integers "
                f"from 0 to {depth - shift - 1}, since states come in the order of layers"
                + (", and the state that leaves the last layer enters none" if shift else "")
                + ". Is this the drafter of another model?"
            )
        return tuple(i + shift for i in ids)
    default = (2, depth // 2, depth - 3)
    if not default[0] < default[1] < default[2]:
        raise OpslotError(
            f"{name} has {depth} layers, and the default (2, L // 2, L - 3) needs 7. Choose layers with "
            "set_aux_hidden_state_layers, or pass the config of a drafter that names its own"
        )
    return default


_HANDLES = "_aux_hidden_state_hooks"


class _Record:
    """The states of the call that runs in this thread, by layer, or None between calls.

    Activation checkpointing runs layers again in backward, between calls, where their hooks find no call to record.
    """

    def __init__(self) -> None:
        self._here = threading.local()

    def begin(self) -> None:
        self._here.states = {}

    def keep(self, layer: int, state: torch.Tensor) -> None:
        states = getattr(self._here, "states", None)
        if states is not None:
            states[layer] = state

    def end(self) -> dict[int, torch.Tensor]:
        states: dict[int, torch.Tensor] | None = getattr(self._here, "states", None)
        self._here.states = None
        return states or {}  # none where a hook before the first of ours has raised

    def __reduce__(self) -> tuple[type["_Record"], tuple[()]]:
        return _Record, ()  # a model is copied and pickled between calls


# The hooks are objects of classes, so that a model can be copied and pickled with them.
@dataclass(frozen=True, eq=False)
class _Begin:
    record: _Record

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.record.begin()


@dataclass(frozen=True, eq=False)
class _Keep:
    record: _Record
    layer: int

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.record.keep(self.layer, args[0] if args else kwargs["hidden_states"])


@dataclass(frozen=True, eq=False)
class _Attach:
    record: _Record
    layers: tuple[int, ...]

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        kept = self.record.end()
        if output is None:  # the forward has raised
            return None
        missing = [i for i in self.layers if i not in kept]
        if missing:
            raise OpslotError(
                f"layers {missing} of {type(model).__name__} did not run, so there are no states of theirs: were they "
                "replaced or skipped? Call set_aux_hidden_state_layers again, with layers that run; and "
                "torch._dynamo.reset() where the model was compiled before"
            )
        states = tuple(kept[i] for i in self.layers)
        if isinstance(output, tuple):
            return (*output, states)
        if not isinstance(output, ModelOutput):
            raise OpslotError(
                f"{type(model).__name__} returned a {type(output).__name__}, where auxiliary hidden states have no "
                "place: turn them off with set_aux_hidden_state_layers(())"
            )
        # No item: models pass on the items of an inner output by name, and Trainer takes all of them for predictions.
        output.aux_hidden_states = states
        return output


def _decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """The decoder layers of a text model, or of the one that a head or a multimodal model holds."""
    holder = model
    while not hasattr(holder, "layers"):
        holder = getattr(holder, "language_model", None) or getattr(holder, "model", None)
        if holder is None:
            raise OpslotError(
                f"{type(model).__name__} has no decoder layers as its `layers` or those of its `language_model` or "
                "`model`: call this on the text model inside"
            )
    layers: Sequence[torch.nn.Module] = holder.layers
    return layers


def _require_layers(layers: Any, depth: int, name: str) -> tuple[int, ...]:
    wanted = f"increasing integers from 0 to {depth - 1}, or () to turn it off"
    if not (_is_sequence(layers) and all(_is_layer(i, depth) for i in layers)):
        raise OpslotError(f"set_aux_hidden_state_layers({layers!r}): {name} has {depth} layers and takes {wanted}")
    if list(layers) != sorted(set(layers)):
        raise OpslotError(f"set_aux_hidden_state_layers({layers!r}): states come in the order of layers, so {wanted}")
    return tuple(layers)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_layer(value: Any, depth: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < depth


class _Named(NamedTuple):
    """Where a drafter's config names layers, which, and how far these are from those that the states enter."""

    field: str
    layers: Any
    shift: int


# In the order in which vLLM looks.
_FIELDS = (
    ("", "eagle_aux_hidden_state_layer_ids", 0),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids", 0),
    ("dflash_config", "target_layer_ids", 1),
    ("", "dspark_target_layer_ids", 1),
    ("", "target_layer_ids", 1),
)


def _named_layers(config: Any) -> _Named | None:
    for group, name, shift in _FIELDS:
        layers = _field(_field(config, group) if group else config, name)
        if layers not in (None, [], ()):
            return _Named(f"{group}.{name}".lstrip("."), layers, shift)
    return None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
