"""Execution modes, and the options that a backend can serve. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from preheat.backends.base import Facts, Mode
from preheat.errors import SettingsError
from preheat.plan.policy import policy_named
from preheat.settings import OPTIONS, Settings

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


def check_options(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError, with the reason, for an option that has no effect on a backend or with other options."""
    for name, reason in facts.rejected.items():
        default = OPTIONS[name].default
        if bool(getattr(settings, name)) != bool(default):
            turned = "off" if default else "on"
            usual = "unset" if default is None else f"at {str(default).lower()}"
            raise SettingsError(
                f"{name} cannot be turned {turned} on {facts.name}: {reason}; leave it {usual}", param=name
            )
    if settings.contiguous_pa and settings.block_size != facts.split:
        raise SettingsError(
            f"contiguous_pa reads whole blocks of {facts.split} tokens, and block_size is {settings.block_size}: "
            f"set block_size to {facts.split}, or contiguous_pa to false",
            param="contiguous_pa",
        )
    mixed_steps = policy_named(settings.bucketing_policy).mixed_steps
    if settings.max_num_mixed_tokens is not None and not (mixed_steps and settings.enable_chunked_prefill):
        raise SettingsError(
            "max_num_mixed_tokens bounds steps in which prompts are cut for others: leave it unset, or use the unified "
            "bucketing policy with enable_chunked_prefill",
            param="max_num_mixed_tokens",
        )


def _words(settings: Settings) -> str:
    words = {"lazy_mode (PT_HPU_LAZY_MODE)": settings.lazy_mode is not None, "enforce_eager": settings.enforce_eager}
    return " and ".join(word for word, is_set in words.items() if is_set)
