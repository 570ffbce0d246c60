"""The edits that a generated module needs as a whole: imports, slots, identity, and what its models build or return."""

from collections.abc import Set

import libcst as cst

from opslot_patchgen._edit import Edit, insertion
from opslot_patchgen._errors import NameCollision, SourceError, SpecError, TargetGone, UpstreamEscape
from opslot_patchgen._escape import is_escape
from opslot_patchgen._spec import ForwardGuard, ModelSpec, Slot
from opslot_patchgen._tree import Definition, Tree

_ADOPT = "opslot_models.adoption:adopt_backbone"
_NO_HUB_KERNELS = "opslot_models.adoption:no_hub_kernels"
_AUXILIARY = "opslot_models.auxiliary:auxiliary_states"
_AUXILIARY_MEMBERS = (
    *("supports_eagle3", "has_own_lm_head", "has_own_embed_tokens"),
    *("set_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers"),
)


def module_edits(tree: Tree, spec: ModelSpec) -> list[Edit]:
    heads = [head for head in tree.classes() if any(base.startswith("GenericFor") for base in tree.bases(head))]
    composed = composed_constructors(tree)
    texts = text_models(tree)
    also = {_NO_HUB_KERNELS, *([_ADOPT] if heads or composed else []), *([_AUXILIARY] if texts else [])}
    return [
        *absolute_imports(tree),
        *_our_imports(tree, spec, also),
        *_slots(tree, spec),
        *(_in_class(tree, tree.find(name), "opslot_untrained = True  # opslot") for name in spec.untrained),
        *(_in_class(tree, tree.find(name), "opslot_whole = True  # opslot") for name in spec.whole),
        *_identity(tree),
        *(_adopting_head(tree, head) for head in heads),
        *(_adopting_constructor(tree, constructor) for constructor in composed),
        *(_auxiliary_states(tree, model) for model in texts),
    ]


def escapes(tree: Tree) -> list[cst.Call]:
    """The calls that build what they build through AutoModel, which yields upstream's classes."""
    return [call for call in tree.walk(tree.module, cst.Call) if is_escape(tree.code(call.func))]


def composed_constructors(tree: Tree) -> list[Definition]:
    """The constructors that build submodules through AutoModel: each swaps them for ours before it returns."""
    constructors = [
        definition
        for definition in tree.definitions
        if definition.name.endswith(".__init__")
        and definition.owner is not None
        and any(base.endswith("PreTrainedModel") for base in tree.bases(definition.owner))
    ]
    found: dict[str, Definition] = {}
    for call in escapes(tree):
        around = [constructor for constructor in constructors if tree.holds(constructor.node, call)]
        if not around:
            raise UpstreamEscape(
                f"{tree.at(call)}: {tree.code(call.func)} builds upstream's classes, whose slots nobody can bind, "
                "outside the constructor of a model"
            )
        found[around[0].name] = around[0]
    return list(found.values())


def text_models(tree: Tree) -> list[Definition]:
    """The classes whose calls run a text decoder, of which a drafter reads: it, what holds it, and their LM heads.

    A decoder embeds tokens, which towers for images and sound and a talker's decoder of codes do not.
    """
    built = {model.name: _submodules(tree, model) for model in tree.classes()}
    bodies = {name for name, parts in built.items() if {"layers", "embed_tokens"} <= parts.keys()}
    bodies |= {name for name, parts in built.items() if "language_model" in parts}
    heads = {name for name, parts in built.items() if "lm_head" in parts and parts.get("model") in bodies}
    return [model for model in tree.classes() if model.name in bodies | heads]


def _submodules(tree: Tree, model: Definition) -> dict[str, str]:
    """What is assigned to attributes of self in a class, by attribute: the first name of the value."""
    return {
        target.removeprefix("self."): tree.code(node.value).partition("(")[0].partition(".")[0]
        for node in tree.walk(model.node, cst.Assign)
        for target in (tree.code(assigned.target) for assigned in node.targets)
        if target.startswith("self.")
    }


def absolute_imports(tree: Tree) -> list[Edit]:
    """Relative imports, made absolute in place. The inverse turns every absolute one back, so none may be there."""
    edits = []
    for node in tree.walk(tree.module, cst.ImportFrom):
        name = tree.code(node.module) if node.module else ""
        if node.relative:
            edits.append(_absolute_import(tree, node, name))
        elif name.partition(".")[0] == "transformers":
            raise SourceError(f"{tree.at(node)}: imports from {name} absolutely")
    return edits


def _absolute_import(tree: Tree, node: cst.ImportFrom, name: str) -> Edit:
    place = tree.position(node).start
    line, start = tree.lines[place.line - 1], place.column
    old = f"from {'.' * len(node.relative)}{name} import"
    if not line.startswith(old, start):
        raise SourceError(f"{tree.at(node)}: an import that is not written `{old}`")
    package = tree.source.module.split(".")[: -len(node.relative)]
    new = f"from {'.'.join([*package, name] if name else package)} import"
    return Edit(place.line - 1, place.line, (line[:start] + new + line[start + len(old) :],))


def _our_imports(tree: Tree, spec: ModelSpec, also: Set[str]) -> list[Edit]:
    needed = {"opslot": {"OpSlot"}}
    if any(isinstance(guard, ForwardGuard) for guard in spec.guards):
        needed["opslot"].add("guard_forward")
    references = {reference for guard in spec.guards for reference in guard.functions}
    for reference in references | also:
        module, _, name = reference.partition(":")
        needed.setdefault(module, set()).add(name)
    for names in needed.values():
        _require_unused(tree, *names)
    lines = (f"from {module} import {', '.join(sorted(names))}  # opslot" for module, names in sorted(needed.items()))
    return [insertion(_after_imports(tree), *lines)]


def _after_imports(tree: Tree) -> int:
    """Below the last top-level import that comes before the first definition, which may already need a slot."""
    after = None
    for statement in tree.module.body:
        if isinstance(statement, cst.ClassDef | cst.FunctionDef):
            break
        simple = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(simple, cst.Import | cst.ImportFrom):
            after = tree.position(statement).end.line
    if after is None:
        raise SourceError(f"{tree.source.path}:1: no import before the first definition")
    return after


def _slots(tree: Tree, spec: ModelSpec) -> list[Edit]:
    declared: dict[str, dict[str, Slot]] = {}
    for guard in spec.guards:
        slots = declared.setdefault(guard.target.partition(".")[0], {})
        if slots.setdefault(guard.slot.attribute, guard.slot) != guard.slot:
            raise SpecError(f"{spec.family}: {guard.site}: {guard.slot.attribute} is declared in two ways in its class")
        _require_unused(tree, guard.slot.attribute)
    return [
        _in_class(tree, tree.find(name), *(f"{slot.declaration}  # opslot" for slot in slots.values()))
        for name, slots in declared.items()
    ]


def _identity(tree: Tree) -> list[Edit]:
    """What the classes are to transformers.

    It takes a class from another package for custom code, with no router init and no checkpoint conversion; and its hub
    kernels replace forwards, guards and all.
    """
    bases = [found for found in tree.classes() if "PreTrainedModel" in tree.bases(found)]
    if not bases:
        raise TargetGone(f"{tree.source.path}: no class derives from PreTrainedModel")
    _require_unused(tree, "is_custom_code", "set_use_kernels")
    lines = ("is_custom_code = classmethod(lambda cls: False)", "set_use_kernels = no_hub_kernels")
    return [_in_class(tree, base, *(f"{line}  # opslot" for line in lines)) for base in bases]


def _adopting_head(tree: Tree, head: Definition) -> Edit:
    """The generic heads build their backbone through AutoModel; it is swapped for ours once it is built."""
    if any(definition.name == f"{head.name}.__init__" for definition in tree.definitions):
        raise NameCollision(f"{tree.at(head.node)}: {head.name} already has an __init__")
    lines = ("def __init__(self, config):", "    super().__init__(config)", "    adopt_backbone(self)")
    marked = [f"{line}  # opslot" for line in lines]
    if isinstance(head.node.body, cst.IndentedBlock):
        return _in_class(tree, head, *marked)
    # `class X(GenericForY, Z): ...` leaves no room inside, so a subclass takes its name.
    subclass = f"class {head.name}({head.name}):  # opslot"
    return insertion(tree.position(head.node).end.line, subclass, *(f"    {line}" for line in marked))


def _adopting_constructor(tree: Tree, constructor: Definition) -> Edit:
    body = constructor.node.body
    if not isinstance(body, cst.IndentedBlock):
        raise SourceError(f"{tree.at(constructor.node)}: the body of {constructor.name} is on the line of its header")
    for left in tree.walk(constructor.node, cst.Return):
        raise SourceError(f"{tree.at(left)}: {constructor.name} returns before what it has built is swapped")
    indent = " " * tree.position(body.body[0]).start.column
    return insertion(tree.position(body.body[-1]).end.line, f"{indent}adopt_backbone(self)  # opslot")


def _auxiliary_states(tree: Tree, model: Definition) -> Edit:
    _require_unused(tree, *_AUXILIARY_MEMBERS)
    return insertion(tree.first_line(model.node), f"@{_AUXILIARY.partition(':')[2]}  # opslot")


def _in_class(tree: Tree, definition: Definition, *lines: str) -> Edit:
    at, indent = tree.body(definition)
    return insertion(at, *(indent + line for line in lines))


def _require_unused(tree: Tree, *names: str) -> None:
    for node in tree.walk(tree.module, cst.Name):
        if node.value in names:
            raise NameCollision(f"{tree.at(node)}: upstream already uses the name `{node.value}`")
