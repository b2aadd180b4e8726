"""Who sees the log lines that tell of everything that runs during warm-up."""

from __future__ import annotations

import logging

from preheat.backends.base import Facts
from preheat.settings import Settings

DEBUG_PART = "warmup"


def detail_level(settings: Settings, facts: Facts) -> int:
    """The level of the lines that tell of every bucket and sampler setting: info for who asks to see them, or which
    steps compile, and on a platform whose users know them; else debug.
    """
    asked = DEBUG_PART in settings.debug or settings.log_step_graph_compilation
    if asked or settings.log_step_graph_compilation_all or facts.logs_buckets:
        return logging.INFO
    return logging.DEBUG
