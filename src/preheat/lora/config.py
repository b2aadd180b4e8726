"""An ``adapter_config.json``, read by PEFT's rules. No torch here.

Fields that would change the arithmetic and are not computed are refused by name. The patterns of a config are regular
expressions; they are matched all at once and in limited time.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.configs.adapters import ADAPTER_CONFIG as CONFIG
from preheat.errors import AdapterError, ModelError
from preheat.utils.expressions import BadExpression, Expressions, Found, first_matches
from preheat.utils.files import read_json
from preheat.utils.text import brief

CONFIG_BYTES = 4 << 20
"""Most bytes that are read of an adapter's config: some ten thousand names of modules."""

_REFUSED = {
    "use_dora": "DoRA (it scales whole rows of the base model's weights)",
    "alora_invocation_tokens": "an activated LoRA (aLoRA; it begins in the middle of a prompt)",
    "lora_bias": "a LoRA with biases",
    "layer_replication": "more layers than the base model has",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA (its matrices are blocks)",
    "modules_to_save": "whole modules in place of the base model's",
    "trainable_token_indices": "rows of the embedding in place of the base model's",
    "arrow_config": "Arrow (it mixes adapters)",
    "kasa_config": "KaSA (it changes the base model's weights)",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "fan_in_fan_out": "a base model with transposed layers (Conv1D), unlike all models here",
}
"""The features that are not computed, by the field that asks for them."""

_READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "peft_type", "ensure_weight_tying",
    "target_parameters",
}  # fmt: skip
_HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
}  # fmt: skip
"""Fields about training, or about a feature that another field switches on."""

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initial values of training that leave the base model's weights as they are."""

_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")

_UNSET: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks, scales and modules of an adapter. Modules have the names of the base model's code, as PEFT sees them."""

    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[tuple[str, int], ...]
    alphas: tuple[tuple[str, float], ...]
    targets: frozenset[str] | str
    excluded: frozenset[str] | str
    layers: frozenset[int]
    layers_pattern: tuple[str, ...]
    ties: bool
    parameters: frozenset[str]

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read the config from the file in ``folder``. Raises AdapterError, naming the field."""
        if not os.path.lexists(folder / CONFIG):
            raise AdapterError(f"the folder holds no {CONFIG}, so it is not an adapter of PEFT")
        try:
            return cls.of(read_json(folder / CONFIG, most=CONFIG_BYTES))
        except ModelError as error:
            raise AdapterError(error.message) from None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdapterConfig:
        """Read the config from the file's fields. Raises AdapterError, naming the field."""
        _check_supported(fields)
        rank, alpha = _rank("r", fields.get("r")), _number("lora_alpha", fields.get("lora_alpha"))
        targets = fields.get("target_modules")
        parameters = fields.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
            raise AdapterError(f"{CONFIG}: target_parameters must be a list of names, got {brief(parameters)}")
        if targets in _UNSET and not parameters:
            raise AdapterError(f"{CONFIG}: target_modules must name the adapted modules")
        layers = fields.get("layers_to_transform")
        return cls(
            rank=rank,
            alpha=alpha,
            rslora=bool(fields.get("use_rslora")),
            ranks=tuple((key, _rank("rank_pattern", value)) for key, value in _items("rank_pattern", fields)),
            alphas=tuple((key, _number("alpha_pattern", value)) for key, value in _items("alpha_pattern", fields)),
            targets=_names("target_modules", targets or ()),
            excluded=_names("exclude_modules", fields.get("exclude_modules") or ()),
            layers=_layers([layers] if type(layers) is int else layers or []),
            layers_pattern=_listed(fields.get("layers_pattern") or ()),
            ties=bool(fields.get("ensure_weight_tying")),
            parameters=frozenset(parameters),
        )

    def about(self, names: Iterable[str]) -> ModuleRules:
        """Return the config's rules for the modules and parameters ``names``.

        Raises AdapterError if a regular expression is invalid or takes too long.
        """
        layers = [rf"(?:^|.*?\.){name}" for name in self.layers_pattern] or [r".*?\.[^.]*"]
        asked = (
            Expressions("rank_pattern", [_ending(key) for key, _ in self.ranks]),
            Expressions("alpha_pattern", [_ending(key) for key, _ in self.alphas]),
            _expression("target_modules", "" if self.all_linear else self.targets),
            _expression("exclude_modules", self.excluded),
            Expressions("layers_pattern", [rf"{each}\.(\d+)\." for each in layers] if self.layers else ()),
        )
        try:
            return ModuleRules(self, *first_matches(asked, sorted({*names})))
        except BadExpression as error:
            raise AdapterError(f"{CONFIG}: {error}") from None

    def lists_parameter(self, name: str) -> bool:
        """Return whether ``target_parameters`` lists the parameter ``name``, by its name or the end of it."""
        return _lists(self.parameters, name)

    @property
    def all_linear(self) -> bool:
        """Whether the config only says that all linear layers but the output head are adapted."""
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"


@dataclass(frozen=True)
class ModuleRules:
    """The rules of ``config`` for modules, with the matches of its expressions in their names."""

    config: AdapterConfig
    ranks: Found
    alphas: Found
    targets: Found
    excluded: Found
    layers: Found

    def rank_of(self, module: str) -> int:
        """Return the rank of ``module``: the rank of the first pattern that matches, else the config's."""
        found = self.ranks.get(module)
        return self.config.rank if found is None else self.config.ranks[found.number][1]

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of ``module``'s matrices: alpha / rank, or alpha / sqrt(rank)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.config.rslora else rank)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of the first pattern that matches ``module``, else the config's."""
        found = self.alphas.get(module)
        return self.config.alpha if found is None else self.config.alphas[found.number][1]

    def names(self, module: str) -> bool:
        """Return whether the config says that ``module`` is adapted."""
        config = self.config
        if module in self.excluded or _lists(config.excluded, module):
            return False
        if config.all_linear:
            return not module.endswith("lm_head")
        if isinstance(config.targets, str) or module in config.targets:
            return module in self.targets or _lists(config.targets, module)
        return _lists(config.targets, module) and (not config.layers or self._layer(module) in config.layers)

    def _layer(self, module: str) -> int | None:
        """Return the number of ``module``'s layer, if there is one.

        It is the first number in the name, or the number behind the name of the list of layers.
        """
        found = self.layers.get(module)
        if found is None:
            return None
        try:
            return int(found.group or "")
        except ValueError:
            raise AdapterError(
                f"{CONFIG}: layers_pattern matches {found.group!r}, and that is not the number of a layer"
            ) from None


def _check_supported(fields: Mapping[str, Any]) -> None:
    """Raise AdapterError for a field that is not computed, and for an unknown field."""
    if (kind := str(fields.get("peft_type", "LORA"))).upper() != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type is {brief(kind)}, but only adapters of type LORA are served")
    for name, value in fields.items():
        if value in _UNSET:
            continue
        if what := _REFUSED.get(name):
            raise AdapterError(f"{CONFIG}: {name} is set: {what}; that is not supported")
        if name not in _READ | _HARMLESS:
            raise AdapterError(
                f"{CONFIG}: {brief(name)} is set, and preheat does not know it; remove it if it changes nothing about "
                "the answers"
            )
    if (bias := fields.get("bias", "none")) not in ("none", None):
        raise AdapterError(f"{CONFIG}: bias is {brief(bias)}: adapters with biases are not supported, only 'none' is")
    init = fields.get("init_lora_weights", True)
    init = init.lower() if isinstance(init, str) else init
    if isinstance(init, str) and init.startswith(_BASE_CHANGING):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {brief(init)}, and such training changes the base model's weights: the "
            "adapter does not fit the original ones. Save it as a plain LoRA, with PEFT's "
            "path_initial_model_for_weight_conversion."
        )
    if init not in _PLAIN_INITS:
        raise AdapterError(f"{CONFIG}: init_lora_weights is {brief(init)}, an unknown value")


def _rank(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: {name} must be a rank, a whole number above 0, got {brief(value)}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise AdapterError(f"{CONFIG}: {name} must be a finite number, got {brief(value)}")
    return float(value)


def _layers(value: object) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise AdapterError(f"{CONFIG}: layers_to_transform must be the numbers of layers, got {brief(value)}")
    return frozenset(value)


def _names(name: str, value: object) -> frozenset[str] | str:
    """Return a set of names, or one regular expression."""
    return value if isinstance(value, str) else frozenset(_list(name, value))


def _listed(value: object) -> tuple[str, ...]:
    """Return the expressions of layers_pattern; the field may hold one or a list."""
    return (value,) if isinstance(value, str) else _list("layers_pattern", value)


def _list(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{CONFIG}: {name} must be a list of names or a regular expression, got {brief(value)}")
    return tuple(value)


def _items(name: str, fields: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    """Return the regular expressions of a field, and their values."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise AdapterError(f"{CONFIG}: {name} must be an object, got {brief(value)}")
    return value.items()


def _ending(key: str) -> str:
    """Return the expression for names that match ``key``, or end with a match behind a dot."""
    return rf"(.*\.)?({key})$"


def _expression(field: str, value: frozenset[str] | str) -> Expressions:
    return Expressions(field, [value] if isinstance(value, str) and value else (), whole=True)


def endings(name: str) -> Iterator[str]:
    """Yield ``name``, and the rest behind each of its dots."""
    yield name
    yield from (name[place + 1 :] for place, letter in enumerate(name) if letter == ".")


def _lists(names: frozenset[str] | str, module: str) -> bool:
    """Return whether ``names`` list ``module``, or its end behind a dot; an expression lists nothing."""
    return not isinstance(names, str) and not names.isdisjoint(endings(module))
