"""The specs against what they rely on: contracts of the core, and configs that the tests of the models use."""

import ast
import re
from pathlib import Path

import pytest
from opslot import registry
from opslot_models import families
from opslot_models._families import generated_module

every_family = pytest.mark.parametrize("family", families())


def guards(family):
    """The slot of each guard, and the call of its kernel as the generated module has it; None outside a method."""
    tree = ast.parse(text := Path(generated_module(family).__file__).read_text(encoding="utf-8"))
    lines = text.splitlines()
    calls = {
        node.lineno: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "kernel"
    }
    for number, line in enumerate(lines, start=1):
        if marked := re.search(r"# opslot: (\w+)/(\w+)$", line):
            inside = None if line.startswith("@") else min(at for at in calls if at > number)
            yield marked[1], marked[2], calls.get(inside)


@every_family
def test_kernels_are_called_as_their_contracts_say(family):
    found = list(guards(family))
    assert found
    for op, variant, call in found:
        signature = registry().contract(op, variant).signature()
        if call is not None and not any(isinstance(argument, ast.Starred) for argument in call.args):
            signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


@every_family
def test_the_tiny_configs_say_nothing_that_upstream_does_not_read(family, config):
    """A config keeps any key that it is given; some that it does not have, a model reads all the same."""
    made = config()
    known = type(made)()
    source = Path(generated_module(family).__file__).read_text(encoding="utf-8")
    unknown = {key for key in made.to_dict() if not hasattr(known, key)}
    assert {key for key in unknown if f'(config, "{key}"' not in source and f"self.config.{key}" not in source} == set()
