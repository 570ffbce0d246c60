"""Building: a generated model from a config or a checkpoint, with its kernels bound."""

import copy
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from opslot import OpsConfig, OpslotError, bind, registry
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ._attention import choosing_attention
from ._checkpoint import require_every_expert, require_whole
from ._distributed import SHARDING, name_wrapped_forwards, refuse_disconnected_experts, refuse_new_weights
from ._families import generated_module

# Where a checkpoint lies: the config must come from the same place as the weights.
_HUB = ("subfolder", "revision", "token", "cache_dir", "force_download", "local_files_only")
# With these it lies in other files than those of the usual names.
_OTHER_FILES = {"variant", "gguf_file", "use_safetensors"}
# What a class of language models is called, with a head over the vocabulary.
_LANGUAGE = ("ForCausalLM", "ForConditionalGeneration")


def build_foundation_model(
    config_or_path: PreTrainedConfig | str | Path,
    ops_implementation: OpsConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A generated model with the chosen kernels bound; its `Binding` is `model.opslot_binding`.

    `config_or_path`: a config, for a model with new weights, or the folder or hub name of a checkpoint to load.
    `ops_implementation`: see `opslot.OpsConfig.parse`; its `attn_implementation` is passed on to transformers.
    `architecture`: the class to build ("Qwen3MoeForCausalLM"); by default what the config names, else the language
    model that has such a config.
    `dtype`: of the weights; by default what transformers does. `device`: what kernels are judged for, as in
    `opslot.bind`; the model is built on the CPU or wherever `torch.device(...)` contexts and `kwargs` put it.
    `kwargs` go to `from_pretrained`, or to `_from_config` when there is no checkpoint. With `distributed_config` each
    rank loads its share of a checkpoint, and the kernels of its experts run inside what transformers puts around them.

    Raises `OpslotError` for a model type that is not generated, or a checkpoint that does not fill the model or is not
    used up by it, naming the tensors that are missing, unexpected or of another shape: weights that are missing would
    stay random without any later error.
    """
    ops = OpsConfig.effective(ops_implementation)
    attention, _ = ops.setting("attn_implementation")
    if attention is not None:
        kwargs["attn_implementation"] = attention
    if dtype is not None:
        kwargs["dtype"] = dtype
    # Judged before minutes go into weights.
    ops.rules(registry())
    if device is not None:
        registry().describe(device)
    model: Any
    with choosing_attention(ops):
        if isinstance(config_or_path, PreTrainedConfig):
            for name in SHARDING & kwargs.keys():
                refuse_new_weights(name)
            cls = _model_class(config_or_path, architecture)
            _rehearse(cls, config_or_path, ops, device, kwargs)
            model = cls._from_config(config_or_path, **kwargs)
        else:
            _require_folder(config_or_path)
            config = AutoConfig.from_pretrained(config_or_path, **{k: v for k, v in kwargs.items() if k in _HUB})
            cls = _model_class(config, architecture)
            _rehearse(cls, config, ops, device, kwargs)
            model = _load(cls, str(config_or_path), kwargs)
    model.opslot_binding = bind(model, ops, device=device)
    refuse_disconnected_experts(model)
    built: PreTrainedModel = model
    return built


def _require_folder(path: str | Path) -> None:
    """Say so of a folder that is not there: the hub would say that its name is no name of the hub."""
    local = isinstance(path, Path) or path.startswith(("/", ".", "~"))
    if local and not Path(path).is_dir():
        raise OpslotError(f"there is no folder {path}, where the checkpoint should be")


def _model_class(config: PreTrainedConfig, architecture: str | None) -> type[PreTrainedModel]:
    module = generated_module(_family(config))
    heads = [name for name in module.__all__ if not name.endswith("PreTrainedModel")]
    named = [architecture] if architecture else [name for name in config.architectures or () if name in heads]
    # A composed family has heads for the whole, with images, and for its text alone: each has a config of its own.
    models = [
        name for name in heads if name.endswith(_LANGUAGE) and isinstance(config, getattr(module, name).config_class)
    ]
    if not named and not models:
        raise OpslotError(
            f"{config.model_type} has no language model for a {type(config).__name__}; name an architecture: "
            f"{', '.join(heads)}"
        )
    name = (named or models)[0]
    if name not in heads:
        raise OpslotError(f"{config.model_type} has no architecture {name!r}; it has: {', '.join(heads)}")
    cls: type[PreTrainedModel] = getattr(module, name)
    return cls


def _family(config: PreTrainedConfig) -> str:
    """The family that a config belongs to: a composed one has configs of several model types in one module."""
    for cls in type(config).__mro__:
        package, _, name = cls.__module__.rpartition(".")
        if package.startswith("transformers.models.") and name.startswith("configuration_"):
            return package.rpartition(".")[2]
    return config.model_type


def _rehearse(
    cls: type[PreTrainedModel], config: PreTrainedConfig, ops: OpsConfig, device: Any, kwargs: Mapping[str, Any]
) -> None:
    """Bind a model without weights, so that what `bind` refuses costs seconds and not the time that weights take.

    A probe runs on real weights' device later. Where it is not known before loading what the model will be, nothing is
    refused here.
    """
    config = copy.deepcopy(config)
    for name in kwargs.keys() - {"dtype", "attn_implementation"}:
        if hasattr(config, name):  # as `from_pretrained` overrides a config
            setattr(config, name, kwargs[name])
    dtype = kwargs.get("dtype", "auto")
    dtype = config.dtype if dtype == "auto" else dtype
    quantized = "quantization_config" in kwargs or getattr(config, "quantization_config", None) is not None
    # Under DeepSpeed's third stage every new model is taken apart.
    if not isinstance(dtype, str | torch.dtype) or quantized or is_deepspeed_zero3_enabled():
        return
    attention = {name: kwargs[name] for name in ("attn_implementation",) if name in kwargs}
    make: Any = cls._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype, **attention)
    with _unheard():
        bind(model, ops, device=device, probe=False)


@contextmanager
def _unheard() -> Iterator[None]:
    """Whoever listens to opslot's log for binds hears of none that this thread does meanwhile."""
    thread = threading.get_ident()
    logger = logging.getLogger("opslot")

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


def _load(cls: type[PreTrainedModel], path: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    if not _OTHER_FILES & kwargs.keys():
        require_every_expert(path, {name: value for name, value in kwargs.items() if name in _HUB})
    load: Any = cls.from_pretrained
    # Shapes that do not fit come back in the report, and are refused by name with the rest.
    model, info = load(path, output_loading_info=True, **{**kwargs, "ignore_mismatched_sizes": True})
    require_whole(path, cls.__name__, info)
    name_wrapped_forwards(model)
    loaded: PreTrainedModel = model
    return loaded
