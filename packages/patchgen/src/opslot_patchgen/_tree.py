"""The parsed source: definitions by qualified name and nodes by place. libcst gives positions and never writes code."""

import difflib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from opslot_patchgen._errors import AmbiguousTarget, SourceError, TargetGone
from opslot_patchgen._source import Source

Node = TypeVar("Node", bound=cst.CSTNode)


@dataclass(frozen=True, eq=False)
class Definition:
    """A class or function with its qualified name and the definition around it."""

    name: str
    node: cst.ClassDef | cst.FunctionDef
    owner: "Definition | None"


@dataclass(frozen=True, eq=False)
class Method:
    name: str
    node: cst.FunctionDef
    owner: Definition


class _Recorder(cst.CSTVisitor):
    """Lists every node in source order with the extent of its subtree, so that a search is a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[cst.CSTNode] = []
        self.extent: dict[cst.CSTNode, tuple[int, int]] = {}
        self.kinds: dict[type[cst.CSTNode], list[int]] = {}
        self.definitions: list[Definition] = []
        self._open: list[Definition] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.extent[node] = (len(self.nodes), 0)
        self.kinds.setdefault(type(node), []).append(len(self.nodes))
        self.nodes.append(node)
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            owner = self._open[-1] if self._open else None
            prefix = f"{owner.name}." if owner else ""
            self._open.append(Definition(prefix + node.name.value, node, owner))
            self.definitions.append(self._open[-1])
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self.extent[original_node] = (self.extent[original_node][0], len(self.nodes))
        if self._open and self._open[-1].node is original_node:
            self._open.pop()


class Tree:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines = source.text.split("\n")
        try:
            wrapper = MetadataWrapper(cst.parse_module(source.text), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise SourceError(f"{source.path}: {error.message}") from error
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._recorder = _Recorder()
        self.module.visit(self._recorder)

    @property
    def definitions(self) -> list[Definition]:
        return self._recorder.definitions

    def find(self, name: str) -> Definition:
        """The one definition of that qualified name."""
        found = [definition for definition in self.definitions if definition.name == name]
        if not found:
            near = difflib.get_close_matches(name, {definition.name for definition in self.definitions}, n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise TargetGone(f"{self.source.path}: {name} is gone{hint}")
        if len(found) > 1:
            raise AmbiguousTarget(f"{self.at(found[1].node)}: {name} is defined {len(found)} times")
        return found[0]

    def method(self, name: str) -> Method:
        """The one method of that name, which reads its slot from self."""
        found = self.find(name)
        node, owner = found.node, found.owner
        if not (isinstance(node, cst.FunctionDef) and owner and isinstance(owner.node, cst.ClassDef)):
            raise SourceError(f"{self.at(node)}: {name} is not a method")
        if not node.params.params or node.params.params[0].name.value != "self":
            raise SourceError(f"{self.at(node)}: {name} has no self, where the slot is read")
        if node.asynchronous is not None or next(self.walk(node, cst.Yield), None) is not None:
            raise SourceError(f"{self.at(node)}: {name} is async or a generator, where a kernel's result is no result")
        return Method(name, node, owner)

    def walk(self, node: cst.CSTNode, kind: type[Node]) -> Iterator[Node]:
        """Every node of one kind in the subtree of `node`, itself included, in source order."""
        start, stop = self._recorder.extent[node]
        places = self._recorder.kinds.get(kind, [])
        found = (self._recorder.nodes[at] for at in places[bisect_left(places, start) : bisect_left(places, stop)])
        return cast(Iterator[Node], found)

    def nodes(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        start, stop = self._recorder.extent[node]
        return self._recorder.nodes[start:stop]

    def calls(self, node: cst.CSTNode, callee: str) -> list[cst.Call]:
        return [call for call in self.walk(node, cst.Call) if self.code(call.func) == callee]

    def holds(self, outer: cst.CSTNode, *inner: cst.CSTNode) -> bool:
        start, stop = self._recorder.extent[outer]
        return all(start <= self._recorder.extent[node][0] < stop for node in inner)

    @property
    def globals(self) -> set[str]:
        """What the module imports or defines."""
        imported = self.walk(self.module, cst.ImportAlias)
        names = {alias.evaluated_alias or alias.evaluated_name.partition(".")[0] for alias in imported}
        return names | {definition.name for definition in self.definitions if definition.owner is None}

    def classes(self) -> list[Definition]:
        return [definition for definition in self.definitions if isinstance(definition.node, cst.ClassDef)]

    def bases(self, definition: Definition) -> list[str]:
        assert isinstance(definition.node, cst.ClassDef)
        return [self.code(base.value) for base in definition.node.bases]

    def attributes(self, definition: Definition) -> set[str]:
        """The attributes that a class and its bases in this module define or read; no others."""
        names = {node.attr.value for node in self.walk(definition.node, cst.Attribute)}
        names |= {inner.node.name.value for inner in self.definitions if inner.owner is definition}
        names |= {self.code(node.target) for node in self.walk(definition.node, cst.AssignTarget)}
        bases = self.bases(definition)
        return names.union(*(self.attributes(base) for base in self.classes() if base.name in bases))

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def position(self, node: cst.CSTNode) -> CodeRange:
        return self._positions[node]

    def at(self, node: cst.CSTNode) -> str:
        return f"{self.source.path}:{self.position(node).start.line}"

    def first_line(self, node: cst.CSTNode) -> int:
        """The index of the line where a statement begins; a decorator belongs to it, a comment above does not."""
        if isinstance(node, cst.ClassDef | cst.FunctionDef) and node.decorators:
            node = node.decorators[0]
        return self.position(node).start.line - 1

    def body(self, definition: Definition | Method) -> tuple[int, str]:
        """Where the first line of our own goes, and its indentation: after the docstring, above any comment."""
        node = definition.node
        if not isinstance(node.body, cst.IndentedBlock):
            raise SourceError(f"{self.at(node)}: the body of {definition.name} is on the line of its header")
        first = node.body.body[0]
        indent = " " * self.position(first).start.column
        if node.get_docstring(clean=False) is not None:
            return self.position(first).end.line, indent
        assert isinstance(first, cst.SimpleStatementLine | cst.BaseCompoundStatement)
        return self.first_line(first) - len(first.leading_lines), indent
