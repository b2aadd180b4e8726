"""The log level of the detailed lines of warm-up."""

from __future__ import annotations

import logging

from preheat.backends.base.facts import Facts
from preheat.settings import Settings

DEBUG_PART = "warmup"


def detail_level(settings: Settings, facts: Facts) -> int:
    """Return the level of the lines on every bucket and sampler setting.

    It is info if the user asks for these lines or for compiling steps, or if the platform's users expect them, else
    debug.
    """
    asked = DEBUG_PART in settings.debug or settings.log_step_graph_compilation
    if asked or settings.log_step_graph_compilation_all or facts.logs_buckets:
        return logging.INFO
    return logging.DEBUG
