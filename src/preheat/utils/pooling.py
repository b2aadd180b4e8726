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
from typing import Any, Literal, cast

from preheat.errors import ModelError, SettingsError
from preheat.utils.files import read_text, shown, why_unread

PoolingType = Literal["LAST", "MEAN"]

READING = "sentence_bert_config.json"
"""The file of sentence-transformers about reading texts."""

PROMPTS = "config_sentence_transformers.json"
"""The file of sentence-transformers with the prefixes of texts."""

_KEYS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation")
_MODES = {"pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN", "lasttoken": "LAST", "mean": "MEAN"}
_HEADED, _HEADLESS = (
    ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel"),
    ("Model", "ForTextEncoding"),
)
"""The ends of architectures' names with an output head, and without one (source: vLLM's defaults)."""

_MODULES = "Transformer", "Pooling", "Normalize"
"""The modules of sentence-transformers that are served."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states are pooled.

    ``type`` LAST takes the state of the last token, MEAN the mean over all; ``normalize`` scales it to length 1.
    ``matryoshka``: the beginning of an embedding is an embedding too; ``dimensions`` are its allowed lengths, empty:
    any. ``max_length``: the most tokens of a text, if less than the model's limit. ``prompts``: the prefixes of texts,
    by kind ("query", "document"); a request may name a kind.
    """

    type: PoolingType = "LAST"
    normalize: bool = True
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)


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
    dimensions = config.get("matryoshka_dimensions") or ()
    own = replace(
        _of_checkpoint(folder),
        matryoshka=bool(dimensions or config.get("is_matryoshka")),
        dimensions=tuple(sorted(dimensions)),
        prompts=_prompts(folder / PROMPTS),
    )
    return replace(own, **given)


def _is_headless(architecture: object) -> bool:
    """Return whether an architecture has no output head, by the end of its name."""
    return str(architecture).endswith(_HEADLESS) and not str(architecture).endswith(_HEADED)


def _runner(settings: Any, given: Mapping[str, object], headless: bool) -> str:
    """Return "auto", "generate" or "pooling", by all options together.

    A ``headless`` model pools as it is; any other model must be converted.
    """
    said = {
        "runner": settings.runner,
        "convert": {"none": "auto" if headless else "generate", "embed": "pooling"}.get(settings.convert, "auto"),
        "task": {"generate": "generate", "embed": "pooling"}.get(settings.task or "auto", "auto"),
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
    if found.get("type", "LAST") not in ("LAST", "MEAN"):
        raise SettingsError(
            f"pooler_config: pooling_type {found['type']} is not supported; supported are LAST and MEAN",
            param="pooler_config",
        )
    for name in ("normalize", "use_activation"):
        if name in stated:
            if not isinstance(stated[name], bool):
                raise SettingsError(f"pooler_config: {name} must be true or false", param="pooler_config")
            found["normalize"] = stated[name]
    return found


def _of_checkpoint(folder: Path) -> Pooling:
    """Return the pooling of modules.json and of its Pooling module; without them the last token's, normalized."""
    if not os.path.lexists(folder / "modules.json"):
        return Pooling()
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
        raise ModelError(f"{path} asks for {' and '.join(modes) or 'no pooling'}; supported are lasttoken and mean")
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
