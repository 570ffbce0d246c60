"""Names of modules: the same whether or not something wraps the model, and globs over them."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRANSPARENT = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL = {"DistributedDataParallel", "DataParallel"}
_NUMBERS = re.compile(r"\\\{(\d+(?:\\-\d+)?(?:,\d+(?:\\-\d+)?)*)\\\}")
_PEFT = {"base_model", "model", "base_layer"}


def canonical_modules(model: "torch.nn.Module") -> Iterator[tuple[str, "torch.nn.Module"]]:
    """Every module under every one of its names, without the parts that wrappers add.

    A shared module comes once for each name. torch.compile, DDP, FSDP, checkpoint wrappers and PEFT put themselves
    between a module and its parent; the name of what they wrap is the name of the wrapper. PEFT's modules_to_save hold
    several modules in the place of one and run one of them: each has a name of its own, and that of the place.
    """

    above: list[torch.nn.Module] = []

    def walk(name: str, module: "torch.nn.Module") -> Iterator[tuple[str, "torch.nn.Module"]]:
        yield name, module
        above.append(module)
        for part, child in module._modules.items():
            if child is not None and not any(child is other for other in above):
                step = name if _wraps(module, part) else f"{name}.{part}" if name else part
                yield from walk(step, child)
        for child in _alternatives(module):
            yield from walk(name, child)
        above.pop()

    return walk("", model)


def _wraps(module: "torch.nn.Module", part: str) -> bool:
    if part in _TRANSPARENT:
        return True
    if part in _PEFT and _is_peft(module):
        return True
    return part == "module" and any(kind.__name__ in _PARALLEL for kind in type(module).__mro__)


def _alternatives(module: "torch.nn.Module") -> "tuple[torch.nn.Module, ...]":
    saved = module._modules.get("modules_to_save")
    if saved is None or not _is_peft(module):
        return ()
    held = (module._modules.get("original_module"), *saved._modules.values())
    return tuple(child for child in held if child is not None)


def _is_peft(module: "torch.nn.Module") -> bool:
    # By all its classes: FSDP2 and users derive from them.
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob over names, in which `{0-3,5}` stands for these numbers, as in reports.

    `*` stays within a part, a part `**` stands for any number of parts, none included.
    """
    # Each part takes the dot after it along, so that `**` needs no case of its own wherever it stands.
    parts = [
        r"(?:[^.]+\.)*" if part == "**" else _NUMBERS.sub(_numbers, re.escape(part)).replace(r"\*", "[^.]*") + r"\."
        for part in (glob.split(".") if glob else ())
    ]
    return re.compile("".join(parts))


def _numbers(found: re.Match[str]) -> str:
    spans = (span.partition(r"\-") for span in found[1].split(","))
    numbers = (str(n) for low, _, high in spans for n in range(int(low), int(high or low) + 1))
    return f"(?:{'|'.join(numbers)})"


def matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(f"{name}." if name else "") is not None
