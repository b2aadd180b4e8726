"""Figures of two sides that ran in turns on one machine: the best of each side, and by how much one is slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Figures = dict[str, float]
"""Figures by name."""


def in_turns(first: str, second: str, turns: int) -> Iterator[str]:
    """Yield both sides ``turns`` times. The side that was last in a turn is first in the next one."""
    for turn in range(turns):
        yield from (first, second) if turn % 2 == 0 else (second, first)


def is_rate(name: str) -> bool:
    """Return whether more is better, as of tokens a second."""
    return "tokens/s" in name or "tok_s" in name


def best(turns: Sequence[Figures]) -> Figures:
    """Return the best of the ``turns`` of one side, for figures that all of them have."""
    names = [name for name in turns[0] if all(name in turn for turn in turns)]
    return {name: (max if is_rate(name) else min)(turn[name] for turn in turns) for name in names}


def percent_slower(before: Figures, after: Figures) -> Figures:
    """Return by how many percent ``after`` is slower, below 0 where it is faster, for figures that both have."""
    shared = [name for name in before if before[name] and after.get(name)]
    shares = {n: before[n] / after[n] if is_rate(n) else after[n] / before[n] for n in shared}
    return {name: round(100 * (share - 1), 2) for name, share in shares.items()}
