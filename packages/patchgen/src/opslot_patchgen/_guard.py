"""From one guard of a spec to the edit that splices it in, or the reason why it cannot stand there."""

import ast
import builtins
from collections.abc import Sequence, Set
from typing import assert_never

import libcst as cst

from opslot_patchgen._edit import Edit, insertion
from opslot_patchgen._errors import AmbiguousTarget, NameCollision, SourceError, TargetGone, UnreachableGuard
from opslot_patchgen._spec import CallGuard, EntryGuard, ForwardGuard, Guard, RegionGuard, Slot
from opslot_patchgen._tree import Method, Tree

# Each replaces the decorated body (transformers.integrations), at import or by a setting: code inside may never run.
# `use_kernel_forward_from_hub` is not here: it acts only once the user calls `kernelize`, which binding reports.
SWAPPING_DECORATORS = frozenset({"use_experts_implementation", "use_kernel_func_from_hub_with_fallback"})


def guard_edit(tree: Tree, guard: Guard) -> Edit:
    match guard:
        case ForwardGuard():
            return _forward_edit(tree, guard)
        case EntryGuard():
            return _entry_edit(tree, guard)
        case CallGuard():
            return _call_edit(tree, guard)
        case RegionGuard():
            return _region_edit(tree, guard)
        case _:
            assert_never(guard)


def _forward_edit(tree: Tree, guard: ForwardGuard) -> Edit:
    forward = tree.method(f"{guard.target}.forward")
    start = tree.first_line(forward.owner.node)
    _require_known(tree, forward, guard.slot, start, *(f"self.{name}" for name in guard.attributes))
    arguments = [f'"{name}"' for name in (guard.slot.attribute, *guard.attributes)]
    indent = " " * tree.position(forward.owner.node).start.column
    return insertion(start, f"{indent}@guard_forward({', '.join(arguments)})  # opslot: {guard.slot.marker}")


def _entry_edit(tree: Tree, guard: EntryGuard) -> Edit:
    method = _reachable_method(tree, guard.target)
    at, indent = tree.body(method) if guard.before is None else _in_front(tree, method, guard.before)
    _require_known(tree, method, guard.slot, at, guard.result)
    head = _read_slot(guard.slot, indent)
    return insertion(at, *head, f"{indent}    return {guard.result}  # opslot")


def _in_front(tree: Tree, method: Method, callee: str) -> tuple[int, str]:
    """Where the statement that holds the only call of `callee` begins, and its indentation."""
    call = _only_call(tree, method, callee)
    functions = [each for each in tree.walk(method.node, cst.FunctionDef) if tree.holds(each, call)]
    lines = [line for line in tree.walk(method.node, cst.SimpleStatementLine) if tree.holds(line, call)]
    if len(functions) > 1 or not lines:
        raise SourceError(f"{tree.at(call)}: {callee} is not called in a line of {method.name} itself")
    return tree.first_line(lines[-1]), " " * tree.position(lines[-1]).start.column


def _call_edit(tree: Tree, guard: CallGuard) -> Edit:
    method = _reachable_method(tree, guard.target)
    call = _only_call(tree, method, guard.call)
    statement = next((line for line in tree.walk(method.node, cst.SimpleStatementLine) if tree.holds(line, call)), None)
    assigned = _assigned(statement)
    if statement is None or assigned is None or not (guard.result or assigned.value is call):
        raise SourceError(f"{tree.at(call)}: the call of {guard.call} is not the value of an assignment of its own")
    edit, kept, indent = _reindented(tree, [statement])
    expressions = [each for each in (guard.when, guard.result) if each is not None]
    imported = {reference.partition(":")[2] for reference in guard.uses}
    _require_known(tree, method, guard.slot, edit.start, *expressions, imported=imported)
    if guard.result is not None:
        targets = "".join(f"{tree.code(target).strip()} " for target in assigned.targets)
        taken = [f"{indent}    {targets}{guard.result}"]
    else:
        taken = _kernel_call(tree, method, guard, edit, kept)
    head = _read_slot(guard.slot, indent, guard.when)
    return _either(edit, head, [f"{line}  # opslot" for line in taken if line.strip()], indent, kept)


def _assigned(statement: cst.SimpleStatementLine | None) -> cst.Assign | None:
    alone = statement.body[0] if statement is not None and len(statement.body) == 1 else None
    return alone if isinstance(alone, cst.Assign) else None


def _kernel_call(tree: Tree, method: Method, guard: CallGuard, edit: Edit, kept: Sequence[str]) -> list[str]:
    """Upstream's lines, with the kernel for the callee and, where it says so, what is forwarded for the mapping."""
    call = _only_call(tree, method, guard.call)
    taken = list(kept)
    replacements: list[tuple[cst.CSTNode, str]] = [(call.func, "kernel")]
    if guard.forwarded is not None:
        mapping = _mapping(tree, method, call)
        keywords = (_read(tree, mapping, name, key) for name, key in guard.forwarded)
        replacements.append((mapping, ", ".join(keywords)))
    for node, text in reversed(replacements):
        place = tree.position(node)
        row, start, end = place.start.line - 1 - edit.start, place.start.column + 4, place.end.column + 4
        rest = taken[row][end:]
        if not text and (taken[row][:start].strip() or rest.strip() not in ("", ",")):
            raise SourceError(f"{tree.at(node)}: a mapping that no kernel gets does not stand on a line of its own")
        taken[row] = f"{taken[row][:start]}{text}{rest}" if text else ""
    if any(line.endswith("\\") for line in taken):
        raise SourceError(f"{tree.at(call)}: a line continued with a backslash cannot carry a marker")
    return taken


def _region_edit(tree: Tree, guard: RegionGuard) -> Edit:
    method = _reachable_method(tree, guard.target)
    statements = _stretch(tree, method, guard)
    _require_same_results(tree, method, guard, statements)
    edit, kept, indent = _reindented(tree, statements)
    imported = {reference.partition(":")[2] for reference in guard.uses}
    operand = [_operand(tree, method, guard.first)] if guard.operand else []
    mapping = _mapping(tree, method, _only_call(tree, method, guard.last)) if guard.forwarded else None
    forwarded = (_read(tree, mapping, name, name, default) for name, default in guard.forwarded if mapping)
    arguments = (*operand, *guard.arguments, *forwarded)
    call = f"kernel({', '.join(arguments)})"
    _require_known(tree, method, guard.slot, edit.start, guard.when, call, imported=imported)
    taken = [f"{name} = None" for name in guard.cleared]
    taken += [f"{guard.result} = kernel(", *(f"    {argument}," for argument in arguments), ")"]
    head = _read_slot(guard.slot, indent, guard.when)
    return _either(edit, head, [f"{indent}    {line}  # opslot" for line in taken], indent, kept)


def _read_slot(slot: Slot, indent: str, when: str | None = None) -> list[str]:
    condition = "" if when is None else f" if {when} else None"
    return [
        f"{indent}kernel = self.{slot.attribute}.kernel{condition}  # opslot: {slot.marker}",
        f"{indent}if kernel is not None:  # opslot",
    ]


def _either(place: Edit, head: list[str], taken: list[str], indent: str, kept: Sequence[str]) -> Edit:
    return Edit(place.start, place.stop, (*head, *taken, f"{indent}else:  # opslot", *kept))


def _reindented(tree: Tree, statements: Sequence[cst.BaseStatement]) -> tuple[Edit, tuple[str, ...], str]:
    """The place of consecutive statements, their lines four columns deeper, and their old indentation."""
    start, stop = tree.first_line(statements[0]), tree.position(statements[-1]).end.line
    indent = " " * tree.position(statements[0]).start.column
    for number, line in enumerate(tree.lines[start:stop], start=start + 1):
        # Undoing the indentation goes by columns: what stands left of the block would end it.
        if line.strip() and not line.startswith(indent):
            raise SourceError(f"{tree.source.path}:{number}: stands left of the statement that it belongs to")
    for statement in statements:
        for kind in (cst.SimpleString, cst.FormattedString, cst.TemplatedString):
            for string in tree.walk(statement, kind):
                place = tree.position(string)
                if place.start.line != place.end.line:
                    raise SourceError(f"{tree.at(string)}: a string over several lines would change with indentation")
    kept = tuple(f"    {line}" if line.strip() else line for line in tree.lines[start:stop])
    return Edit(start, stop, ()), kept, indent


def _stretch(tree: Tree, method: Method, guard: RegionGuard) -> Sequence[cst.BaseStatement]:
    first, last = _only_call(tree, method, guard.first), _only_call(tree, method, guard.last)
    # Blocks are listed outermost first, so the last one that holds both calls is the innermost.
    shared = [block for block in tree.walk(method.node, cst.IndentedBlock) if tree.holds(block, first, last)]
    statements = shared[-1].body
    begin = next(index for index, statement in enumerate(statements) if tree.holds(statement, first))
    end = next(index for index, statement in enumerate(statements) if tree.holds(statement, last))
    if end < begin:
        raise SourceError(f"{tree.at(first)}: {guard.first} is called after {guard.last}")
    return statements[begin : end + 1]


def _operand(tree: Tree, method: Method, callee: str) -> str:
    """The one argument of the only call of `callee`."""
    call = _only_call(tree, method, callee)
    if len(call.args) != 1 or call.args[0].keyword or call.args[0].star:
        raise SourceError(f"{tree.at(call)}: {callee} is not called with one positional argument")
    operand = tree.code(call.args[0].value)
    if "\n" in operand or "#" in operand:
        raise SourceError(f"{tree.at(call)}: the argument of {callee} is not written on one line")
    return operand


def _mapping(tree: Tree, method: Method, call: cst.Call) -> cst.Arg:
    """The `**mapping` that upstream gives to a call."""
    mappings = [argument for argument in call.args if argument.star == "**"]
    if len(mappings) != 1:
        callee = tree.code(call.func)
        raise TargetGone(f"{tree.at(call)}: {callee} gets no `**mapping`, or several: {method.name} forwarded one")
    return mappings[0]


def _read(tree: Tree, mapping: cst.Arg, name: str, key: str, default: int | None = None) -> str:
    """A keyword of the kernel that is read from a mapping."""
    rest = "" if default is None else f", {default}"
    return f'{name}={tree.code(mapping.value)}.get("{key}"{rest})'


def _require_same_results(
    tree: Tree, method: Method, guard: RegionGuard, statements: Sequence[cst.BaseStatement]
) -> None:
    """The kernel's branch must set what the region sets, or the code below would read something stale."""
    assigned: set[str] = set()
    for statement in statements:
        if left := next(tree.walk(statement, cst.Return), None):
            raise SourceError(f"{tree.at(left)}: a return inside the region from {guard.first} to {guard.last}")
        for node in tree.nodes(statement):
            if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For):
                elements = node.target.elements if isinstance(node.target, cst.Tuple) else ()
                assigned |= {tree.code(part.value) for part in elements} or {tree.code(node.target)}
    loops = (*tree.walk(method.node, cst.For), *tree.walk(method.node, cst.While))
    looped = any(tree.holds(loop, statements[0]) for loop in loops)
    end = tree.position(statements[-1]).end.line
    later = {name.value for name in tree.walk(method.node, cst.Name) if looped or tree.position(name).start.line > end}
    expected = {guard.result, *guard.cleared}
    needed = {name for name in assigned if name in later or not name.isidentifier()}
    if not needed <= expected <= assigned:
        raise SourceError(
            f"{tree.at(statements[0])}: the region from {guard.first} to {guard.last} assigns "
            f"{', '.join(sorted(assigned))}; the guard sets {', '.join(sorted(expected))}"
        )


def _only_call(tree: Tree, method: Method, callee: str) -> cst.Call:
    calls = tree.calls(method.node, callee)
    if not calls:
        raise TargetGone(f"{tree.at(method.node)}: {method.name} does not call {callee}")
    if len(calls) > 1:
        raise AmbiguousTarget(f"{tree.at(calls[1])}: {method.name} calls {callee} {len(calls)} times")
    return calls[0]


def _reachable_method(tree: Tree, target: str) -> Method:
    method = tree.method(target)
    for decorator in (*method.node.decorators, *method.owner.node.decorators):
        called = decorator.decorator.func if isinstance(decorator.decorator, cst.Call) else decorator.decorator
        name = tree.code(called).rpartition(".")[2]
        if name in SWAPPING_DECORATORS:
            raise UnreachableGuard(f"{tree.at(decorator)}: @{name} swaps {target}, a guard inside may never run")
    for used in tree.walk(method.node, cst.Name):
        if used.value == "kernel":
            raise NameCollision(f"{tree.at(used)}: {target} already uses the name `kernel`")
    return method


def _require_known(
    tree: Tree, method: Method, slot: Slot, line: int, *expressions: str, imported: Set[str] = frozenset()
) -> None:
    """A guard runs only with a kernel bound, so a name that upstream renamed must be found here, not there."""
    seen = {name.value for name in tree.walk(method.node, cst.Name) if tree.position(name).start.line <= line}
    known = {"kernel", *dir(builtins), *tree.globals, *seen, *imported}
    attributes = tree.attributes(method.owner) | {slot.attribute}
    activation = () if slot.activation is None else (f"self.{slot.activation}",)
    for expression in (*activation, *expressions):
        for node in ast.walk(ast.parse(expression, mode="eval")):
            if isinstance(node, ast.Name) and node.id not in known | {"self"}:
                raise TargetGone(f"{tree.at(method.node)}: {method.name} has no `{node.id}` where the guard reads it")
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr not in attributes:
                raise TargetGone(f"{tree.at(method.owner.node)}: {method.owner.name} has no attribute `{node.attr}`")
