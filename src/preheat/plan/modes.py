"""Execution modes, and the options that a backend can serve. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preheat.backends.base.facts import Facts, Mode
from preheat.configs.bucketing import DEFAULT_POLICY
from preheat.configs.kv_transfer import kv_transfer
from preheat.errors import SettingsError
from preheat.options.environment import warn
from preheat.plan.policy import policy_of
from preheat.settings import OPTIONS, Settings

logger = logging.getLogger(__name__)

BY_BRIDGE: Mapping[tuple[bool | None, bool], Mode | None] = {
    (None, False): None,
    (None, True): "eager",
    (False, False): "compile",
    (False, True): "eager",
    (True, False): "graphs",
    (True, True): "lazy",
}
"""The mode asked by ``lazy_mode`` and ``enforce_eager`` together: the table of vLLM on Gaudi."""

LAZY_MODE = "lazy_mode (PT_HPU_LAZY_MODE)"


def asked(settings: Settings) -> Mode | None:
    """Return the mode that the settings name, or None.

    Raises SettingsError if they name two. ``lazy_mode`` is often set by the environment of another machine, so it gives
    way to the other settings.
    """
    bridge = BY_BRIDGE[settings.lazy_mode, settings.enforce_eager]
    if settings.execution_mode == "auto":
        return bridge
    chosen: Mode = settings.execution_mode  # type: ignore[assignment]  # the option's choices
    if bridge == chosen:
        return chosen
    if BY_BRIDGE[None, settings.enforce_eager] not in (None, chosen):
        raise SettingsError(
            f"execution_mode {chosen} contradicts enforce_eager (execution mode {bridge}): drop one of them",
            param="execution_mode",
        )
    if settings.lazy_mode is not None:
        logger.warning("%s has no effect: execution_mode is %s", LAZY_MODE, chosen)
    return chosen


def resolve(facts: Facts, settings: Settings) -> Mode:
    """Return the mode in which a backend runs.

    Raises SettingsError, with the reason, if the backend lacks the mode asked for. A mode asked by ``lazy_mode`` alone
    gives way to the default with a warning.
    """
    modes = facts.modes
    mode = asked(settings) or modes.default
    if settings.enforce_eager and settings.lazy_mode is None and settings.execution_mode == "auto":
        mode = modes.enforced
    if mode in modes.rejected and settings.execution_mode == "auto" and settings.lazy_mode is not None:
        logger.warning("%s has no effect: there is no mode %s, because %s", LAZY_MODE, mode, modes.rejected[mode])
        mode = BY_BRIDGE[None, settings.enforce_eager] or modes.default
    if mode in modes.rejected:
        raise SettingsError(
            f"execution mode {mode} is not available on {facts.name}: {modes.rejected[mode]}. "
            f"Choose {' or '.join(modes.runs)}, or leave execution_mode, lazy_mode and enforce_eager unset.",
            param="execution_mode",
        )
    return mode


def instead(facts: Facts, settings: Settings) -> Mode | None:
    """Return the mode for a model that the default mode does not run; None if a mode is asked for."""
    return facts.modes.otherwise if asked(settings) is None else None


TRANSFER_GIB = 1.0
"""GiB of the host for blocks that other engines send or take, unless ``kv_offloading_size`` says otherwise."""


def with_defaults(settings: Settings, facts: Facts) -> Settings:
    """Return ``settings`` with a backend's defaults where none are set.

    They are its step limits, block size and other defaults.
    """
    sequences, tokens = step_limits(settings, facts)
    usual = {"bucketing_policy": DEFAULT_POLICY, "block_size": facts.block_size} | dict(facts.defaults)
    if (transfer := kv_transfer(settings)) is not None:
        usual["kv_offloading_size"] = transfer.gib or TRANSFER_GIB
    more: dict[str, Any] = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    more |= {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
    changed = {name: value for name, value in more.items() if getattr(settings, name) != value}
    return replace(settings, **changed) if changed else settings  # a replacement checks all options again


def step_limits(settings: Settings, facts: Facts) -> tuple[int, int]:
    """Return the most sequences and tokens of a step.

    They are as set, or else the backend's.
    """
    return settings.max_num_seqs or facts.max_num_seqs, settings.max_num_batched_tokens or facts.max_num_batched_tokens


def check_options(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError for an option that has no effect.

    An option may have none on a backend or with other options. The error has the reason.
    """
    for name, reason in facts.rejected.items():
        default = OPTIONS[name].default
        if bool(getattr(settings, name)) != bool(default):
            turned = "off" if default else "on"
            usual = "unset" if default is None else f"at {str(default).lower()}"
            raise SettingsError(
                f"{name} cannot be turned {turned} on {facts.name}: {reason}; leave it {usual}", param=name
            )
    for name, reason in facts.ignored.items():
        if getattr(settings, name) is not None:
            warn(f"{OPTIONS[name].env} has no effect: {reason}")
    settings = with_defaults(settings, facts)
    size = settings.block_size
    if settings.num_scheduler_steps > 1 and not facts.asynchronous:
        raise SettingsError(
            f"num_scheduler_steps {settings.num_scheduler_steps} asks for steps that are prepared ahead, and on "
            f"{facts.name} a step has ended when its call returns: leave it at 1",
            param="num_scheduler_steps",
        )
    if settings.contiguous_pa and size != facts.split:
        raise SettingsError(
            f"contiguous_pa reads whole blocks of {facts.split} tokens, and block_size is {size}: "
            f"set block_size to {facts.split}, or contiguous_pa to false",
            param="contiguous_pa",
        )
    mixed_steps = policy_of(settings).mixed_steps
    if settings.max_num_mixed_tokens is not None and not (mixed_steps and settings.enable_chunked_prefill):
        raise SettingsError(
            "max_num_mixed_tokens limits steps that mix prompts and decoding: leave it unset, or use the unified "
            "bucketing policy with enable_chunked_prefill",
            param="max_num_mixed_tokens",
        )
