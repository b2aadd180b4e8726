"""The settings that a model needs: tokens of a step, and whole texts for an encoder. No torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol

from preheat.backends.base.facts import Facts
from preheat.plan.modes import step_limits
from preheat.settings import Settings

logger = logging.getLogger(__name__)


class ModelLike(Protocol):
    """The part of :class:`preheat.model.specs.ModelSpec` that these settings depend on."""

    @property
    def encodes(self) -> bool: ...
    @property
    def has_experts(self) -> bool: ...
    @property
    def max_position_embeddings(self) -> int: ...


def for_model(settings: Settings, facts: Facts, spec: ModelLike) -> Settings:
    """Return ``settings`` of an engine for ``spec``, with the tokens of a step.

    A step reads the weights of all experts that its tokens visit, so a backend may have more tokens a step for experts.
    """
    if spec.has_experts and facts.max_num_expert_tokens is not None:
        facts = replace(facts, max_num_batched_tokens=facts.max_num_expert_tokens)
    if spec.encodes:
        return for_whole_texts(settings, facts, spec.max_position_embeddings)
    return replace(settings, max_num_batched_tokens=step_limits(settings, facts)[1])


def for_whole_texts(settings: Settings, facts: Facts, length: int) -> Settings:
    """Return ``settings`` of an engine with texts of up to ``length`` tokens, each in one step.

    No text is cut into chunks, and none begins from a prefix cache: its first tokens see its last ones. Unless a number
    of tokens is set, a step has room for the longest text.
    """
    length = min(length, settings.max_model_len or length)
    tokens = settings.max_num_batched_tokens or max(length, step_limits(settings, facts)[1])
    off = [name for name in ("enable_chunked_prefill", "enable_prefix_caching") if getattr(settings, name)]
    if off:
        logger.info("An encoder reads a text in one step: %s off, %d tokens a step", " and ".join(off), tokens)
    whole: dict[str, Any] = dict.fromkeys(off, False)
    return replace(settings, max_num_batched_tokens=tokens, **whole)
