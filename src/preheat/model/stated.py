"""The model that settings and a folder state together. No torch here."""

from __future__ import annotations

from pathlib import Path

from preheat.model.families import spec_of
from preheat.model.files import read_config
from preheat.model.specs import ModelSpec, without_head
from preheat.settings import Settings
from preheat.utils.pooling import pooling_of


def stated_spec(settings: Settings, folder: Path) -> ModelSpec:
    """Return the spec of the model in ``folder``; an engine that pools has no head."""
    config = read_config(folder, settings.hf_overrides)
    return pooled_spec(settings, folder, spec_of(config, settings))


def pooled_spec(settings: Settings, folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return ``spec``, or for an engine that pools ``spec`` without its head."""
    pooling = pooling_of(settings, folder, read_config(folder, settings.hf_overrides))
    return spec if pooling is None else without_head(spec, pooling.max_length, first=pooling.type == "CLS")
