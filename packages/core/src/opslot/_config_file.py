"""Configuration files: YAML, TOML or JSON, read so that a mistake names its file and line."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def read_mapping(path: str) -> Mapping[str, Any]:
    """The mapping that a file holds. Raises `ConfigError` for what cannot be read, and for a key given twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            tree: Any = tomllib.loads(text)
        else:
            tree = _json(text) if path.endswith(".json") else _yaml(text, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    # Not UTF-8, a NUL in the path, a date that is none, endless nesting, tags that PyYAML stumbles over.
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: expected a mapping of fields to kernel names, got {type(tree).__name__}")
    return tree


def _json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is given twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def _yaml(text: str, path: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML keeps the last of two equal keys without a word."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}, line {key.start_mark.line + 1}: a field is a name, not a {key.id}")
            if key.value in seen:
                raise ConfigError(f"{path}, line {key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
