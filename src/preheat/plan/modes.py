"""Execution modes: how a platform runs the programs of the plan. One table for each platform; no torch.

The settings ask for a mode (`asked`), the platform's row says what becomes of it (`resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from preheat.errors import SettingsError
from preheat.settings import Settings

Mode = Literal["graphs", "compile", "eager", "lazy"]
MODES: tuple[Mode, ...] = get_args(Mode)

BY_BRIDGE: Mapping[tuple[bool | None, bool], Mode | None] = {
    (None, False): None,  # nothing is asked for
    (None, True): "eager",
    (False, False): "compile",
    (False, True): "eager",
    (True, False): "graphs",
    (True, True): "lazy",
}
"""What ``lazy_mode`` and ``enforce_eager`` ask for together: the table of vLLM on Gaudi."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One platform: the mode it takes when nobody asks, what each mode that it ``runs`` does there, and why the others
    are ``refused``.
    """

    default: Mode
    runs: Mapping[Mode, str]
    refused: Mapping[Mode, str]


_NO_BRIDGE = "it is the lazy backend of Gaudi's PyTorch bridge, which this platform has not"

PLATFORMS: Mapping[str, Row] = {
    "cpu": Row(
        default="eager",
        runs={
            "eager": "torch runs one operation after the other",
            "compile": "torch.compile, each kind of layer once for each number of tokens",
            "graphs": "as eager; there are no graphs on a CPU, so their twin counts the bytes that they would take",
        },
        refused={"lazy": _NO_BRIDGE},
    ),
    "cuda": Row(
        default="graphs",
        runs={
            "eager": "the host launches one kernel after the other",
            "graphs": "every program is captured once and replayed",
        },
        refused={
            "compile": "a layer is a few fused kernels, which a compiler must leave as they are to keep their bits; "
            "what it saves in launches, graphs save whole",
            "lazy": _NO_BRIDGE,
        },
    ),
    "hpu": Row(
        default="graphs",
        runs={
            "eager": "PyTorch eager mode of the bridge",
            "compile": "torch.compile over the bridge's eager backend",
            "graphs": "HPU Graphs over the bridge's lazy backend",
            "lazy": "the bridge's lazy backend, without graphs",
        },
        refused={},
    ),
}


def asked(settings: Settings) -> Mode | None:
    """The mode that the settings name, None where they leave it open. SettingsError if they name two."""
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


def resolve(platform: str, settings: Settings) -> Mode:
    """The mode in which ``platform`` runs. SettingsError, with the reason, if it does not run what is asked for."""
    row = PLATFORMS[platform]
    mode = asked(settings) or row.default
    if mode in row.refused:
        raise SettingsError(
            f"execution mode {mode} is not available on {platform}: {row.refused[mode]}. "
            f"Choose {' or '.join(row.runs)}, or leave execution_mode, lazy_mode and enforce_eager unset.",
            param="execution_mode",
        )
    return mode


def _words(settings: Settings) -> str:
    """The settings of Gaudi's table that are set."""
    words = {"lazy_mode (PT_HPU_LAZY_MODE)": settings.lazy_mode is not None, "enforce_eager": settings.enforce_eager}
    return " and ".join(word for word, is_set in words.items() if is_set)
