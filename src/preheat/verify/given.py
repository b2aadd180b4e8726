"""Prompts that a user gives to a command, encoded and checked before an engine boots.

A boot takes many seconds, so the command refuses first what no engine of its settings could run. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from preheat.errors import SettingsError
from preheat.frontend.tokenizer import Tokenizer
from preheat.model.families import read_spec
from preheat.model.files import find_model, find_tokenizer, read_config
from preheat.pooling.pooling import pooling_of
from preheat.settings import Settings


def encoded(settings: Settings, given: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of prompts. Raises SettingsError for a text without a tokenizer."""
    check_texts(settings, given)
    tokenizer = Tokenizer(find_tokenizer(settings)) if any(isinstance(each, str) for each in given) else None
    return [tokenizer.encode(each, True) if tokenizer and isinstance(each, str) else [*each] for each in given]


def check_texts(settings: Settings, given: Sequence[str | list[int]]) -> None:
    """Raise SettingsError for a text if the settings have no tokenizer."""
    number = next((number for number, each in enumerate(given, 1) if isinstance(each, str)), None)
    if number is not None and settings.skip_tokenizer_init:
        raise SettingsError(
            f'prompt {number} is a text, and --skip-tokenizer-init has no tokenizer: write {{"prompt": [token ids]}}, '
            "or leave the flag out",
            param="skip_tokenizer_init",
        )


def check_ids(settings: Settings, given: Sequence[str | list[int]] | Sequence[list[int]], outputs: int) -> None:
    """Raise SettingsError for token ids that the model of ``settings`` lacks, and for prompts that do not fit.

    ``outputs`` tokens follow each prompt, none if the engine pools. Texts are skipped.
    """
    spec = read_spec(
        read_config(find_model(settings, with_weights=False), settings.hf_overrides), settings.quantization
    )
    longest = settings.max_model_len or spec.max_position_embeddings
    outputs = 0 if pools(settings) else outputs
    for number, ids in enumerate(given, 1):
        if isinstance(ids, str):
            continue
        if not ids:
            raise SettingsError(f"prompt {number} has no token: write one at least", param="prompts")
        if len(ids) + outputs > longest:
            raise SettingsError(
                f"prompt {number} has {len(ids):,} tokens, and {outputs:,} follow: a sequence has {longest:,} at most",
                param="prompts",
            )
        if (wrong := next((id for id in ids if not 0 <= id < spec.vocab_size), None)) is not None:
            raise SettingsError(
                f"prompt {number} has the token id {wrong}: ids are 0 to {spec.vocab_size - 1:,}", param="prompts"
            )


def pools(settings: Settings) -> bool:
    """Return whether an engine of ``settings`` pools texts, and so generates no tokens."""
    folder = find_model(settings, with_weights=False)
    return pooling_of(settings, folder, read_config(folder, settings.hf_overrides)) is not None
