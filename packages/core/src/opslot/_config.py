"""Configuration: which kernel a user chose for which op, and in which modules."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ._catalog import distribution_of, op_of_field
from ._contract import Key, OpContract
from ._errors import BackendError, ConfigError, UnknownKernel, UnknownOp, nearest
from ._kernel import AUTO, EAGER
from ._registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    Choices = Mapping[str, str | Mapping[str, str]]

VARIABLE = "OPSLOT_OPS"
_WORDS = ("default", "attn_implementation", "modules", "probe", "strict")


@dataclass(frozen=True)
class Rule:
    """One choice: `kernel` for the contract `key`, in the modules that `glob` matches, or everywhere.

    `key` is None for a field whose op has no contract here: no model can have a slot for it.
    """

    key: Key | None
    kernel: str
    field: str
    origin: str
    glob: str | None = None

    def __str__(self) -> str:
        return f"{f'modules {self.glob!r}: ' if self.glob else ''}{self.field} in {self.origin}"


@dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """The user's choice of kernels.

    `choices` maps a field ("rms_norm", "rms_norm_implementation", or one contract, "rms_norm/standard") to a kernel
    name, "eager" or "auto", or to one such value per variant ({"standard": "torch", "unweighted": "eager"}).
    `modules` maps a glob over module names to choices for the modules that it matches: `*` stays within a part of a
    name, `{0-3,5}` stands for these numbers, a part `**` for any number of parts, an empty glob for the model itself,
    and the last glob that matches wins. `default` holds for every op that nothing else names; None means "auto".
    `attn_implementation` is passed on to transformers by those who build models. With `strict`, a choice that has no
    effect is an error instead of a warning; with `probe`, each kernel is compared with its contract's reference before
    it is bound. Read these four with `setting`, since a lower layer may say them.

    `origin` says in reports and errors where the choice was written. `outside` are the names that stand beside
    `model:` or `ops_implementation:` in a file that holds more than this. `base` is the configuration that this one
    was laid over with `over`.
    """

    choices: "Choices" = field(default_factory=dict)
    modules: "Mapping[str, Choices]" = field(default_factory=dict)
    default: str | None = None
    attn_implementation: str | None = None
    strict: bool = False
    probe: bool = False
    origin: str = "code"
    outside: tuple[str, ...] = ()
    base: "OpsConfig | None" = None

    @classmethod
    def parse(cls, value: "OpsConfig | Mapping[str, Any] | str | Path | None") -> "OpsConfig":
        """A configuration from what a user passes: None ("auto"), "auto", "eager", a mapping, or the path of a YAML,
        TOML or JSON file.

        In a file or mapping the fields may stand at the top or under `model: ops_implementation:`, beside `modules:`,
        `default:`, `strict:`, `probe:` and `attn_implementation:`. Raises `ConfigError`. Whether a field or a kernel
        exists is judged by `rules`.
        """
        if isinstance(value, OpsConfig):
            return value
        if value is None or value in (AUTO, EAGER):
            return cls(default=value if isinstance(value, str) else None)
        if isinstance(value, Mapping):
            return cls._from_mapping(value, "code")
        from ._config_file import SUFFIXES, read_mapping

        if str(value).endswith(SUFFIXES):
            return cls._from_mapping(read_mapping(str(value)), str(value))
        raise ConfigError(
            f"{value!r} is no configuration: pass 'auto', 'eager', a mapping or the path of a YAML, TOML or JSON file"
        )

    @classmethod
    def effective(cls, value: "OpsConfig | Mapping[str, Any] | str | Path | None") -> "OpsConfig":
        """What `bind` applies: `value` as `parse` reads it, with what OPSLOT_OPS chooses for this run over it."""
        config = cls.parse(value)
        for_this_run = None if config.origin == VARIABLE else cls.from_environment()
        return config if for_this_run is None else for_this_run.over(config)

    @classmethod
    def from_environment(cls) -> "OpsConfig | None":
        """What the variable OPSLOT_OPS chooses for this run, "rms_norm=eager,moe_experts=torch", or None without it."""
        text = os.environ.get(VARIABLE, "").strip()
        if not text:
            return None
        tree: dict[str, str] = {}
        for part in text.split(","):
            name, equals, kernel = (piece.strip() for piece in part.partition("="))
            if not (name and equals and kernel) or name in tree:
                why = "is given twice" if name in tree else "is not of the form FIELD=KERNEL"
                raise ConfigError(f"{VARIABLE}: {part.strip()!r} {why}; write for example rms_norm=eager,default=auto")
            tree[name] = kernel
        return cls._from_mapping(tree, VARIABLE)

    @classmethod
    def _from_mapping(cls, tree: Mapping[str, Any], origin: str) -> "OpsConfig":
        outside: list[Any] = []
        if isinstance(tree.get("model"), Mapping) and "ops_implementation" not in tree["model"]:
            raise ConfigError(f"{origin}: `model:` has no `ops_implementation:`, under which the fields stand")
        for level in ("model", "ops_implementation"):
            if level in tree:
                outside += [name for name in tree if name != level]
                lost = [name for name in _WORDS if level == "ops_implementation" and name in tree]
                if lost:
                    raise ConfigError(f"{origin}: {lost[0]!r} stands beside `ops_implementation:` and belongs into it")
                tree = tree[level]
                if not isinstance(tree, Mapping):
                    raise ConfigError(f"{origin}: {level} must be a mapping, got {tree!r}")
        rest = dict(tree)
        modules = rest.pop("modules", {})
        strict, probe = (_flag(name, rest.pop(name, False), origin) for name in ("strict", "probe"))
        if not isinstance(modules, Mapping):
            raise ConfigError(f"{origin}: modules must map globs to choices, got {modules!r}")
        overrides = {}
        for glob, inner in modules.items():
            if (
                not isinstance(glob, str)
                or (glob and not all(glob.split(".")))
                or not isinstance(inner, Mapping)
                or not inner
            ):
                raise ConfigError(
                    f"{origin}: modules must map globs such as 'model.layers.0.**' to choices, got {glob!r}: {inner!r}"
                )
            if misplaced := [name for name in _WORDS if name in inner]:
                raise ConfigError(f"{origin}: {misplaced[0]} cannot be chosen per module, got it for {glob!r}")
            overrides[glob] = _choices(inner, f"{origin}: modules {glob!r}")
        choices = _choices(rest, origin)
        default, attention = choices.pop("default", None), choices.pop("attn_implementation", None)
        if default not in (None, AUTO, EAGER):
            raise ConfigError(f"{origin}: default must be 'auto' or 'eager', got {default!r}")
        if isinstance(attention, Mapping):
            raise ConfigError(f"{origin}: attn_implementation must be one name, got {attention!r}")
        names = tuple(name for name in outside if isinstance(name, str))
        return cls(
            choices=choices,
            modules=overrides,
            default=default,
            attn_implementation=attention,
            strict=strict,
            probe=probe,
            origin=origin,
            outside=names,
        )

    def over(self, base: "OpsConfig | Mapping[str, Any] | str | Path | None") -> "OpsConfig":
        """This configuration laid over another: what this one chooses wins, `base` decides the rest."""
        below = OpsConfig.parse(base)
        return replace(self, base=below if self.base is None else self.base.over(below))

    def setting(self, name: str) -> tuple[Any, str]:
        """`default`, `attn_implementation`, `strict` or `probe` from the topmost layer that says it, and its origin."""
        value = getattr(self, name)
        return (value, self.origin) if value or self.base is None else self.base.setting(name)

    def rules(self, registry: Registry) -> tuple[Rule, ...]:
        """Every choice as a `Rule`; for one module and contract the last rule that matches decides.

        Raises `ConfigError` for an unknown field or two fields of one op, `UnknownOp` for an unknown variant,
        `UnknownKernel` for a name that no variant of the op has.
        """
        owners: dict[str, list[OpContract]] = {}
        for contract in registry.contracts():
            for name in (*contract.config_fields(), str(contract), *contract.aliases):
                owners.setdefault(name, []).append(contract)
        for name in self.outside:
            if name in owners or name.endswith("_implementation"):
                raise ConfigError(
                    f"{self.origin}: {name!r} stands outside `ops_implementation:` and would have no effect"
                )
        rules = list(self.base.rules(registry)) if self.base else []
        for glob, choices in ((None, self.choices), *self.modules.items()):
            layer: dict[Key, Rule] = {}
            for name, value in choices.items():
                for rule in self._rules_of(name, value, glob, owners, registry):
                    taken = layer.get(rule.key) if rule.key else None
                    if taken is not None:
                        raise ConfigError(
                            f"{self.origin}: {taken.field!r} and {name!r} both choose {'/'.join(taken.key or ())}; "
                            "leave one out"
                        )
                    if rule.key:
                        layer[rule.key] = rule
                    rules.append(rule)
        return tuple(rules)

    def to_dict(self) -> dict[str, Any]:
        """This configuration as a mapping that `parse` takes. Raises `ConfigError` when it was laid over another."""
        if self.base is not None:
            raise ConfigError(
                f"{self.origin} was laid over {self.base.origin}, which one mapping may not be able to say: write "
                "Binding.config(), or what `opslot resolve --freeze` prints"
            )
        tree: dict[str, Any] = {} if self.default is None else {"default": self.default}
        if self.attn_implementation is not None:
            tree["attn_implementation"] = self.attn_implementation
        tree |= {name: True for name in ("strict", "probe") if getattr(self, name)}
        tree |= {name: value if isinstance(value, str) else dict(value) for name, value in self.choices.items()}
        if self.modules:
            tree["modules"] = {glob: dict(choices) for glob, choices in self.modules.items()}
        return tree

    def _rules_of(
        self, name: str, value: Any, glob: str | None, owners: dict[str, list[OpContract]], registry: Registry
    ) -> Iterator[Rule]:
        where = f"{self.origin}: {f'modules {glob!r}: ' if glob else ''}{name}"
        if not isinstance(value, str | Mapping):
            raise ConfigError(f"{where} must be the name of a kernel, got {value!r}")
        contracts = owners.get(name)
        if contracts is None:
            yield self._absent(name, value, glob, where, owners, registry)
        elif isinstance(value, str):
            _check_name(registry, contracts, value, where)
            yield from (Rule(contract.key, value, name, self.origin, glob) for contract in contracts)
        elif "/" in name:
            raise ConfigError(f"{where} names one variant already, and must be the name of a kernel, got {value!r}")
        else:
            alias = name.removesuffix("_implementation")
            for variant, kernel in value.items():
                known = any(f"{alias}/{variant}" in contract.aliases for contract in contracts)
                contract = _variant(registry, alias if known else contracts[0].op, variant, f"{where}.{variant}")
                _check_name(registry, [contract], kernel, f"{where}.{variant}")
                yield Rule(contract.key, kernel, f"{name}.{variant}", self.origin, glob)

    def _absent(
        self, name: str, value: Any, glob: str | None, where: str, owners: dict[str, Any], registry: Registry
    ) -> Rule:
        """The rule of a field that no contract has: one that is known from elsewhere, or an error."""
        op = op_of_field(name)
        if op is None:
            valid = sorted({contract.config_fields()[0] for contract in registry.contracts()})
            known = f"{', '.join(valid)} (each also as <op>_implementation), {', '.join(_WORDS)}{registry.missing()}"
            close = nearest(name, [*owners, "ops_implementation", *_WORDS])
            raise ConfigError(f"{self.origin}: unknown field {name!r}{close}; known: {known}")
        named = {value} if isinstance(value, str) else set(value.values())
        named -= {AUTO, EAGER}
        for kernel in sorted(named, key=str):
            if distribution_of(op, kernel) is None:
                raise UnknownKernel(f"{where}: no kernel {kernel!r} for {op}, an op without a contract here")
        return Rule(None, " and ".join(sorted(named)) or EAGER, name, self.origin, glob)


def _flag(name: str, value: Any, origin: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{origin}: {name} must be true or false, got {value!r}")
    return value


def _choices(tree: Mapping[Any, Any], origin: str) -> dict[str, str | Mapping[str, str]]:
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
    return choices


def _check_name(registry: Registry, contracts: list[OpContract], kernel: str, where: str) -> None:
    """Raise unless one of the contracts knows the kernel, so that a typo is noticed whatever the model has.

    A kernel that an absent distribution would bring is no typo: it is refused once a model wants it.
    """
    if not isinstance(kernel, str):
        raise ConfigError(f"{where} must be the name of a kernel, got {kernel!r}")
    if kernel in (AUTO, EAGER):
        return
    unknown = []
    for contract in contracts:
        if kernel == contract.prefix.rstrip("_"):
            return
        try:
            registry.offer(*contract.key, kernel)
        except UnknownKernel as error:
            unknown.append(error)
        except BackendError as error:
            raise BackendError(f"{where}: {error}") from (error.__cause__ or error)
        else:
            return
    if any(distribution_of(contract.op, kernel.removeprefix(contract.prefix)) for contract in contracts):
        return
    if len(unknown) == 1:
        raise UnknownKernel(f"{where}: {unknown[0]}")
    # Which variants the model has is not known yet: what is said holds for all of them.
    offers = [offer for contract in contracts for offer in registry.offers(*contract.key)]
    names = sorted({offer.selector if ":" in kernel else offer.spec.name for offer in offers})
    raise UnknownKernel(
        f"{where}: no kernel {kernel!r} for any variant of {contracts[0].op}{nearest(kernel, names)}; known: "
        f"{', '.join((EAGER, AUTO, *names))}{registry.missing()}"
    )


def _variant(registry: Registry, op: str, variant: str, where: str) -> OpContract:
    try:
        return registry.contract(op, variant)
    except UnknownOp as error:
        raise UnknownOp(f"{where}: {error}") from None


def _name(where: str, value: Any, origin: str) -> str:
    if isinstance(value, str) and value:
        return value
    hint = "; write 'eager' or 'auto', or leave the line out" if value is None else _yaml_hint(value)
    raise ConfigError(f"{origin}: {where} must be the name of a kernel, got {value!r}{hint}")


def _yaml_hint(value: Any) -> str:
    return " (YAML reads yes, no, on and off as booleans); for no kernel write eager" if isinstance(value, bool) else ""
