"""Beam search itself, without an engine.

The rules are vLLM's. A step looks at the 2 * width most likely tokens after each beam. A token that ends a sequence
completes it; the ``width`` most likely others live on. There is no early stop: the search runs to its length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from preheat.core import StructuredOutputsParams, TokenLogprobs

MAX_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0


class BeamSearchParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of :meth:`preheat.LLM.beam_search`; names and meanings are vLLM's.

    ``max_tokens`` bounds the length of the answer; with ``ignore_eos`` every answer has this length. The score of a
    sequence is its log probability / length ** ``length_penalty``. The length counts prompt and answer without the end
    of sequence. ``include_stop_str_in_output``: the text includes the end of sequence. Nothing is drawn, so
    ``temperature`` is 0, or 1 with the same effect. ``skip_special_tokens``: the text leaves out special tokens. A
    search with ``structured_outputs`` is refused. Raises ValueError for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_WIDTH:
            raise ValueError(f"beam_width must be between 1 and {MAX_WIDTH}, got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature is {self.temperature}, but beam search draws nothing and scores the model's own "
                "probabilities: leave it at 0"
            )
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:  # rejects NaN as well
            bounds = f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            raise ValueError(f"length_penalty must be {bounds}, got {self.length_penalty}")


class Beam(NamedTuple):
    """A continuation of the prompt; ``logprobs[i]`` has ``tokens[i]`` and its alternatives."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cum_logprob: float = 0.0
    completed: bool = False

    def grown(self, entry: TokenLogprobs, completed: bool = False) -> Beam:
        """Return the beam with one more token."""
        tokens, logprobs = (*self.tokens, entry.token), (*self.logprobs, entry)
        return Beam(tokens, logprobs, self.cum_logprob + entry.logprob, completed)


class Beams:
    """The ``live`` beams after a prompt, and the best completed sequences.

    ``prompt_len`` is the number of the prompt's tokens. A token of ``eos_ids`` completes a beam, unless ``params``
    ignore it. Equal scores keep the order of their parent beams, then the order of their tokens' probabilities. So the
    outcome depends on the logprobs alone.
    """

    def __init__(self, params: BeamSearchParams, prompt_len: int, eos_ids: Collection[int]) -> None:
        self._params, self._prompt_len, self._eos_ids = params, prompt_len, frozenset(eos_ids)
        self.live = [Beam()]
        self._completed: list[Beam] = []
        self._length = 0

    @property
    def over(self) -> bool:
        return not self.live or self._length == self._params.max_tokens

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """Take one step: ``reports[i].top`` are the tokens that may follow ``live[i]``, the most likely first."""
        width, candidates = self._params.beam_width, list[tuple[Beam, TokenLogprobs]]()
        for beam, report in zip(self.live, reports, strict=True):
            for rank, (token, logprob) in enumerate(report.top[: 2 * width], 1):
                entry = TokenLogprobs(token, logprob, rank, report.top)
                if token in self._eos_ids and not self._params.ignore_eos:
                    self._completed.append(beam.grown(entry, completed=True))
                else:
                    candidates.append((beam, entry))
        candidates.sort(key=lambda pair: pair[0].cum_logprob + pair[1].logprob, reverse=True)
        self.live = [beam.grown(entry) for beam, entry in candidates[:width]]
        self._completed = self._best(self._completed)
        self._length += 1

    def best(self) -> list[Beam]:
        """Return the best sequences, at most ``beam_width``, best first."""
        return self._best([*self._completed, *self.live])

    def score(self, beam: Beam) -> float:
        """Return the score of ``beam``; sequences are compared by it."""
        length = self._prompt_len + len(beam.tokens) - (beam.tokens[-1] in self._eos_ids)
        return float(beam.cum_logprob / length**self._params.length_penalty)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)[: self._params.beam_width]
