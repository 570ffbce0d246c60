"""Source as people rarely write it: spliced in the right place, or refused with file and line."""

import re

import pytest
from opslot_patchgen import (
    AmbiguousTarget,
    CallGuard,
    EntryGuard,
    ForwardGuard,
    PatchgenError,
    RegionGuard,
    Slot,
    SourceError,
)

SLOT = Slot("rms_norm", "standard")
ENTRY = EntryGuard(target="A.forward", slot=SLOT, result="kernel(x)")
CALL = CallGuard(target="A.forward", slot=SLOT, call="turn")
FORWARD = ForwardGuard(target="A", slot=SLOT, attributes=("w",))
REGION = RegionGuard(
    target="A.forward", slot=SLOT, first="turn", last="back", when="x is None", result="y", arguments=("x",)
)
# Line 14 is the first below the usual imports.
ENTERED = """\
        kernel = self.rms_norm_op.kernel  # opslot: rms_norm/standard
        if kernel is not None:  # opslot
            return kernel(x)  # opslot
"""

HANDLED = {
    "emoji above, in strings and in the header": (
        ENTRY,
        '# 😀😀\nNAME = "😀"; OTHER = """😀\n😀"""\n\n\nclass A(nn.Module):\n'
        '    def forward(self, x, name="😀", other="é"):  # 😀\n        """😀."""\n        return x\n',
        f'        """😀."""\n{ENTERED}        return x\n',
    ),
    "emoji left of the call": (
        CALL,
        'class A(nn.Module):\n    def forward(self, x):\n        é = turn("😀", f(x, "😀"))  # 😀\n        return é\n',
        '            é = kernel("😀", f(x, "😀"))  # 😀  # opslot\n        else:  # opslot\n'
        '            é = turn("😀", f(x, "😀"))  # 😀\n',
    ),
    "a target of a subscript with an emoji": (
        CALL,
        'class A(nn.Module):\n    def forward(self, x):\n        x["😀"] = turn(x)\n        return x\n',
        '            x["😀"] = kernel(x)  # opslot\n        else:  # opslot\n            x["😀"] = turn(x)\n',
    ),
    "line separators of Unicode": (
        CALL,
        'A_ = "\u2028\x85"\n\n\nclass A(nn.Module):\n    def forward(self, x):\n'
        '        y = turn("\u2028", x)\n        return y\n',
        '            y = kernel("\u2028", x)  # opslot\n',
    ),
    "a tab inside a line": (
        CALL,
        "class A(nn.Module):\n    def forward(self, x):\n        y =\tturn(x)\t# why\n        return y\n",
        "            y =\tkernel(x)\t# why  # opslot\n",
    ),
    "indentation of two": (
        ENTRY,
        "class A(nn.Module):\n  def forward(self, x):\n     return x\n",
        "     kernel = self.rms_norm_op.kernel  # opslot: rms_norm/standard\n     if kernel is not None:  # opslot\n"
        "         return kernel(x)  # opslot\n     return x\n",
    ),
    "decorators over lines": (
        ENTRY,
        "@deco(\n    1,\n    # why\n)\nclass A(nn.Module):\n    @deco(\n        (1),\n    )\n    @other\n"
        "    def forward(self, x):\n        return x\n",
        ')\nclass A(nn.Module):\n    rms_norm_op = OpSlot("rms_norm", "standard")  # opslot\n'
        "    @deco(\n        (1),\n    )\n"
        f"    @other\n    def forward(self, x):\n{ENTERED}        return x\n",
    ),
    "a guard above a decorator over lines": (
        FORWARD,
        "# Why.\n@deco(\n    1,\n)\nclass A(nn.Module):\n    def forward(self, x):\n        return self.w\n",
        '# Why.\n@guard_forward("rms_norm_op", "w")  # opslot: rms_norm/standard\n@deco(\n    1,\n)\nclass A',
    ),
    "a decorated function first in the body": (
        ENTRY,
        "class A(nn.Module):\n    def forward(self, x):\n        @deco(\n            1\n        )\n"
        "        def inner(x):\n            return x\n        return inner(x)\n",
        f"    def forward(self, x):\n{ENTERED}        @deco(\n",
    ),
    "a function of the same name inside": (
        ENTRY,
        "class A(nn.Module):\n    def forward(self, x):\n        def forward(x):\n            return x\n"
        "        return forward(x)\n\n\n"
        "def forward(x):\n    class A:\n        def forward(self, y):\n            return y\n",
        'class A(nn.Module):\n    rms_norm_op = OpSlot("rms_norm", "standard")  # opslot\n'
        f"    def forward(self, x):\n{ENTERED}",
    ),
    "imports under a condition": (
        ENTRY,
        "if is_x_available():\n    from ..x import y\nelse: from .y import y\ntry:\n    from ...z import w\n"
        "except ImportError:\n    from . import w\n\n\n"
        "class A(nn.Module):\n    def forward(self, x):\n        return x\n",
        "if is_x_available():\n    from transformers.models.x import y\n"
        "else: from transformers.models.tiny.y import y\n"
        "try:\n    from transformers.z import w\nexcept ImportError:\n    from transformers.models.tiny import w\n",
    ),
    "imports in functions": (
        ENTRY,
        "def f():\n    from .k import (\n        l,\n    )\n\n\nclass A(nn.Module):\n    def forward(self, x):\n"
        "        from ...u import v; return v(x)\n",
        f"    def forward(self, x):\n{ENTERED}        from transformers.u import v; return v(x)\n",
    ),
    "an import behind a semicolon": (
        ENTRY,
        "import a; from .b import c\n\n\nclass A(nn.Module):\n    def forward(self, x):\n        return x\n",
        "import a; from transformers.models.tiny.b import c\n",
    ),
    "an import continued by a backslash": (
        ENTRY,
        "from ..x import \\\n    y\n\n\nclass A(nn.Module):\n    def forward(self, x):\n"
        "        return \\\n            x\n",
        "from transformers.models.x import \\\n    y\n",
    ),
    "an import in a string": (
        ENTRY,
        'NAME = """\nfrom ..x import y\n"""\n\n\nclass A(nn.Module):\n    def forward(self, x):\n        return x\n',
        'NAME = """\nfrom ..x import y\n"""\n',
    ),
    "a docstring with a semicolon": (
        ENTRY,
        'class A(nn.Module):\n    def forward(self, x):\n        """Doc."""; x = 1\n        return x\n',
        f'        """Doc."""; x = 1\n{ENTERED}        return x\n',
    ),
    "backslashes in a region": (
        REGION,
        "class A(nn.Module):\n    def forward(self, x):\n        y = turn(x) + \\\n            1\n"
        "        y = y if y \\\n            else back(y)\n        return y\n",
        "        else:  # opslot\n            y = turn(x) + \\\n                1\n            y = y if y \\\n"
        "                else back(y)\n        return y\n",
    ),
}


@pytest.mark.parametrize("case", HANDLED)
def test_handled(case, generate):
    """`generate` itself proves that undoing the edits gives the source back."""
    guard, text, expected = HANDLED[case]
    generated = generate(text, guard)
    compile(generated, "generated", "exec")
    assert expected in generated


def method(body, head="    def forward(self, x):\n"):
    return f"class A(nn.Module):\n{head}{body}"


REFUSED = {
    "tab": (ENTRY, method("\treturn x\n"), SourceError, ":16: indented with a tab"),
    "tab in a string over lines": (
        ENTRY,
        f'X = """\n\t\n"""\n{method("        return x")}\n',
        SourceError,
        ":15: indented with a tab",
    ),
    "carriage return": (ENTRY, method("        return x\r\n"), SourceError, ":16: carriage return"),
    "form feed": (ENTRY, "\f\n" + method("        return x\n"), SourceError, ":14: form feed"),
    "no newline": (ENTRY, method("        return x"), SourceError, ":16: does not end with a newline"),
    "defined under two conditions": (
        ENTRY,
        "class A(nn.Module):\n    if x:\n        def forward(self, x):\n            return x\n    else:\n"
        "        def forward(self, x):\n            return -x\n",
        AmbiguousTarget,
        ":19: A.forward is defined 2 times",
    ),
    "the call in two functions inside": (
        CALL,
        method(
            "        def f(x):\n            y = turn(x)\n        def f(x):\n            y = turn(x)\n        return f\n"
        ),
        AmbiguousTarget,
        ":19: A.forward calls turn 2 times",
    ),
    "async": (
        ENTRY,
        method("        return x\n", "    async def forward(self, x):\n"),
        SourceError,
        ":15: A.forward is async",
    ),
    "async experts": (
        FORWARD,
        method("        return self.w\n", "    async def forward(self, x):\n"),
        SourceError,
        ":15: A.forward is async",
    ),
    "generator": (ENTRY, method("        yield x\n"), SourceError, ":15: A.forward is async or a generator"),
    "semicolon behind the call": (
        CALL,
        method("        y = turn(x); z = 1\n        return y\n"),
        SourceError,
        ":16: the call of turn",
    ),
    "on the line of an if": (
        CALL,
        method("        if x: y = turn(x)\n        return y\n"),
        SourceError,
        ":16: the call of turn",
    ),
    "walrus": (
        CALL,
        method("        if (y := turn(x)):\n            return y\n"),
        SourceError,
        ":16: the call of turn",
    ),
    "walrus in an assignment": (
        CALL,
        method("        y = (z := turn(x))\n        return y\n"),
        SourceError,
        ":16: the call of turn",
    ),
    "walrus in a region": (
        REGION,
        method("        y = turn(z := x)\n        y = back(y)\n        return y, z\n"),
        SourceError,
        ":16: the region from turn to back assigns y, z; the guard sets y",
    ),
    "body on the line of the header": (
        ENTRY,
        method("", "    def forward(self, x): y = 1; return x\n"),
        SourceError,
        ":15: the body",
    ),
    "import broken by a backslash": (
        ENTRY,
        f"from ..x \\\n    import y\n{method('        return x')}\n",
        SourceError,
        ":14: an import that is not written",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_file_and_line(case, generate):
    guard, text, error, message = REFUSED[case]
    with pytest.raises(error, match=rf"modeling_tiny\.py{re.escape(message)}") as raised:
        generate(text, guard)
    assert isinstance(raised.value, PatchgenError)
