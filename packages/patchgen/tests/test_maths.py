"""What is the maths of code and what is not, the same on every Python."""

import shutil
import subprocess
from pathlib import Path

import pytest
from opslot_patchgen import _maths, module_maths

CODE = """\
import torch
from a import (b, c)


@decorator
def f(x, y=1, *rest, **more):
    z = x if x else g(x, y)
    print(f"{z!r:>{y}} {{}}", 'a', {"k": z}, [x, y])
    return (z,), z[x,], more


class C(B):
    names = ["a", "b"]
    size: int = 1

    def forward(self, x):
        return self.f(x) + 1
"""
COSMETIC = {
    "comment": ("    z = ", "    # why\n    z = "),
    "comment at the end": ("g(x, y)\n", "g(x, y)  # why\n"),
    "blank line": ("    z = ", "\n\n    z = "),
    "docstring": ("    z = ", '    """What it does."""\n    z = '),
    "docstring of a class": ("    names", "    '''One\n    thing.'''\n\n    names"),
    "docstring of the module": ("import torch", '"""All."""\n\nimport torch'),
    "annotation": ("def f(x, y=1, ", "def f(x: int, y: dict[str, tuple[int, ...]] = 1, "),
    "annotation in brackets": ("def f(x, ", "def f(x: (\n    int\n), "),
    "annotation of the rest": ("*rest, **more", '*rest: int, **more: "Unpack[X]"'),
    "result": ("**more):", "**more) -> tuple[int, dict[str, int]]:"),
    "variable": ("    z = x", "    z: int = x"),
    "attribute": ("size: int", "size: float | None"),
    "signature over lines": ("f(x, y=1, *rest, **more)", "f(\n    x,\n    y=1,\n    *rest,\n    **more,\n)"),
    "call over lines": ("g(x, y)", "g(\n        x,\n        y,\n    )"),
    "last commas": ('{"k": z}, [x, y]', '{"k": z,}, [x, y,]'),
    "import over lines": ("(b, c)", "(\n    b,\n    c,\n)"),
    "continued line": ("z = x if x", "z = x \\\n        if x"),
    "semicolon": ("g(x, y)\n    print", "g(x, y); print"),
    "carriage returns": ("\n", "\r\n"),
    "wider indentation": ("        return self", "            return self"),
    "byte order mark": ("import torch", "\ufeffimport torch"),
}
CHANGES = {
    "operator": ("+ 1", "- 1"),
    "name": ("self.f", "self.g"),
    "default": ("y=1", "y=2"),
    "parameter": ("(self, x)", "(self, x, mask=None)"),
    "keyword only": ("y=1, *rest", "*rest, y=1"),
    "decorator": ("@decorator\n", ""),
    "import": ("import torch", "import numpy"),
    "string": ("'a'", "'b'"),
    "f-string": ("{z!r", "{z!s"),
    "string that is no docstring": ("    z = x", "    '''a'''; z = '''a''' or x"),
    "base": ("C(B)", "C(A)"),
    "value of an attribute": ('"a", "b"', '"a"'),
    "tuple": ("(z,)", "(z)"),
    "index": ("z[x,]", "z[x]"),
    "block": ("    return (z,)", "        return (z,)"),
    "declaration": ("    names", "    more: int\n    names"),
    "field of a dataclass": ("size: int = 1", "size = 1"),
}


@pytest.mark.parametrize("case", COSMETIC)
def test_what_is_not_maths(case):
    assert changed(*COSMETIC[case]) == module_maths(CODE)


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_maths(case):
    old, new = CHANGES[case]
    if case == "block":
        old, new = "    print(", "    if x:\n        print("
    assert changed(old, new) != module_maths(CODE)


def changed(old, new):
    assert old in CODE
    return module_maths(CODE.replace(old, new))


def test_tokens_do_not_run_together():
    assert module_maths("a = b\nc\n") != module_maths("a = bc\n") != module_maths("a = b; c = 1\n")


def test_positions_right_of_an_emoji():
    with_emoji = 'def f(a="😀", b: int = 1): x: "😀é" = "é"; y: int = 2; return x\n'
    assert module_maths(with_emoji) == module_maths('def f(a="😀", b=1): x = "é"; y = 2; return x\n')


@pytest.mark.parametrize(
    "pattern", ["match x:\n    case (a,):\n        pass\n", "match (x,):\n    case _:\n        pass\n"]
)
def test_a_pattern_of_one_is_no_call(pattern):
    assert module_maths(pattern) != module_maths(pattern.replace(",)", ")"))


def test_what_is_not_python_is_refused():
    with pytest.raises(SyntaxError):
        module_maths("a = = b\n")


STRINGS = '''\
def f(x, é="😀") -> "y":  # 😀
    a: str = f"é {x!r:>{x}} {{}}" f'{x:{"x"}}' rf"\\d{x}"
    return f"""
😀 {x
    + 1} {{ }} \\N{BULLET}
""", type(x,), _(x,), b"", u"", 0x_f, 1_0.5e-3j, x if x else-1, lambda y, *, z=1: y@z
'''


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_gives_the_same(version, tmp_path):
    python = interpreter(version)
    # Alone, as the copy beside the generated models is: it imports nothing of this package.
    shutil.copyfile(_maths.__file__, tmp_path / "copied.py")
    texts = [CODE, STRINGS, Path(_maths.__file__).read_text()]
    code = f"import copied; print(*map(copied.module_maths, {texts!r}))"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [module_maths(text) for text in texts]
    assert done.stdout.split()[1] == "sha256:2a640d422f911fecdc53ff338f4587f04d438ad4a8f303fa8fd35334d3872ad8"


def interpreter(version):
    """uv finds an interpreter wherever it lies; none is fetched."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv to find other interpreters")
    command = [uv, "python", "find", "--no-project", "--no-python-downloads", version]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Python {version} is not installed")
    return done.stdout.strip()
