"""What upstream puts in the place of a guarded method: a kernel would be bound there and never run."""

from collections.abc import Iterator
from typing import Any

import libcst as cst

from opslot_patchgen._errors import UnreachableGuard
from opslot_patchgen._spec import ForwardGuard, ModelSpec
from opslot_patchgen._tree import Definition, Tree


def require_not_replaced(tree: Tree, spec: ModelSpec) -> None:
    """Raises `UnreachableGuard` where something in the module replaces the method of a guard, or its class."""
    targets = {f"{guard.target}.forward" if isinstance(guard, ForwardGuard) else guard.target for guard in spec.guards}
    bindings = list(_bindings(tree))
    for target in sorted(targets):
        owner, _, name = target.rpartition(".")
        heirs = _subclasses(tree, owner)
        for definition in tree.definitions:
            overrides = definition.name in {f"{heir}.{name}" for heir in heirs} - targets
            if overrides and not tree.calls(definition.node, f"super().{name}"):
                raise UnreachableGuard(
                    f"{tree.at(definition.node)}: {definition.name} overrides {target} without a call of it, so the "
                    "guard would never run there"
                )
        classes = {owner, *heirs}
        replaced = {owner, *(f"{cls}.{name}" for cls in classes)}
        for node, bound in bindings:
            own = bound == name and _around(tree, node) in classes
            on_instance = bound in (f"self.{name}", f"cls.{name}") and _around(tree, node).partition(".")[0] in classes
            if bound in replaced or own or on_instance:
                raise UnreachableGuard(f"{tree.at(node)}: replaces {bound}, so a guard in {target} may never run")


def _subclasses(tree: Tree, name: str) -> set[str]:
    heirs = {cls.name for cls in tree.classes() if name in tree.bases(cls)}
    return heirs.union(*(_subclasses(tree, heir) for heir in heirs - {name}))


# Each has what it binds as its `target`.
_BINDING: tuple[Any, ...] = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.Del)


def _bindings(tree: Tree) -> Iterator[tuple[cst.CSTNode, str]]:
    """Every place that binds something otherwise than by defining it, and what it binds."""
    for kind in _BINDING:
        for node in tree.walk(tree.module, kind):
            bound = node.target
            parts = [part.value for part in bound.elements] if isinstance(bound, cst.Tuple | cst.List) else [bound]
            yield from ((node, tree.code(part)) for part in parts)
    for name in tree.walk(tree.module, cst.AsName):
        yield name, tree.code(name.name)
    for alias in tree.walk(tree.module, cst.ImportAlias):
        if alias.asname is None:
            yield alias, tree.code(alias.name)
    for call in tree.walk(tree.module, cst.Call):
        if len(call.args) == 3 and tree.code(call.func) == "setattr":
            attribute = tree.code(call.args[1].value).strip("\"'")
            yield call, f"{tree.code(call.args[0].value)}.{attribute}"


def _around(tree: Tree, node: cst.CSTNode) -> str:
    """The name of the innermost definition that holds a node, or none."""
    held: list[Definition] = [definition for definition in tree.definitions if tree.holds(definition.node, node)]
    return held[-1].name if held else ""
