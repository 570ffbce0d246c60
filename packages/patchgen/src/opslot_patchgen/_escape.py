"""LEAF module. Which calls in a modeling module build a submodule from outside of it."""

import re

_ESCAPE = re.compile(r"(^|\.)AutoModel\w*\.(_?from_config|from_pretrained)$")


def is_escape(callee: str) -> bool:
    """Whether a call of `callee` yields upstream's classes, in which there are no slots."""
    return _ESCAPE.search(callee) is not None
