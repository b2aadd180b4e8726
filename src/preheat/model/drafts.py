"""The checkpoint of a model that drafts for another one."""

from __future__ import annotations

from dataclasses import replace

from preheat.configs.speculation import WITHOUT
from preheat.settings import Settings


def draft_settings(settings: Settings) -> Settings | None:
    """Return the settings of the draft's own checkpoint; None if nothing drafts with one."""
    if settings.speculation is None or settings.speculation.model is None:
        return None
    return replace(
        settings,
        model=settings.speculation.model,
        revision=None,
        tokenizer=None,
        hf_overrides=None,
        enable_lora=False,
        lora_modules=(),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        **WITHOUT,
    )
