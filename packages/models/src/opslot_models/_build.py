"""Building: a generated model from a config or a checkpoint, with its kernels bound."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from opslot import BindError, OpsConfig, OpslotError, bind, registry
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ._attention import choosing_attention
from ._families import generated_module

# Where a checkpoint lies: the config must come from the same place as the weights.
_HUB = ("subfolder", "revision", "token", "cache_dir", "force_download", "local_files_only")


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
    `architecture`: the class to build ("Qwen3MoeForCausalLM"); by default what the config names, else the causal LM.
    `dtype`: of the weights; by default what transformers does. `device`: what kernels are judged for, as in
    `opslot.bind`; the model is built on the CPU or wherever `torch.device(...)` contexts and `kwargs` put it.
    `kwargs` go to `from_pretrained`, or to `_from_config` when there is no checkpoint.

    Raises `OpslotError` for a model type that is not generated, or a checkpoint that does not fill the model: weights
    that are missing would stay random without any later error.
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
            model = _model_class(config_or_path, architecture)._from_config(config_or_path, **kwargs)
        else:
            config = AutoConfig.from_pretrained(config_or_path, **{k: v for k, v in kwargs.items() if k in _HUB})
            model = _load(_model_class(config, architecture), str(config_or_path), kwargs)
    model.opslot_binding = bind(model, ops, device=device)
    built: PreTrainedModel = model
    return built


def _model_class(config: PreTrainedConfig, architecture: str | None) -> type[PreTrainedModel]:
    module = generated_module(config.model_type)
    heads = [name for name in module.__all__ if not name.endswith("PreTrainedModel")]
    named = [architecture] if architecture else [name for name in config.architectures or () if name in heads]
    causal = [name for name in heads if name.endswith("ForCausalLM")]
    name = (named or causal)[0]
    if name not in heads:
        raise OpslotError(f"{config.model_type} has no architecture {name!r}; it has: {', '.join(heads)}")
    cls: type[PreTrainedModel] = getattr(module, name)
    return cls


def _load(cls: type[PreTrainedModel], path: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    load: Any = cls.from_pretrained
    model, info = load(path, output_loading_info=True, **kwargs)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    problems = {kind: info[kind] for kind in kinds if info.get(kind)}
    if problems:
        detail = "; ".join(f"{kind.replace('_', ' ')}: {_some(keys)}" for kind, keys in problems.items())
        raise BindError(
            f"the checkpoint {path} is not one of {cls.__name__}: what is missing would train from random values, what "
            f"is unexpected would be lost. {detail}. If that is meant, load it with transformers and call "
            "opslot_models.adopt"
        )
    loaded: PreTrainedModel = model
    return loaded


def _some(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
