"""The files of sentence-transformers beside a model: its modules, its reading of texts, and its prompts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from preheat.errors import ModelError
from preheat.utils.files import read_text, shown, why_unread

PoolingType = Literal["LAST", "MEAN", "CLS", "MAX", "WEIGHTEDMEAN", "MEAN_SQRT_LEN", "ALL"]
POOLING_TYPES = get_args(PoolingType)

MODULES = "modules.json"
READING = "sentence_bert_config.json"
"""The file about reading texts."""

PROMPTS = "config_sentence_transformers.json"
"""The file with the prefixes of texts."""

_MODES = {
    "lasttoken": "LAST", "mean_tokens": "MEAN", "cls_token": "CLS", "max_tokens": "MAX",
    "weightedmean_tokens": "WEIGHTEDMEAN", "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
}  # fmt: skip
_NAMES = {name.removesuffix("_tokens").removesuffix("_token"): kind for name, kind in _MODES.items()}
"""Kinds of pooling by their short names, beside the flags ``pooling_mode_...``."""

_SERVED = "Transformer", "Pooling", "Dense", "Normalize"
"""The modules that are served, in their order; several Dense may follow each other."""

DenseActivation = Literal["tanh", "relu", "gelu"]
_ACTIVATIONS: dict[str, DenseActivation | None] = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}


class Dense(NamedTuple):
    """A layer behind pooled states, whose tensors lie in ``folder``."""

    folder: str
    inputs: int
    outputs: int
    activation: DenseActivation | None
    bias: bool


@dataclass(frozen=True)
class Stated:
    """The pooling that the files state; ``max_length`` is the most tokens of a text."""

    type: PoolingType
    normalize: bool = True
    max_length: int | None = None
    dense: tuple[Dense, ...] = ()


def stated_by(folder: Path, usual: PoolingType) -> Stated:
    """Return the pooling of the modules in ``folder``; without them ``usual``, normalized. Raises ModelError."""
    path = folder / MODULES
    if not os.path.lexists(path):
        return Stated(usual)
    modules = _modules(path)
    kinds = [kind.rpartition(".")[2] for kind, _ in modules]
    if unknown := [kind for kind in kinds if kind not in _SERVED]:
        raise ModelError(f"{path}: module {unknown[0]} is not supported; supported are {', '.join(_SERVED)}")
    if kinds != sorted(kinds, key=_SERVED.index):
        raise ModelError(f"{path}: modules {', '.join(kinds)} are in another order than {', '.join(_SERVED)}")
    late = any(kind.startswith("pylate.") for kind, _ in modules)
    places = dict(zip(kinds, (place for _, place in modules), strict=True))
    if "Pooling" not in places and not late:
        raise ModelError(f"{path} has no Pooling module: name the pooling with --pooler-config")
    kept = "ALL" if late else _pooling_in(folder / places["Pooling"] / "config.json")
    dense = tuple(_dense(folder, place) for (_, place), kind in zip(modules, kinds, strict=True) if kind == "Dense")
    reading = read_object(folder / READING) if os.path.lexists(folder / READING) else {}
    if reading.get("do_lower_case"):
        raise ModelError(f"{folder / READING}: do_lower_case is not served")
    return Stated(kept, late or "Normalize" in kinds, reading.get("max_seq_length"), dense)


def _pooling_in(path: Path) -> PoolingType:
    """Return the pooling that the config of a Pooling module names."""
    config = read_object(path)
    stated = config.get("pooling_mode")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [stated] if isinstance(stated, str) else [name.removeprefix("pooling_mode_") for name in flags]
    known = _NAMES | _MODES
    if len(modes) != 1 or modes[0] not in known:
        raise ModelError(f"{path} asks for {' and '.join(modes) or 'no pooling'}; supported are {', '.join(_NAMES)}")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not served, as the prompt is part of the text here")
    return cast(PoolingType, known[modes[0]])


def _dense(folder: Path, place: str) -> Dense:
    """Return the layer that the config of a Dense module states."""
    path = folder / place / "config.json"
    config = read_object(path)
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{path}: in_features and out_features must be numbers above 0, got {sizes}")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {name} is not supported, only {', '.join(_ACTIVATIONS)} are")
    inputs, outputs = cast(list[int], sizes)
    return Dense(place, inputs, outputs, _ACTIVATIONS[name], config.get("bias", True) is not False)


def prompts_in(folder: Path) -> dict[str, str]:
    """Return the prefixes of texts in ``folder``, by kind."""
    path = folder / PROMPTS
    prompts = read_object(path).get("prompts") if os.path.lexists(path) else None
    if not isinstance(prompts, dict | None) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise ModelError(f"{path}: prompts must be an object of texts by name")
    return prompts or {}


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    try:
        found = [(str(item["type"]), str(item["path"])) for item in _read(path)]
    except (KeyError, TypeError):
        raise ModelError(f"{path} must be a list of objects with type and path") from None
    for _, place in found:
        if "\0" in place or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelError(f"{path}: {shown(place)!r} is not the name of a folder beside it")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ModelError."""
    found = _read(path)
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold an object")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {why_unread(error)}") from error
