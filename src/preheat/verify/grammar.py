"""The grammars' check at boot.

It draws from known logits, through the masks and the sampler that serve. A row with a grammar draws the best of the
tokens that the grammar allows, or any of them if it draws at random. A row beside it draws as it does without grammars.
This module states the grammar's rule again, one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from preheat.core import OWN_ID, Request, SamplingParams, Schedule, StructuredOutputsParams
from preheat.errors import CheckFailed
from preheat.execution.logit_stages import sampling_input
from preheat.grammar.service import Grammars
from preheat.grammar.state import State
from preheat.plan.item import NothingToRun
from preheat.verify.check_runner import CheckRunner

LEAST, MOST = 2, 12
CHARACTERS = b"abcdefgh ()_"
PARAMS = StructuredOutputsParams(regex=f"[abcdefgh ()_]{{{LEAST},{MOST}}}")
"""A grammar without texts that have a single continuation.

llguidance would allow only one tokenization of that.
"""

TEMPERATURES = (0.0, 1.0, 1.5)
LIKELY, UNLIKELY = 8, -8.0
"""The number of likely tokens, and the logit of the rest.

The logits set the likely tokens apart from the rest, without ties.
"""

LOOKED_AT = 4096


@dataclass
class GrammarCheck:
    """Check a grammar's draws.

    Raise NothingToRun if there is no room for two sequences.
    """

    runner: CheckRunner
    grammars: Grammars

    def _word(self, token: int) -> bytes:
        """Return the text of a token.

        None for a token that never stands for text.
        """
        backend = self.grammars.backend
        return b"" if backend.is_special(token) else backend.text([token])

    @cached_property
    def _words(self) -> list[int]:
        """Tokens with a text of the grammar's characters, among `LOOKED_AT` random ones."""
        ids = torch.randperm(self.runner.vocab_size, generator=torch.Generator().manual_seed(0))[:LOOKED_AT].tolist()
        return [token for token in ids if (word := self._word(token)) and not word.strip(CHARACTERS)]

    @property
    def _end(self) -> int:
        return self.grammars.backend.end

    def run(self) -> None:
        """Draw texts until they end.

        Raises CheckFailed for the first token that should not have been drawn.
        """
        if self.runner.slots.num_free < 2 or self.runner.slots.max_model_len < MOST + 3:
            raise NothingToRun("two sequences of a text are more than the limits allow")
        for seed, temperature in enumerate(TEMPERATURES):
            self._draw_text(SamplingParams(temperature=temperature, seed=seed, structured_outputs=PARAMS), seed)

    def _draw_text(self, params: SamplingParams, seed: int) -> None:
        request = Request(OWN_ID, [0], params, seed, MOST + 1, stop_ids=[self._end])
        state, text, place = self.grammars.grammar(PARAMS).result().state(request), b"", 0
        while True:
            line = self._line(seed * (MOST + 1) + place, ends=len(text) < LEAST)
            token, beside = self._drawn(request, state, line, place)
            self._judge(text, token, line, greedy=params.greedy)
            if beside != int(line.argmax()):
                raise CheckFailed(f"grammar: a row without grammar drew token {beside} beside one that has a mask")
            if token == self._end:
                return
            text, place = text + self._word(token), place + 1
            if wrong := state.accept(token):
                raise CheckFailed(f"grammar: {wrong}")

    def _judge(self, text: bytes, token: int, line: torch.Tensor, *, greedy: bool) -> None:
        """Raise CheckFailed unless ``token`` may follow ``text``.

        In a greedy draw it must also be the best that may.
        """
        if not self._is_allowed(text, token):
            raise CheckFailed(f"grammar: token {token} was drawn behind {text!r}, and the grammar does not allow it")
        likely = [id for id in (line > UNLIKELY).nonzero().flatten().tolist() if self._is_allowed(text, id)]
        best = max(likely, key=lambda id: float(line[id]), default=token)
        if greedy and token != best:
            raise CheckFailed(f"grammar: token {token} was drawn behind {text!r}, the best that is allowed is {best}")

    def _is_allowed(self, text: bytes, token: int) -> bool:
        if token == self._end:
            return len(text) >= LEAST
        word = self._word(token)
        return 0 < len(word) <= MOST - len(text) and not word.strip(CHARACTERS)

    def _line(self, number: int, *, ends: bool) -> torch.Tensor:
        """Return logits [vocab] that every dtype holds.

        A few tokens are likely, with and without text of the grammar. If it ``ends``, the token that ends a text is the
        likeliest.
        """
        draw = torch.Generator().manual_seed(number)
        line = torch.full((self.runner.vocab_size,), UNLIKELY)
        line[torch.randperm(len(line), generator=draw)[:LIKELY]] = torch.arange(LIKELY, dtype=torch.float32)
        for value, place in enumerate(torch.randperm(len(self._words), generator=draw)[:LIKELY].tolist()):
            line[self._words[place]] = value - LIKELY / 2 - 0.5
        if ends:
            line[self._end] = float(LIKELY)
        return line

    def _drawn(self, request: Request, state: State, line: torch.Tensor, place: int) -> tuple[int, int]:
        """Return the tokens of two rows, drawn in one step.

        One row has the grammar, the other is greedy.
        """
        runner, slots, taken = self.runner, self.runner.slots, list[int]()
        greedy = Request(OWN_ID - 1, [0], SamplingParams(temperature=0.0), 0, 1)
        try:
            for each, length in ((greedy, 1), (request, 1 + place)):
                taken.append(runner.take(each, np.zeros(length, np.int32)))
            slots.grammars[taken[1]] = state
            rows, ones = np.array(taken, np.int64), np.ones(2, np.int32)
            schedule = Schedule(rows, slots.device_len[rows] - 1, ones, ones, 2)
            turn, _ = runner.executor.buffers.turn()
            self.grammars.wait(self.grammars.fill(runner.executor.masks(turn), slots, schedule))
            logits = line.expand(2, -1).contiguous().to(runner.executor.backend.device)
            beside, token = runner.executor.draw(logits, sampling_input(slots, rows), rows, turn=turn).tolist()
            return token, beside
        finally:
            for slot in taken:
                slots.give_back(slot)
