"""How a prompt's hidden states become its embedding.

The checkpoint decides, in the files of sentence-transformers, and so do the options ``--runner``, ``--convert``,
``--task`` and ``--pooler-config``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from preheat.errors import ModelError, SettingsError
from preheat.utils.classes import ClassActivation, activation_of, labels_of
from preheat.utils.encoders import CLASSIFIER, encoder_name
from preheat.utils.files import read_text, shown, why_unread

PoolingType = Literal["LAST", "MEAN", "CLS"]

READING = "sentence_bert_config.json"
"""The file of sentence-transformers about reading texts."""

PROMPTS = "config_sentence_transformers.json"
"""The file of sentence-transformers with the prefixes of texts."""

_KEYS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation")
_MODES = {
    "pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_cls_token": "CLS",
    "lasttoken": "LAST", "mean": "MEAN", "cls": "CLS",
}  # fmt: skip
_HEADED, _HEADLESS = (
    ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel"),
    ("Model", "ForTextEncoding", "ForMaskedLM", CLASSIFIER),
)
"""The ends of architectures' names with an output head, and without one (source: vLLM's defaults)."""

_MODULES = "Transformer", "Pooling", "Normalize"
"""The modules of sentence-transformers that are served."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states are pooled.

    ``type`` LAST takes the state of the last token, CLS of the first one, MEAN the mean over all; ``normalize`` scales
    it to length 1.
    ``matryoshka``: the beginning of an embedding is an embedding too; ``dimensions`` are its allowed lengths, empty:
    any. ``max_length``: the most tokens of a text, if less than the model's limit. ``prompts``: the prefixes of texts,
    by kind ("query", "document"); a request may name a kind.
    ``classes`` are the names of a classifier's classes: ``normalize`` then says whether their numbers go through
    ``activation``. ``types`` is the number of types that the tokens of a pair of texts can have.
    """

    type: PoolingType = "LAST"
    normalize: bool = True
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    classes: tuple[str, ...] = ()
    activation: ClassActivation = "none"
    types: int = 1

    @property
    def scores_pairs(self) -> bool:
        """Whether a pair of texts has a score of its own: a classifier has one class."""
        return len(self.classes) == 1


def pooling_of(settings: Any, folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """Return how the engine of ``settings`` pools; None: it generates.

    ``folder`` holds the checkpoint, ``config`` is its config.json. Raises SettingsError for options that contradict
    each other, ModelError for modules that are not served.
    """
    given = _given(settings)
    headless = any(map(_is_headless, config.get("architectures") or ()))
    asked = _runner(settings, given, headless)
    if asked == "generate" and headless:
        raise ModelError("the model has no output head, so it generates nothing: write --runner pooling")
    pools = bool(given) or headless or os.path.lexists(folder / "modules.json")
    if asked == "generate" or (asked == "auto" and not pools):
        return None
    if any(map(_classifies, config.get("architectures") or ())):
        return _classifier(config, given)
    if "classify" in (settings.convert, settings.task):
        raise SettingsError(
            f"the model has no head for classes, as a name that ends with {CLASSIFIER} says: leave classify out",
            param="convert" if settings.convert == "classify" else "task",
        )
    dimensions = config.get("matryoshka_dimensions") or ()
    own = replace(
        _of_checkpoint(folder, "CLS" if any(map(encoder_name, config.get("architectures") or ())) else "LAST"),
        matryoshka=bool(dimensions or config.get("is_matryoshka")),
        dimensions=tuple(sorted(dimensions)),
        prompts=_prompts(folder / PROMPTS),
    )
    return replace(own, **given)


def _classifies(architecture: object) -> bool:
    """Return whether an architecture is an encoder with a head for classes."""
    name = encoder_name(architecture)
    return name is not None and name.head == CLASSIFIER


def _classifier(config: Mapping[str, Any], given: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a classifier: the first token's state, through the head."""
    if given.get("type", "CLS") != "CLS":
        raise SettingsError(
            f"pooler_config: pooling_type {given['type']} is not supported, as a head for classes reads the first "
            "token: leave it out",
            param="pooler_config",
        )
    types = config.get("type_vocab_size", 2 if "Bert" in map(_family_of, config["architectures"]) else 1)
    return Pooling(
        "CLS", given.get("normalize", True), classes=labels_of(config), activation=activation_of(config), types=types
    )


def _family_of(architecture: object) -> str:
    name = encoder_name(architecture)
    return "" if name is None else name.family


def _is_headless(architecture: object) -> bool:
    """Return whether an architecture has no output head, by the end of its name."""
    return str(architecture).endswith(_HEADLESS) and not str(architecture).endswith(_HEADED)


def _runner(settings: Any, given: Mapping[str, object], headless: bool) -> str:
    """Return "auto", "generate" or "pooling", by all options together.

    A ``headless`` model pools as it is; any other model must be converted.
    """
    said = {
        "runner": settings.runner,
        "convert": {"none": "auto" if headless else "generate", "auto": "auto"}.get(settings.convert, "pooling"),
        "task": {"generate": "generate", "auto": "auto"}.get(settings.task or "auto", "pooling"),
    }
    asked = {name: runner for name, runner in said.items() if runner != "auto"}
    if len(set(asked.values())) > 1:
        first, second = list(asked)[:2]
        raise SettingsError(
            f"{first} {getattr(settings, first)} and {second} {getattr(settings, second)} contradict each other: an "
            "engine either generates or pools",
            param=first,
        )
    runner = next(iter(asked.values()), "auto")
    if given and runner == "generate":
        raise SettingsError(
            "pooler_config is for an engine that pools: drop it, or write --runner pooling", param="runner"
        )
    return runner


def _given(settings: Any) -> dict[str, Any]:
    """Return the fields of :class:`Pooling` that ``--pooler-config`` sets."""
    if settings.pooler_config and settings.override_pooler_config:
        raise SettingsError("override_pooler_config is an older name of pooler_config: give one", param="pooler_config")
    stated = settings.pooler_config or settings.override_pooler_config or {}
    if unknown := sorted(stated.keys() - set(_KEYS)):
        raise SettingsError(f"pooler_config: {unknown[0]!r} is not one of {', '.join(_KEYS)}", param="pooler_config")
    found: dict[str, Any] = {}
    for name in ("pooling_type", "seq_pooling_type"):
        if name in stated:
            found["type"] = str(stated[name]).upper()
    if found.get("type", "LAST") not in get_args(PoolingType):
        raise SettingsError(
            f"pooler_config: pooling_type {found['type']} is not supported; supported are LAST, MEAN and CLS",
            param="pooler_config",
        )
    for name in ("normalize", "use_activation"):
        if name in stated:
            if not isinstance(stated[name], bool):
                raise SettingsError(f"pooler_config: {name} must be true or false", param="pooler_config")
            found["normalize"] = stated[name]
    return found


def _of_checkpoint(folder: Path, usual: PoolingType) -> Pooling:
    """Return the pooling of modules.json and of its Pooling module; without them ``usual``, normalized."""
    if not os.path.lexists(folder / "modules.json"):
        return Pooling(usual)
    modules = _modules(folder / "modules.json")
    if unknown := [kind for kind, _ in modules if kind not in _MODULES]:
        raise ModelError(
            f"{folder / 'modules.json'}: module {unknown[0]} is not supported; supported are {', '.join(_MODULES)}"
        )
    kinds = dict(modules)
    if "Pooling" not in kinds:
        raise ModelError(f"{folder / 'modules.json'} has no Pooling module: name the pooling with --pooler-config")
    path = folder / kinds["Pooling"] / "config.json"
    config = _read(path)
    stated = config.get("pooling_mode")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [stated] if isinstance(stated, str) else flags
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path} asks for {' and '.join(modes) or 'no pooling'}; supported are lasttoken, mean and cls"
        )
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not served, as the prompt is part of the text here")
    reading = _read(folder / READING) if os.path.lexists(folder / READING) else {}
    if reading.get("do_lower_case"):
        raise ModelError(f"{folder / READING}: do_lower_case is not served")
    normalize, length = "Normalize" in kinds, reading.get("max_seq_length")
    return Pooling(cast(PoolingType, _MODES[modes[0]]), normalize, max_length=length)


def _prompts(path: Path) -> dict[str, str]:
    """Return the prefixes of texts, by kind, from a file of sentence-transformers."""
    prompts = _read(path).get("prompts") if os.path.lexists(path) else None
    if not isinstance(prompts, dict | None) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise ModelError(f"{path}: prompts must be an object of texts by name")
    return prompts or {}


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    try:
        found = [(str(item["type"]).rpartition(".")[2], str(item["path"])) for item in _read(path)]
    except (KeyError, TypeError):
        raise ModelError(f"{path} must be a list of objects with type and path") from None
    for _, place in found:
        if "\0" in place or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelError(f"{path}: {shown(place)!r} is not the name of a folder beside it")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {why_unread(error)}") from error
