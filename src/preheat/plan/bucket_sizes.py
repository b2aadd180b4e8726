"""Bucket sizes: the values that one dimension is padded to.

Source: the bucketing strategies of vLLM on Gaudi, except that the maximum is always one of the sizes, so that
everything up to it fits.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from preheat.errors import SettingsError

Strategy = Literal["linear", "exponential", "padding_aware"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PAD_PERCENT = 25
MAX_VALUES = 1_000_000


def bucket_sizes(
    strategy: str,
    min: int,  # noqa: A002 - the names of the settings
    step: int,
    max: int,  # noqa: A002
    *,
    count: int | None = None,
    per_doubling: int | None = None,
    pad_max: int | None = None,
    pad_percent: int | None = None,
) -> tuple[int, ...]:
    """Return the ascending values from ``min`` to ``max`` of one dimension.

    ``max`` is always the last.

    ``linear``: ``min``, which doubles up to ``step``, then multiples of ``step``.
    ``exponential``: ``count`` points of equal ratio, each rounded up to a multiple of ``step``. A ``min`` of 0 or 1 is
    kept and the ratio counted from ``step``. By default there are as many points as doubling takes. With
    ``per_doubling`` the first value doubles, as far as ``max``, and each doubling is cut into ``per_doubling`` equal
    parts.
    ``padding_aware``: ``min`` doubles up to ``step``. A later multiple of ``step`` is left out if the next one is then
    padded by at most ``pad_percent`` (default 25) and at most ``pad_max`` (default: a quarter of ``max``; 0 is no
    limit). Every multiple of ``pad_max`` is kept.

    Raises SettingsError, with the change to make, for a range or an argument that makes no sense.
    """
    _check_range(min, step, max)
    _check_strategy(strategy, per_doubling if count is None else count, pad_max, pad_percent)
    if max == 0:
        return (0,)
    if (count or 0 if strategy == "exponential" else max // step) > MAX_VALUES:
        raise SettingsError(f"{strategy} from {min} to {max} by {step} has over {MAX_VALUES:,} values: raise step")
    if strategy == "linear":
        values = _linear(min, step, max)
    elif strategy == "exponential" and per_doubling is not None:
        values = _doubling(min, step, max, per_doubling)
    elif strategy == "exponential":
        values = _exponential(min, step, max, default_count(max) if count is None else count)
    else:
        limit = -(-max // 4) if pad_max is None else pad_max
        values = _padding_aware(min, step, max, limit, PAD_PERCENT if pad_percent is None else pad_percent)
    return tuple(sorted({value for value in values if min <= value < max} | {max}))


def default_count(high: int) -> int:
    """Return the default number of exponential sizes: one for each doubling up to ``high``."""
    return math.ceil(math.log2(high)) + 1 if high > 1 else 1


def _check_range(low: int, step: int, high: int) -> None:
    if low < 0:
        raise SettingsError(f"min must be at least 0, got {low}")
    if low > high:
        raise SettingsError(f"min ({low}) must not exceed max ({high}): change one of them")
    if step < 1:
        raise SettingsError(f"step must be at least 1, got {step}")


def _check_strategy(strategy: str, count: int | None, pad_max: int | None, pad_percent: int | None) -> None:
    if strategy not in STRATEGIES:
        raise SettingsError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy != "exponential" and count is not None:
        raise SettingsError(f"count belongs to the exponential strategy; {strategy} takes its values from step")
    if strategy != "padding_aware" and (pad_max is not None or pad_percent is not None):
        raise SettingsError(f"pad_max and pad_percent belong to the padding_aware strategy, not to {strategy}")
    if count is not None and count < 1:
        raise SettingsError(f"count must be at least 1, got {count}")
    if pad_max is not None and pad_max < 0:
        raise SettingsError(f"pad_max must be at least 0 (0 is no limit), got {pad_max}")
    if pad_percent is not None and not 0 <= pad_percent <= 50:
        raise SettingsError(f"pad_percent must be between 0 and 50, got {pad_percent}")


def _linear(low: int, step: int, high: int) -> list[int]:
    values, value = [low], low or step
    while value < step:
        values.append(value)
        value *= 2
    return values + list(range(step, high + 1, step))


def _exponential(low: int, step: int, high: int, count: int) -> list[int]:
    start = _start(low, step, high)
    points = [start * (high / start) ** (point / (count - 1)) for point in range(count - 1)]
    # Powers that should be whole are slightly off in floating point and must not be rounded up.
    return ([low] if low <= 1 < count else []) + [math.ceil(point / step - 1e-9) * step for point in points]


def _doubling(low: int, step: int, high: int, per: int) -> list[int]:
    values, base = [low] if low <= 1 else [], _start(low, step, high)
    while base < high:
        values += [-(-base * (per + part) // (per * step)) * step for part in range(per)]
        base *= 2
    return values


def _start(low: int, step: int, high: int) -> int:
    """Return the value from which ratios are counted."""
    return low if low > 1 else min(step, high)


def _padding_aware(low: int, step: int, high: int, pad_max: int, pad_percent: int) -> list[int]:
    pad_max = pad_max or high
    values = [low]
    while values[-1] <= step and values[-1] < high:
        values.append(values[-1] * 2 or 1)
    for value in range(values[-1] + step, high, step):
        padding = value + step - values[-1] - 1  # the most, if this value were left out
        if padding * 100 > pad_percent * (value + step) or padding > pad_max or value % pad_max == 0:
            values.append(value)
    return values
