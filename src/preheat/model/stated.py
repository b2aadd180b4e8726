"""The model that settings and a folder state together. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat.errors import ModelError
from preheat.model.families import spec_of
from preheat.model.families.heads import with_token_rows
from preheat.model.files import read_config
from preheat.model.specs import ModelSpec, without_head
from preheat.model.tensor_specs import HeadSpec
from preheat.pooling.classes import from_tokens
from preheat.pooling.pooling import pooling_of
from preheat.settings import Settings
from preheat.utils.files import TABLE_BYTES, read_file


def stated_spec(settings: Settings, folder: Path) -> ModelSpec:
    """Return the spec of the model in ``folder``; an engine that pools has no head."""
    config = read_config(folder, settings.hf_overrides)
    return pooled_spec(settings, folder, config, spec_of(config, settings))


def pooled_spec(settings: Settings, folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> ModelSpec:
    """Return ``spec``, or for an engine that pools ``spec`` without its head. ``config`` is the folder's."""
    pooling = pooling_of(settings, folder, config)
    if pooling is None:
        return spec
    classes = from_tokens(config)
    if classes is not None:
        ids = _ids_of(classes.tokens, Path(settings.tokenizer or folder))
        spec = with_token_rows(spec, ids, len(classes.labels))
    spec = without_head(spec, pooling.max_length, first=pooling.type == "CLS")
    dense = tuple(
        HeadSpec(f"{each.folder}/linear", each.outputs, each.inputs, each.activation, each.bias)
        for each in pooling.dense
    )
    return replace(spec, pooled_head=(*spec.pooled_head, *dense))


def _ids_of(tokens: tuple[str, ...], folder: Path) -> tuple[int, ...]:
    """Return the ids of ``tokens`` in the tokenizer of ``folder``. Raises ModelError for an unknown token."""
    from tokenizers import Tokenizer  # only if a config names tokens

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(read_file(path, most=TABLE_BYTES).decode())
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"classifier_from_token: {path} cannot be read: {error}") from error
    found = [id for token in tokens if (id := tokenizer.token_to_id(token)) is not None]
    if len(found) < len(tokens):
        raise ModelError(f"classifier_from_token: {', '.join(tokens)} are not all tokens of {path}")
    return tuple(found)
