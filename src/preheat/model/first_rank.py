"""The model as the first rank has it, by the settings. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.model.families import spec_of
from preheat.model.files import find_model, read_config
from preheat.model.rounded import rounded
from preheat.model.shard import shard, sums_k_splits
from preheat.model.specs import ModelSpec
from preheat.model.stage import stage_of
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.backends.base.facts import Facts


def spec_of_first_rank(settings: Settings, facts: Facts | None = None) -> ModelSpec:
    """Return the spec of the model, or of the first rank's shard.

    With the ``facts`` of a backend, layers that the settings round have their formats there. Raises ModelError for an
    invalid config, and for a model that cannot be divided; SettingsError for a ``quant_config`` that cannot be used.
    """
    spec = spec_of(read_config(find_model(settings, with_weights=False), settings.hf_overrides), settings)
    if facts is not None and (inc := rounded(settings, spec, facts)) is not None:
        spec = inc.spec
    spec = stage_of(spec, 0, settings.pipeline_parallel_size)
    return shard(spec, 0, settings.tensor_parallel_size) if sums_k_splits(settings) else spec
