"""Attention: transformers chooses and checks it; here what it says becomes an answer about the field."""

from collections.abc import Iterator
from contextlib import contextmanager

from opslot import ConfigError, KernelUnavailable, OpsConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Distributions that bring what transformers knows and does not ship.
_INSTALL = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}


@contextmanager
def choosing_attention(config: OpsConfig) -> Iterator[None]:
    """Around what makes transformers choose the attention that the configuration names, in whichever layer.

    Raises `ConfigError` for a name that transformers does not offer, `KernelUnavailable` for one that it knows and
    that cannot run here. A name with a slash is a kernel of the hub, which transformers fetches.
    """
    name, origin = config.setting("attn_implementation")
    offered = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name is not None and name not in offered and "/" not in name:
        raise ConfigError(
            f"{origin}: attn_implementation: transformers offers no {name!r}; it offers: "
            f"{', '.join(offered)}, or a kernel of the hub as 'owner/name'. Register one of your own with "
            "transformers.AttentionInterface.register"
        )
    try:
        yield
    except ImportError as error:
        if name is None or (name not in _INSTALL and "/" not in name):
            raise
        hint = f"pip install {_INSTALL[name]}" if name in _INSTALL else "install what it names"
        raise KernelUnavailable(
            f"{origin}: attn_implementation: {name!r} cannot run here: {error} ({hint}, or choose sdpa)"
        ) from error
