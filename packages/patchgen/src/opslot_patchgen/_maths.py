"""LEAF module, standard library only: generation copies it to where models judge an installed transformers.

The maths of code is its tokens without comments, docstrings, annotations and layout. Equal maths give equal hashes on
every Python from 3.11 on.
"""

import ast
import hashlib
import io
import keyword
import tokenize
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

# Line from one, column from zero in characters.
Place: TypeAlias = tuple[int, int]

# What stands for the end of a statement and of a block; no token has such a text.
_NEWLINE, _INDENT, _DEDENT = "\n", "\t", "\b"
_LAYOUT = frozenset({_NEWLINE, _INDENT, _DEDENT})
_IGNORED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_CLOSES = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Token:
    text: str
    start: Place


class Code:
    """Python source. `tree` is what `ast` makes of it, `tokens` is its maths in source order."""

    def __init__(self, text: str) -> None:
        """Raises `SyntaxError` for text that is not Python."""
        text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self.lines = text.split("\n")
        self.tree = ast.parse(text)
        self.tokens = _canonical(self._without_annotations(_whole_strings(text, self.lines)))
        self._starts = [token.start for token in self.tokens]

    def between(self, start: Place, end: Place) -> list[Token]:
        return self.tokens[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def start(self, node: ast.expr | ast.stmt | ast.arg) -> Place:
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.arg) -> Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, offset: int) -> Place:
        """`ast` counts columns in bytes of UTF-8, `tokenize` in characters."""
        return line, len(self.lines[line - 1].encode("utf-8")[:offset].decode("utf-8"))

    def _without_annotations(self, tokens: list[Token]) -> list[Token]:
        """Drop docstrings and annotations; a declaration without a value keeps its name.

        In a class it keeps the colon too: whether it is declared decides whether it is a field of a dataclass.
        """
        spans: list[tuple[Place, Place]] = []
        declared: list[tuple[Place, bool]] = []
        fields = {id(node) for owner in ast.walk(self.tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                line, column = self.start(node)
                spans.append(((line, column + 1), self.end(node)))
            elif isinstance(node, ast.AnnAssign):
                declared.append((self.end(node.target), id(node) in fields))
            elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                spans.append((self.start(node.body[0]), self.end(node.body[0])))
        starts = [token.start for token in tokens]
        dropped: set[int] = set()
        for start, end in spans:
            dropped.update(range(bisect_left(starts, start), bisect_left(starts, end)))
        for place, is_field in declared:
            colon = next(i for i in range(bisect_left(starts, place), len(tokens)) if tokens[i].text == ":")
            dropped.update(range(colon + is_field, _first_outside(tokens, colon + 1, {"=", ";", _NEWLINE})))
        for index, token in enumerate(tokens):
            if token.text == "->":
                dropped.update(range(index, _first_outside(tokens, index + 1, {":"})))
        return [token for index, token in enumerate(tokens) if index not in dropped]


def module_maths(text: str) -> str:
    """The hash of a whole module, its imports and decorators included. Raises `SyntaxError` for what is not Python."""
    return maths_of(Code(text).tokens)


def maths_of(tokens: Iterable[Token]) -> str:
    """The hash of some tokens; how a block of them begins and ends is layout."""
    texts = [token.text for token in tokens]
    while texts and texts[0] in _LAYOUT:
        del texts[0]
    while texts and texts[-1] in _LAYOUT:
        del texts[-1]
    return f"sha256:{hashlib.sha256(chr(0).join(texts).encode('utf-8')).hexdigest()}"


def _whole_strings(text: str, lines: list[str]) -> list[Token]:
    """The tokens of `text`. From Python 3.12 on an f-string comes in parts; here every string is one token."""
    tokens: list[Token] = []
    nested = 0
    opened = (0, 0)
    for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[kind]
        if name in ("FSTRING_START", "TSTRING_START"):
            opened = start if nested == 0 else opened
            nested += 1
        elif name in ("FSTRING_END", "TSTRING_END"):
            nested -= 1
            if nested == 0:
                tokens.append(Token(_slice(lines, opened, end), opened))
        elif nested == 0 and kind not in _IGNORED:
            layout = {"NEWLINE": _NEWLINE, "INDENT": _INDENT, "DEDENT": _DEDENT}
            tokens.append(Token(layout.get(name, string), start))
    return tokens


def _slice(lines: list[str], start: Place, end: Place) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    return "\n".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]])


def _first_outside(tokens: list[Token], index: int, texts: set[str]) -> int:
    """The first token from `index` on that is one of `texts` and inside no bracket."""
    depth = 0
    while depth or tokens[index].text not in texts:
        depth += (tokens[index].text in _CLOSES.values()) - (tokens[index].text in _CLOSES)
        index += 1
    return index


def _canonical(tokens: list[Token]) -> list[Token]:
    """Semicolons end statements as lines do, and a comma before a closing bracket goes where it means nothing."""
    kept: list[Token] = []
    # Per open bracket whether a last comma inside means nothing.
    idle: list[bool] = []
    for token in tokens:
        before = kept[-1].text if kept else _NEWLINE
        if token.text in _CLOSES.values():
            idle.append(_is_comma_idle(token.text, before))
        elif token.text in _CLOSES and idle.pop() and before == ",":
            kept.pop()
        elif token.text in (_NEWLINE, ";"):
            if before not in _LAYOUT:
                kept.append(Token(_NEWLINE, token.start))
            continue
        kept.append(token)
    return kept


def _is_comma_idle(bracket: str, before: str) -> bool:
    """Not in a tuple or an index, where `x,` is something else than `x`."""
    if bracket == "{":
        return True
    name = before.isidentifier() and not keyword.iskeyword(before)
    value = name or before in _CLOSES or before[-1] in "\"'"
    if bracket == "[":
        return not value
    # `match (x,):` looks like a call. Python's list of such words differs between its versions.
    return before == "import" or (value and before not in ("match", "case"))
