"""Log-probabilities of many positions in a few lists, as in vLLM: less work for the garbage collector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from preheat.frontend.outputs import Logprob, PositionLogprobs

Position = PositionLogprobs | None
"""One position; None, or no entry in a flat list, for the first token: nothing precedes it."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """A read-only sequence of positions.

    Each position is made from the lists on access. Position ``i`` has the entries from ``start_indices[i]`` up to
    ``end_indices[i]`` of the other lists.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self, positions: Iterable[Position] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for position in positions:
            self._add(position)

    def _add(self, position: Position) -> None:
        self.start_indices.append(len(self.token_ids))
        for token, entry in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> FlatLogprobs: ...

    def __getitem__(self, at: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(at, slice):
            return FlatLogprobs(self[place] for place in range(*at.indices(len(self))))
        return {
            self.token_ids[place]: Logprob(self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
            for place in range(self.start_indices[at], self.end_indices[at])
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]
