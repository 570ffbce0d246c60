"""Names of modules: the same whether or not something wraps the model, and globs over them."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRANSPARENT = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL = {"DistributedDataParallel", "DataParallel"}
_PEFT = {"base_model", "model", "base_layer"}


def canonical_modules(model: "torch.nn.Module") -> Iterator[tuple[str, "torch.nn.Module"]]:
    """Every module under every one of its names, without the parts that wrappers add.

    A shared module comes once for each name. torch.compile, DDP, FSDP, checkpoint wrappers and PEFT put themselves
    between a module and its parent; the name of what they wrap is the name of the wrapper.
    """

    def walk(name: str, module: "torch.nn.Module") -> Iterator[tuple[str, "torch.nn.Module"]]:
        yield name, module
        for part, child in module._modules.items():
            if child is not None:
                step = name if _wraps(module, part) else f"{name}.{part}" if name else part
                yield from walk(step, child)

    return walk("", model)


def _wraps(module: "torch.nn.Module", part: str) -> bool:
    kind = type(module)
    if kind.__module__.partition(".")[0] == "peft":
        return part in _PEFT
    return part in _TRANSPARENT or (part == "module" and kind.__name__ in _PARALLEL)


def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob over names: `*` stays within a part, a part `**` stands for any number of parts, none included."""
    # Each part takes the dot after it along, so that `**` needs no case of its own wherever it stands.
    parts = [
        r"(?:[^.]+\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\."
        for part in (glob.split(".") if glob else ())
    ]
    return re.compile("".join(parts))


def matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(f"{name}." if name else "") is not None
