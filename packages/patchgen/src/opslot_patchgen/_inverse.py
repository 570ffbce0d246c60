"""LEAF module. Upstream's text from a generated file alone: no spec, no list of edits, no libcst.

It reads the artifact as a reviewer would, so that it cannot share a mistake with the code that wrote it.
"""

import ast
import re

from opslot_patchgen._errors import InverseError

_OURS = re.compile(r"  # opslot(: [a-z]\w*/[a-z]\w*)?$")
_MODULE = re.compile(r"^# source: (transformers(?:\.\w+)+)$", re.MULTILINE)


def restore(generated: str) -> str:
    """Undo every line of ours: drop the header and the marked lines, dedent what an added `else:` holds."""
    # The header ends at the first blank line, which is ours too.
    header, _, body = generated.partition("\n\n")
    module = _MODULE.search(header)
    if module is None:
        raise InverseError("the header names no source module")
    return "\n".join(_without_ours(_relative_imports(body, module.group(1))))


def _without_ours(lines: list[str]) -> list[str]:
    kept = []
    block: int | None = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if block is not None and line.strip() and depth <= block:
            block = None
        if _OURS.search(line):
            if line.lstrip() == "else:  # opslot":
                block = depth
        elif block is not None and line.strip():
            kept.append(line[4:])
        else:
            kept.append(line)
    return kept


def _relative_imports(body: str, module: str) -> list[str]:
    """The lines of `body`, each absolute import from transformers written relative to `module` again."""
    try:
        tree = ast.parse(body)
    except SyntaxError as error:
        raise InverseError(f"not Python: line {error.lineno} below the header: {error.msg}") from error
    lines = body.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "transformers":
            old, new = f"from {node.module} import", f"from {_relative(node.module, module)} import"
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new, 1)
    return lines


def _relative(name: str, module: str) -> str:
    package, path = module.split(".")[:-1], name.split(".")
    shared = 0
    while shared < min(len(package), len(path)) and package[shared] == path[shared]:
        shared += 1
    return "." * (len(package) - shared + 1) + ".".join(path[shared:])
