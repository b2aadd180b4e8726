"""What an ``adapter_config.json`` says, by PEFT's rules. No torch here.

What would change the arithmetic and is not computed is refused by name. The patterns of a config are regular
expressions: an adapter is trusted as a checkpoint is.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from preheat.errors import AdapterError, ModelError
from preheat.model.files import read_json
from preheat.utils.adapters import ADAPTER_CONFIG as CONFIG

V = TypeVar("V")

_REFUSED = {
    "use_dora": "DoRA, which scales whole rows of the base model's weights",
    "alora_invocation_tokens": "an activated LoRA (aLoRA), which begins in the middle of a prompt",
    "lora_bias": "a LoRA with biases",
    "layer_replication": "more layers than the base model has",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA, whose matrices are blocks",
    "modules_to_save": "whole modules in place of the base model's",
    "trainable_token_indices": "rows of the embedding in place of the base model's",
    "arrow_config": "Arrow, which mixes adapters",
    "kasa_config": "KaSA, which changes the base model's weights",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "fan_in_fan_out": "a base model whose layers are stored transposed (Conv1D), as no model here is",
}
"""What is not computed, by the field that asks for it."""

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
"""Fields about training, or about what another field switches on."""

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""The beginnings of training that leave the base model's weights as they are."""

_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")

_UNSET: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks, scales and modules of an adapter. Modules have the names of the base model's code, as PEFT sees them."""

    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    ties: bool
    parameters: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """From the file in ``folder``. Raises AdapterError, naming the field."""
        if not (folder / CONFIG).is_file():
            raise AdapterError(f"the folder holds no {CONFIG}, so it is no adapter of PEFT")
        try:
            return cls.of(read_json(folder, CONFIG))
        except ModelError as error:
            raise AdapterError(error.message) from None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdapterConfig:
        """From the file's fields. Raises AdapterError, naming the field."""
        _check_supported(fields)
        rank, alpha = _rank("r", fields.get("r")), _number("lora_alpha", fields.get("lora_alpha"))
        targets = fields.get("target_modules")
        parameters = fields.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
            raise AdapterError(f"{CONFIG}: target_parameters must be a list of names, got {parameters!r}")
        if targets in _UNSET and not parameters:
            raise AdapterError(f"{CONFIG}: target_modules must say which modules are adapted")
        layers = fields.get("layers_to_transform")
        return cls(
            rank=rank,
            alpha=alpha,
            rslora=bool(fields.get("use_rslora")),
            ranks=tuple((key, _rank("rank_pattern", value)) for key, value in _patterns("rank_pattern", fields)),
            alphas=tuple((key, _number("alpha_pattern", value)) for key, value in _patterns("alpha_pattern", fields)),
            targets=_names("target_modules", targets or ()),
            excluded=_names("exclude_modules", fields.get("exclude_modules") or ()),
            layers=_layers([layers] if type(layers) is int else layers or []),
            layers_pattern=_listed(_names("layers_pattern", fields.get("layers_pattern") or ())),
            ties=bool(fields.get("ensure_weight_tying")),
            parameters=tuple(parameters),
        )

    def rank_of(self, module: str) -> int:
        """The rank of ``module``: that of the first pattern that matches, else the config's."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What multiplies the product of ``module``'s matrices: alpha over the rank, or over its square root."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def alpha_of(self, module: str) -> float:
        """That of the first pattern that matches, else the config's."""
        return _first(self.alphas, module, self.alpha)

    @property
    def all_linear(self) -> bool:
        """Whether it only says that all linear layers but the output head are adapted."""
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"

    def names(self, module: str) -> bool:
        """Whether ``module`` is one of those that the config says are adapted."""
        if _matches(self.excluded, module):
            return False
        if self.all_linear:
            return not module.endswith("lm_head")
        if isinstance(self.targets, str) or module in self.targets:
            return _matches(self.targets, module)
        return _matches(self.targets, module) and (not self.layers or self._layer(module) in self.layers)

    def names_parameter(self, parameter: str) -> bool:
        """The same of a stacked parameter: target_parameters are its name or the end of it."""
        return _matches(self.parameters, parameter)

    def _layer(self, module: str) -> int | None:
        """The first number in ``module``'s name, behind the list of layers if it has a name."""
        patterns = [rf"(?:^|.*?\.){name}" for name in self.layers_pattern] or [r".*?\.[^.]*"]
        found = (re.match(rf"{pattern}\.(\d+)\.", module) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)


def _check_supported(fields: Mapping[str, Any]) -> None:
    """Raise AdapterError for what is not computed, and for a field that nobody here knows."""
    if (kind := str(fields.get("peft_type", "LORA"))).upper() != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type is {kind}, but only adapters of type LORA are served")
    for name, value in fields.items():
        if value in _UNSET:
            continue
        if what := _REFUSED.get(name):
            raise AdapterError(f"{CONFIG}: {name} is set: {what}; that is not supported")
        if name not in _READ | _HARMLESS:
            raise AdapterError(
                f"{CONFIG}: {name} is set, and it is not known what it means; if it changes nothing about the answers, "
                "remove it"
            )
    if (bias := fields.get("bias", "none")) not in ("none", None):
        raise AdapterError(f"{CONFIG}: bias is {bias!r}: adapters with biases are not supported, only 'none' is")
    init = fields.get("init_lora_weights", True)
    init = init.lower() if isinstance(init, str) else init
    if isinstance(init, str) and init.startswith(_BASE_CHANGING):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {init!r}, which changes the base model's weights: the adapter does not "
            "fit the plain ones. Save it as a plain LoRA, with PEFT's path_initial_model_for_weight_conversion"
        )
    if init not in _PLAIN_INITS:
        raise AdapterError(f"{CONFIG}: init_lora_weights is {init!r}, which is not known here")


def _rank(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: {name} must be a rank, a whole number above 0, got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise AdapterError(f"{CONFIG}: {name} must be a finite number, got {value!r:.40}")
    return float(value)


def _layers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise AdapterError(f"{CONFIG}: layers_to_transform must be the numbers of layers, got {value!r}")
    return tuple(value)


def _names(name: str, value: object) -> tuple[str, ...] | str:
    """A list of names, or one regular expression."""
    if isinstance(value, str):
        _compiled(name, value)
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{CONFIG}: {name} must be a list of names or a regular expression, got {value!r}")
    return tuple(value)


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    """As a list, each of whose items is a regular expression."""
    names = (names,) if isinstance(names, str) else names
    for name in names:
        _compiled("layers_pattern", name)
    return names


def _patterns(name: str, fields: Mapping[str, Any]) -> list[tuple[re.Pattern[str], object]]:
    """The regular expressions of a field, each of which may begin after any dot of a module's name, with its value."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise AdapterError(f"{CONFIG}: {name} must be an object, got {value!r}")
    return [(_compiled(name, rf"(.*\.)?({key})$"), own) for key, own in value.items()]


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{CONFIG}: {name} holds {pattern!r}, which is no regular expression: {error}") from None


def _first(patterns: tuple[tuple[re.Pattern[str], V], ...], module: str, default: V) -> V:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    """Whether the regular expression is ``module``, or one of the names is its end."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
