"""How a prompt's hidden states become its embedding.

The checkpoint decides, in the files of sentence-transformers, and so do the options ``--runner``, ``--convert``,
``--task`` and ``--pooler-config``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from preheat.errors import ModelError, SettingsError
from preheat.pooling.classes import ClassActivation, activation_of, labels_of
from preheat.pooling.encoders import CLASSIFIER, COLBERTS, TOKENS, encoder_name
from preheat.pooling.pair_template import QWEN3_RERANKER, PairTemplate
from preheat.pooling.sentence_modules import MODULES, POOLING_TYPES, Dense, PoolingType, prompts_in, stated_by

_KEYS = (
    "pooling_type", "seq_pooling_type", "tok_pooling_type", "normalize", "use_activation",
    "enable_chunked_processing", "max_embed_len",
)  # fmt: skip
_HEADED, _HEADLESS = (
    ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel"),
    ("Model", "ForTextEncoding", "ForMaskedLM", CLASSIFIER),
)
"""The ends of architectures' names with an output head, and without one (source: vLLM's defaults)."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states are pooled.

    ``type`` LAST takes the state of the last token, CLS of the first one, MEAN the mean over all, WEIGHTEDMEAN the mean
    with weights 1, 2, 3, ..., MEAN_SQRT_LEN the sum over the root of the number of tokens, and MAX the greatest number
    in each place. With ALL every token has a vector of its own. ``dense`` are layers behind it; ``normalize`` scales
    each vector to length 1.
    ``matryoshka``: the beginning of an embedding is an embedding too; ``dimensions`` are its allowed lengths, empty:
    any. ``max_length``: the most tokens of a text, if less than the model's limit. ``max_embed_len``: the most tokens
    of a text that is read in chunks (:mod:`preheat.frontend.long_texts`); None: texts have no chunks. ``prompts``: the
    prefixes of texts, by kind ("query", "document"); a request may name a kind.
    ``classes`` are the names of a classifier's classes: ``normalize`` then says whether their numbers go through
    ``activation``. ``types`` is the number of types that the tokens of a pair of texts can have, ``template`` is the
    text around a pair.
    """

    type: PoolingType = "LAST"
    normalize: bool = True
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    max_length: int | None = None
    max_embed_len: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    classes: tuple[str, ...] = ()
    activation: ClassActivation = "none"
    types: int = 1
    dense: tuple[Dense, ...] = ()
    template: PairTemplate | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a vector."""
        return self.type == "ALL"

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
    pools = bool(given) or headless or os.path.lexists(folder / MODULES)
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
    usual = _usual(config.get("architectures") or ())
    stated = stated_by(folder, usual)
    own = Pooling(
        stated.type,
        stated.normalize,
        matryoshka=bool(dimensions or config.get("is_matryoshka")),
        dimensions=tuple(sorted(dimensions)),
        max_length=stated.max_length,
        prompts=prompts_in(folder),
        dense=stated.dense,
    )
    if usual == "ALL" and given.get("type", usual) != usual:
        raise SettingsError("pooler_config: a ColBERT has a vector for each token: leave pooling_type out",
                            param="pooler_config")  # fmt: skip
    found = replace(own, **given)
    if found.of_tokens:
        _check_whole(given, "each token has a vector")
    return found


def _usual(architectures: Sequence[object]) -> PoolingType:
    """Return the pooling of architectures without files that name one."""
    names = [name for each in architectures if (name := encoder_name(each)) is not None]
    if any(name.head == TOKENS for name in names):
        return "ALL"
    return "CLS" if names else "LAST"


def _classifies(architecture: object) -> bool:
    """Return whether an architecture has a head for classes."""
    return str(architecture).endswith(CLASSIFIER)


def _classifier(config: Mapping[str, Any], given: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a classifier: the state of an encoder's first or a decoder's last token, or a mean."""
    families = [name.family for name in map(encoder_name, config["architectures"]) if name is not None]
    own: PoolingType = "CLS" if families else "LAST"
    if "ModernBert" in families and (stated := config.get("classifier_pooling", "cls")) != "cls":
        if stated != "mean":
            raise ModelError(f"config.json: classifier_pooling {stated!r} is not supported, only cls and mean are")
        own = "MEAN"
    if given.get("type", own) != own:
        reads = {"CLS": "the first token", "LAST": "the last token", "MEAN": "the mean of all tokens"}[own]
        raise SettingsError(
            f"pooler_config: pooling_type {given['type']} is not supported, as a head for classes reads {reads}: "
            "leave it out",
            param="pooler_config",
        )
    _check_whole(given, "a head for classes reads a text as a whole")
    types = 1 if own == "LAST" else config.get("type_vocab_size", 2 if "Bert" in families else 1)
    template = QWEN3_RERANKER if config.get("is_original_qwen3_reranker") else None
    return Pooling(
        own, given.get("normalize", True), classes=labels_of(config), activation=activation_of(config), types=types,
        template=template,
    )  # fmt: skip


def _check_whole(given: Mapping[str, Any], why: str) -> None:
    """Raise SettingsError if texts are to be read in chunks, though they cannot be."""
    if given.get("max_embed_len") is not None:
        raise SettingsError(
            f"pooler_config: enable_chunked_processing combines the vectors of chunks, but {why}: leave it out",
            param="pooler_config",
        )


def _is_headless(architecture: object) -> bool:
    """Return whether an architecture has no output head, by the end of its name."""
    name = str(architecture)
    return name in COLBERTS or (name.endswith(_HEADLESS) and not name.endswith(_HEADED))


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
    for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
        if name in stated:
            found["type"] = str(stated[name]).upper()
    if found.get("type", "LAST") not in POOLING_TYPES:
        raise SettingsError(
            f"pooler_config: pooling_type {found['type']} is not supported; supported are {', '.join(POOLING_TYPES)}",
            param="pooler_config",
        )
    for name in ("normalize", "use_activation"):
        if name in stated:
            if not isinstance(stated[name], bool):
                raise SettingsError(f"pooler_config: {name} must be true or false", param="pooler_config")
            found["normalize"] = stated[name]
    if (most := _max_embed_len(stated)) is not None:
        found["max_embed_len"] = most
    return found


def _max_embed_len(stated: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a text that is read in chunks, None without chunks."""
    chunked, most = stated.get("enable_chunked_processing"), stated.get("max_embed_len")
    if not isinstance(chunked, bool | None):
        raise SettingsError("pooler_config: enable_chunked_processing must be true or false", param="pooler_config")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise SettingsError(
            f"pooler_config: max_embed_len is {most!r}, but must be a whole number, at least 1", param="pooler_config"
        )
    if chunked and most is None:
        raise SettingsError(
            "pooler_config: enable_chunked_processing needs max_embed_len, the most tokens of a text: add it",
            param="pooler_config",
        )
    if most is not None and not chunked:
        raise SettingsError(
            "pooler_config: max_embed_len is for texts in chunks: add enable_chunked_processing, or bound texts by "
            "--max-model-len",
            param="pooler_config",
        )
    return most
