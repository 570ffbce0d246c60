"""The inverse works from a finished file alone."""

import pytest
from opslot_patchgen import InverseError, restore

HEADER = "# Generated.\n# source: transformers.models.tiny.modeling_tiny\n\n"


def test_marked_lines_go_and_else_blocks_are_dedented():
    body = """\
from transformers.utils import x
from opslot import OpSlot  # opslot


class A:
    def f(self):
        kernel = self.a_op.kernel  # opslot: a/b
        if kernel is not None:  # opslot
            y = kernel()  # opslot
        else:  # opslot
            y = (
                1
            )

            # y
        return y
"""
    assert (
        restore(HEADER + body)
        == """\
from ...utils import x


class A:
    def f(self):
        y = (
            1
        )

        # y
        return y
"""
    )


def test_only_real_imports_are_made_relative():
    body = '"""\nfrom transformers import A\n"""\nif A:\n    from transformers import A\n'
    assert restore(HEADER + body) == '"""\nfrom transformers import A\n"""\nif A:\n    from ... import A\n'


def test_a_marker_in_the_middle_of_a_line_is_upstreams():
    body = 'a = "  # opslot" + b\n'
    assert restore(HEADER + body) == body


@pytest.mark.parametrize(
    ("text", "message"), [("# Generated.\n\nx = 1\n", "no source module"), (f"{HEADER}x = = 1\n", "not Python: line 1")]
)
def test_what_cannot_be_undone_is_refused(text, message):
    with pytest.raises(InverseError, match=message):
        restore(text)
