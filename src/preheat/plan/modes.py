"""Execution modes: how a backend runs the programs of the plan. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from preheat.backends.base import Facts, Mode
from preheat.errors import SettingsError
from preheat.settings import Settings

MODES: tuple[Mode, ...] = get_args(Mode)

BY_BRIDGE: Mapping[tuple[bool | None, bool], Mode | None] = {
    (None, False): None,
    (None, True): "eager",
    (False, False): "compile",
    (False, True): "eager",
    (True, False): "graphs",
    (True, True): "lazy",
}
"""What ``lazy_mode`` and ``enforce_eager`` ask for together: the table of vLLM on Gaudi."""


def asked(settings: Settings) -> Mode | None:
    """The mode that the settings name; None if they name none. SettingsError if they name two."""
    bridge = BY_BRIDGE[settings.lazy_mode, settings.enforce_eager]
    if settings.execution_mode == "auto":
        return bridge
    chosen: Mode = settings.execution_mode  # type: ignore[assignment]  # the option's choices
    if bridge not in (None, chosen):
        raise SettingsError(
            f"execution_mode {chosen} contradicts {_words(settings)}, which means {bridge}: drop one of them",
            param="execution_mode",
        )
    return chosen


def resolve(facts: Facts, settings: Settings) -> Mode:
    """The mode in which a backend runs. SettingsError, with the reason, if it does not have the mode asked for."""
    modes = facts.modes
    mode = asked(settings) or modes.default
    if mode in modes.rejected:
        raise SettingsError(
            f"execution mode {mode} is not available on {facts.name}: {modes.rejected[mode]}. "
            f"Choose {' or '.join(modes.runs)}, or leave execution_mode, lazy_mode and enforce_eager unset.",
            param="execution_mode",
        )
    return mode


def _words(settings: Settings) -> str:
    words = {"lazy_mode (PT_HPU_LAZY_MODE)": settings.lazy_mode is not None, "enforce_eager": settings.enforce_eager}
    return " and ".join(word for word, is_set in words.items() if is_set)
