"""Options from the environment: our variables, and other engines'.

The other engines are vLLM, and vLLM on Gaudi in its various versions. The environment of another engine should boot
this one. One of our variables with an invalid value is an error. Another engine's variable for a feature that is not
here has no effect, with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from preheat.errors import SettingsError
from preheat.options.options import Option, parse_bool
from preheat.options.vllm_variables import why_unused
from preheat.utils.text import misspelled

logger = logging.getLogger(__name__)

EXPONENTIAL = "VLLM_EXPONENTIAL_BUCKETING"
STRATEGY = "bucketing_strategy"
NOWHERE = {"defrag_with_graphs": "blocks are swapped without graphs"}
"""Options that no platform can switch on, with the reason."""


def read_environment(options: Mapping[str, Option], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of ``options`` that ``env`` sets.

    Warns of variables with our prefixes that set nothing. Raises SettingsError, naming the variable, for a value that
    cannot be used.
    """
    values: dict[str, Any] = {}
    known = {name for opt in options.values() for name in opt.env_names} | {EXPONENTIAL}
    for opt in options.values():
        name = next((name for name in opt.env_names if name in env), None)
        if name is None:
            continue
        if name == opt.env_names[0]:
            values[opt.name] = opt.convert(env[name], name)
        elif isinstance(opt.later, str):
            warn(f"{name} has no effect: {opt.later}")
        else:
            value = opt.convert(_without_unknown(opt, name, env[name]), name)
            if value and opt.name in NOWHERE:
                warn(f"{name} has no effect: {NOWHERE[opt.name]}")
            else:
                values[opt.name] = value
    if EXPONENTIAL in env:
        values[STRATEGY] = _exponential(env[EXPONENTIAL], values.get(STRATEGY), options[STRATEGY].env_names[0] in env)
    for name in sorted(env):
        if name.startswith(("VLLM_", "PREHEAT_")) and name not in known:
            _tell_unused(name, known)
    return values


def _tell_unused(name: str, known: Iterable[str]) -> None:
    """Warn of a variable that sets nothing, unless it asks for the usual behavior."""
    reason = why_unused(name)
    if reason is None:
        warn(f"Unknown environment variable {name} is ignored{misspelled(name, known)}")
    elif reason:
        warn(f"{name} has no effect: {reason}")


def without_unused(values: Mapping[str, Any], args: Mapping[str, object], env: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` without an unused file of ranges.

    The file is unused if only another engine's variable names it. That variable is often set for good, and means
    nothing unless the file's quantization is asked for.
    """
    ours = "quant_config" in args or "PREHEAT_QUANT_CONFIG" in env or "QUANT_CONFIG" not in env
    if ours or values.get("quantization") == "inc":
        return dict(values)
    warn("QUANT_CONFIG has no effect: quantization is not inc")
    return {name: value for name, value in values.items() if name != "quant_config"}


@cache
def warn(message: str) -> None:
    """Log a warning, once for each process."""
    logger.warning(message)


def _without_unknown(opt: Option, name: str, text: str) -> str:
    """Return the list ``text`` without entries that only the other engine knows."""
    if tuple not in opt.kinds or not opt.choices:
        return text
    words = [word.strip() for word in text.strip("[]").replace('"', "").split(",") if word.strip()]
    if unknown := [word for word in words if word not in opt.choices]:
        warn(f"{name}: {', '.join(unknown)} has no effect: the choices are {', '.join(opt.choices)}")
    return ",".join(word for word in words if word in opt.choices)


def _exponential(text: str, strategy: str | None, ours: bool) -> str:
    """Return the strategy of the older variable.

    It wins over the newer one, as in vLLM on Gaudi, but not over ours.
    """
    try:
        named = "exponential" if parse_bool(text) else "linear"
    except ValueError:
        raise SettingsError(f"{EXPONENTIAL}: {text!r} is not a yes or no (use 1/0, true/false or yes/no)") from None
    if ours and strategy is not None:
        warn(f"{EXPONENTIAL} has no effect: the bucketing strategy is {strategy}")
        return strategy
    instead = f" instead of {strategy}" if strategy not in (None, named) else ""
    warn(f"{EXPONENTIAL} is deprecated: bucketing strategy {named}{instead}")
    return named
