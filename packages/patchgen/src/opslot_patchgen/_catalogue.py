"""The definitions of one module by name, what their maths is, and which of them the maths of one depends on."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from opslot_patchgen._errors import SourceError
from opslot_patchgen._maths import Code, Token, maths_of
from opslot_patchgen._source import Source

# What stands for the statements of a module or a class that define nothing; no definition has such a name.
_STATEMENTS = "(statements)"
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fingerprint:
    """What identifies the maths of one definition: its body, and how it is wrapped and called."""

    maths: str
    decorators: tuple[str, ...]
    parameters: tuple[str, ...]


class Catalogue:
    """Functions ("f"), methods ("C.f"), class attributes ("C.a"), constants ("A"), imported names and classes ("C").

    A class by itself is its bases and decorators. What `if` and `try` define at the level of a module counts, and so
    does each of several definitions of one name. Statements that define nothing (a call of `setattr`, a loop, what an
    `if` tests) can replace any definition beside them: together they are "(statements)", in a class "C.(statements)".
    """

    def __init__(self, source: Source) -> None:
        try:
            self.code = Code(source.text)
        except SyntaxError as error:
            raise SourceError(f"{source.path}:{error.lineno}: not Python: {error.msg}") from error
        self.classes: dict[str, ast.ClassDef] = {}
        self._nodes: dict[str, list[ast.stmt]] = {}
        self._collect(self.code.tree.body, "")

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def names(self) -> list[str]:
        return list(self._nodes)

    def imports(self, name: str) -> bool:
        """Whether the module has a name from elsewhere and defines none of that name."""
        return all(isinstance(node, ast.Import | ast.ImportFrom) for node in self._nodes[name])

    def fingerprint(self, name: str) -> Fingerprint:
        nodes = self._nodes[name]
        last = nodes[-1]
        return Fingerprint(
            maths=maths_of(token for node in nodes for token in self._tokens(node)),
            decorators=tuple(self._text(decorator) for node in nodes for decorator in _decorators(node)),
            parameters=tuple(self._parameters(last.args)) if isinstance(last, Function) else (),
        )

    def text(self, name: str) -> str:
        """The lines of a definition with its decorators, for a reader."""
        return "".join(
            f"{line}\n" for node in self._nodes[name] for line in self.code.lines[_first_line(node) : _last_line(node)]
        )

    @property
    def maths(self) -> str:
        return maths_of(self.code.tokens)

    def holder(self, line: int) -> str:
        """The innermost definition that has a line, or none."""
        held = [
            (node.lineno, name)
            for name, nodes in self._nodes.items()
            for node in nodes
            if _first_line(node) < line <= (node.end_lineno or 0) and not name.endswith(_STATEMENTS)
        ]
        return max(held)[1] if held else ""

    def dependencies(self, name: str) -> list[str]:
        """What the maths of a method depends on in this module, transitively.

        It is the functions, constants, imported names and own methods that are used, the methods that set what is read
        of `self`, the functions of this module that decorate, and the class with its bases. A submodule is a boundary:
        what `__init__` builds is not followed.
        """
        found = {name: name.rpartition(".")[0]}
        while True:
            before = len(found)
            for used, owner in [*found.items()]:
                found = {**dict(self._used(used, owner)), **found}
            for owner in {owner for owner in found.values() if owner}:
                for setter in self._setters(owner, [used for used, of in found.items() if of == owner]):
                    found.setdefault(setter, owner)
            if len(found) == before:
                return sorted(found.keys() - {name})

    def _collect(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            for name, part in _defined(node):
                self._nodes.setdefault(prefix + name, []).append(part)
            if isinstance(node, ast.ClassDef) and not prefix:
                self.classes[node.name] = node
                self._collect(node.body, f"{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for field in ("body", "handlers", "orelse", "finalbody"):
                    for inner in getattr(node, field, ()):
                        self._collect(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], prefix)

    def _tokens(self, node: ast.stmt) -> list[Token]:
        if isinstance(node, Function):
            first: list[ast.expr | ast.stmt] = [node.body[0], *_decorators(node.body[0])]
            begin = min(self.code.start(part) for part in first)
            return self.code.between(begin, self.code.end(node))
        if isinstance(node, ast.ClassDef):
            expressions = [*node.bases, *(keyword.value for keyword in node.keywords)]
            return [token for part in expressions for token in self._within(part)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            # Of one name: what else the statement imports is no part of its maths.
            return [Token(ast.unparse(node), self.code.start(node))]
        return self._within(node)

    def _within(self, node: ast.stmt | ast.expr) -> list[Token]:
        return self.code.between(self.code.start(node), self.code.end(node))

    def _text(self, node: ast.expr) -> str:
        """An expression on one line."""
        text = ""
        for token in self._within(node):
            spaced = text[-1:].isidentifier() and token.text[0].isidentifier()
            spaced = spaced or (text.endswith(",") and token.text not in ")]}")
            text += f" {token.text}" if spaced else token.text
        return text.replace("\n", "\\n")

    def _parameters(self, arguments: ast.arguments) -> Iterator[str]:
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        defaults += arguments.defaults
        for index, (argument, default) in enumerate(zip(positional, defaults, strict=True), start=1):
            yield self._parameter(argument, default)
            if index == len(arguments.posonlyargs):
                yield "/"
        if arguments.vararg:
            yield f"*{arguments.vararg.arg}"
        elif arguments.kwonlyargs:
            yield "*"
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            yield self._parameter(argument, default)
        if arguments.kwarg:
            yield f"**{arguments.kwarg.arg}"

    def _parameter(self, argument: ast.arg, default: ast.expr | None) -> str:
        return argument.arg if default is None else f"{argument.arg}={self._text(default)}"

    def _used(self, name: str, owner: str) -> Iterator[tuple[str, str]]:
        """What one definition uses, each with the class that `self` is in it."""
        for lineage in self._lineage(owner):
            yield lineage, owner
            if (statements := f"{lineage}.{_STATEMENTS}") in self._nodes:
                yield statements, owner
        # Among them, an import of `*` may bring any name.
        yield from ((name, "") for name in (_STATEMENTS, "*") if name in self._nodes)
        if owner and (init := self._attribute(owner, "__init__")):
            yield init, owner
        for node in self._nodes[name]:
            for decorator in _decorators(node):
                named = {part.id for part in ast.walk(decorator) if isinstance(part, ast.Name)}
                yield from ((used, "") for used in sorted(named) if self._is_function(used))
            for part in _maths_nodes(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                    yield from self._global(part.id, name)
                elif isinstance(part, ast.Attribute) and owner and (attribute := self._member(part, owner)):
                    yield attribute, owner

    def _is_function(self, name: str) -> bool:
        return any(isinstance(node, Function) for node in self._nodes.get(name, ()))

    def _global(self, used: str, user: str) -> Iterator[tuple[str, str]]:
        if used in self.classes:
            # What a class has as its bases is its lineage; what `__init__` builds is a submodule.
            if user not in self.classes and not user.endswith(".__init__"):
                yield from ((name, used) for name in self._nodes if name.partition(".")[0] == used)
        elif used in self._nodes:
            yield used, ""

    def _member(self, node: ast.Attribute, owner: str) -> str | None:
        """The definition that `self.x`, `cls.x` or `super().x` means."""
        value = node.value
        if isinstance(value, ast.Name) and value.id in ("self", "cls"):
            return self._attribute(owner, node.attr)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
            bases = (f"{base}.{node.attr}" for base in self._lineage(owner)[1:])
            return next((name for name in bases if name in self._nodes), None)
        return None

    def _attribute(self, owner: str, attribute: str) -> str | None:
        names = (f"{ancestor}.{attribute}" for ancestor in self._lineage(owner))
        return next((name for name in names if name in self._nodes), None)

    def _lineage(self, owner: str) -> list[str]:
        """A class and its bases in this module, in the order in which attributes are looked up."""
        if owner not in self.classes:
            return []
        bases = [base.id for base in self.classes[owner].bases if isinstance(base, ast.Name)]
        return list(dict.fromkeys([owner, *(name for base in bases for name in self._lineage(base))]))

    def _setters(self, owner: str, users: list[str]) -> Iterator[str]:
        read = {name for user in users for node in self._nodes[user] for name in _own(node, ast.Load)}
        lineage = self._lineage(owner)
        for name, nodes in self._nodes.items():
            if name.rpartition(".")[0] in lineage and any(read & _own(node, ast.Store) for node in nodes):
                yield name


def _defined(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a statement defines, each with what defines it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((part.id, node) for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            one = copy.copy(node)
            one.names = [alias]
            yield alias.asname or alias.name.partition(".")[0], one
    elif isinstance(node, ast.If):
        yield _STATEMENTS, ast.copy_location(ast.Expr(node.test), node.test)
    elif isinstance(node, ast.With):
        for item in node.items:
            yield _STATEMENTS, ast.copy_location(ast.Expr(item.context_expr), item.context_expr)
    elif not (isinstance(node, ast.Try | ast.Pass) or _is_constant(node)):
        yield _STATEMENTS, node


def _is_constant(node: ast.stmt) -> bool:
    """A docstring, or another statement that does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in _decorators(node))]) - 1


def _last_line(node: ast.stmt) -> int:
    if isinstance(node, ast.ClassDef):
        return max(_first_line(node.body[0]), node.lineno)
    assert node.end_lineno is not None
    return node.end_lineno


def _maths_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a definition but its annotations and decorators; of a class, its bases."""
    yield node
    skipped = {"annotation", "returns", "decorator_list"} | ({"body"} if isinstance(node, ast.ClassDef) else set())
    for field, value in ast.iter_fields(node):
        if field not in skipped:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _maths_nodes(child)


def _own(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The attributes of `self` that code reads or sets; `register_buffer` and its like set the one they name."""
    names = set()
    for part in _maths_nodes(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
            if isinstance(part.ctx, context):
                names.add(part.attr)
        elif isinstance(part, ast.Call) and part.args and context is ast.Store:
            word = part.args[0]
            registers = ast.unparse(part.func).startswith("self.register_")
            if registers and isinstance(word, ast.Constant) and isinstance(word.value, str):
                names.add(word.value)
    return names
