"""Configuration: which kernel a user chose for which op."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._contract import Key, OpContract
from ._errors import ConfigError, UnknownKernel, nearest
from ._kernel import AUTO, EAGER
from ._registry import Registry

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class OpsConfig:
    """The user's choice of kernels.

    `choices` maps a field ("rms_norm", or the long form "rms_norm_implementation") to a kernel name, "eager" or
    "auto", or to one such value per variant ({"standard": "torch", "unweighted": "eager"}). `default` holds for every
    op that `choices` does not name. `attn_implementation` is passed on to transformers by those who build models.
    `origin` says in reports and errors where the choice was written. `outside` are the names that stand beside
    `model:` or `ops_implementation:` in a file that holds more than this.
    """

    choices: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    default: str = AUTO
    attn_implementation: str | None = None
    origin: str = "code"
    outside: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: "OpsConfig | Mapping[str, Any] | str | Path | None") -> "OpsConfig":
        """A configuration from what a user passes: None ("auto"), "auto", "eager", a YAML file's path or a mapping.

        In a file or mapping the fields may stand at the top or under `model: ops_implementation:`, and `default:`
        names the default. Raises `ConfigError`. Whether a field or a kernel exists is judged by `select`.
        """
        if isinstance(value, OpsConfig):
            return value
        if value is None or value in (AUTO, EAGER):
            return cls(default=value if isinstance(value, str) else AUTO)
        if isinstance(value, Mapping):
            return cls._from_mapping(value, "code")
        if str(value).endswith((".yaml", ".yml")):
            return cls._from_mapping(_read_yaml(str(value)), str(value))
        raise ConfigError(f"{value!r} is no configuration: pass 'auto', 'eager', a mapping or the path of a YAML file")

    @classmethod
    def _from_mapping(cls, tree: Mapping[str, Any], origin: str) -> "OpsConfig":
        outside: list[Any] = []
        for level in ("model", "ops_implementation"):
            if level in tree:
                outside += [name for name in tree if name != level]
                tree = tree[level]
                if not isinstance(tree, Mapping):
                    raise ConfigError(f"{origin}: {level} must be a mapping, got {tree!r}")
        choices: dict[str, str | Mapping[str, str]] = {}
        for name, value in tree.items():
            if not isinstance(name, str):
                raise ConfigError(f"{origin}: a field is a name, got {name!r}{_yaml_hint(name)}")
            if isinstance(value, Mapping):
                if not value or not all(isinstance(variant, str) for variant in value):
                    raise ConfigError(f"{origin}: {name} must map variants to kernels, got {dict(value)!r}")
                choices[name] = {variant: _name(f"{name}.{variant}", v, origin) for variant, v in value.items()}
            else:
                choices[name] = _name(name, value, origin)
        default, attention = choices.pop("default", AUTO), choices.pop("attn_implementation", None)
        if not isinstance(default, str) or default not in (AUTO, EAGER):
            raise ConfigError(f"{origin}: default must be 'auto' or 'eager', got {default!r}")
        if isinstance(attention, Mapping):
            raise ConfigError(f"{origin}: attn_implementation must be one name, got {attention!r}")
        return cls(choices, default, attention, origin, tuple(name for name in outside if isinstance(name, str)))

    def select(self, registry: Registry) -> dict[Key, tuple[str, str]]:
        """The chosen name and its field for every contract that `choices` speaks of.

        Raises `ConfigError` for an unknown field or two fields of one op, `UnknownOp` for an unknown variant,
        `UnknownKernel` for a name that no variant of the op has.
        """
        owners: dict[str, list[OpContract]] = {}
        for contract in registry.contracts():
            for name in contract.config_fields():
                owners.setdefault(name, []).append(contract)
        for name in self.outside:
            if name in owners or name.endswith("_implementation"):
                raise ConfigError(
                    f"{self.origin}: {name!r} stands outside `ops_implementation:` and would have no effect"
                )
        selected: dict[Key, tuple[str, str]] = {}
        for name in self.choices:
            if name not in owners:
                valid = sorted({contract.config_fields()[0] for contract in registry.contracts()})
                raise ConfigError(
                    f"{self.origin}: unknown field {name!r}{nearest(name, [*owners, 'ops_implementation'])}; known: "
                    f"{', '.join(valid)} (each also as <op>_implementation), default, attn_implementation"
                    f"{registry.failures()}"
                )
            for contract, value in self._per_contract(name, owners[name], registry):
                taken = selected.get(contract.key)
                if taken is not None:
                    raise ConfigError(f"{self.origin}: {taken[1]!r} and {name!r} both choose {contract}; leave one out")
                selected[contract.key] = (value, name)
        return selected

    def _per_contract(
        self, name: str, contracts: list[OpContract], registry: Registry
    ) -> Iterator[tuple[OpContract, str]]:
        value: Any = self.choices[name]
        if not isinstance(value, str | Mapping):
            raise ConfigError(f"{self.origin}: {name} must be the name of a kernel, got {value!r}")
        if isinstance(value, Mapping):
            alias = name.removesuffix("_implementation")
            for variant, kernel in value.items():
                known = any(f"{alias}/{variant}" in contract.aliases for contract in contracts)
                contract = registry.contract(alias if known else contracts[0].op, variant)
                _check_name(registry, [contract], kernel, f"{self.origin}: {name}.{variant}")
                yield contract, kernel
        else:
            _check_name(registry, contracts, value, f"{self.origin}: {name}")
            yield from ((contract, value) for contract in contracts)


def _check_name(registry: Registry, contracts: list[OpContract], kernel: str, where: str) -> None:
    """Raise unless one of the contracts knows the kernel, so that a typo is noticed whatever the model has."""
    if kernel in (AUTO, EAGER):
        return
    unknown = []
    # The variant with the most kernels gives the most helpful error.
    for contract in sorted(contracts, key=lambda contract: -len(registry.offers(*contract.key))):
        try:
            registry.offer(*contract.key, kernel)
        except UnknownKernel as error:
            unknown.append(error)
        else:
            return
    raise UnknownKernel(f"{where}: {unknown[0]}")


def _name(where: str, value: Any, origin: str) -> str:
    if isinstance(value, str) and value:
        return value
    hint = "; write 'eager' or 'auto', or leave the line out" if value is None else _yaml_hint(value)
    raise ConfigError(f"{origin}: {where} must be the name of a kernel, got {value!r}{hint}")


def _yaml_hint(value: Any) -> str:
    return " (YAML reads yes, no, on and off as booleans); for no kernel write eager" if isinstance(value, bool) else ""


def _read_yaml(path: str) -> Mapping[str, Any]:
    from pathlib import Path

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
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, a NUL in the path, a date that is none, endless nesting
        raise ConfigError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: expected a mapping of fields to kernel names, got {type(tree).__name__}")
    return tree
