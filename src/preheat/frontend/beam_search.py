"""A beam search as a request.

It makes rounds of requests for one token after each beam, until its choices are known.
A beam's keys and values are found in the prefix cache. A cache hit has the bits of a new computation, so the scores do.
"""

from __future__ import annotations

from preheat.core import SamplingParams, TokenLogprobs
from preheat.frontend.beams import Beam, Beams, BeamSearchParams
from preheat.frontend.outputs import BeamSearchOutput, BeamSearchSequence
from preheat.frontend.request_state import Choice, Launcher, RequestState


class BeamSearch:
    """The beam search of ``state``; in the end, ``state`` has the best beams as choices, or an error."""

    def __init__(self, state: RequestState, params: BeamSearchParams) -> None:
        self._state, self._params = state, params
        self._beams = Beams(params, len(state.prompt_ids), state.tokenizer.eos_ids)
        self.round: list[RequestState] = []
        self._over = False

    def begin(self, frontend: Launcher) -> None:
        """Start the first round; the others follow as answers come."""
        self._frontend = frontend
        self._ask()

    def abort(self) -> None:
        """End the search because its client has gone."""
        self._over = True
        for asked in self.round:
            if not asked.finished:
                self._frontend.abort(asked)

    def output(self) -> BeamSearchOutput:
        """Return the sequences as vLLM's offline search returns them, prompt included."""
        return BeamSearchOutput([self._sequence(beam) for beam in self._beams.best()])

    def _ask(self) -> None:
        state = self._state
        alternatives = max(2 * self._params.beam_width, state.params.logprobs or 0)
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=1, logprobs=alternatives, ignore_eos=True, detokenize=False
        )
        self.round = [
            RequestState(
                state.request_id, None, [*state.prompt_ids, *beam.tokens], params, 1, state.tokenizer,
                cache_salt=state.cache_salt, segments=state.segments, priority=state.priority,
                lora_name=state.lora_name, data_parallel_rank=state.data_parallel_rank, on_change=self._answered,
            )
            for beam in self._beams.live
        ]  # fmt: skip
        for asked in self.round:
            self._frontend.launch(asked)

    def _answered(self) -> None:
        """Take note that a request of the round has ended; advance when all have."""
        if self._over:
            return
        error = next((asked.error for asked in self.round if asked.error), None)
        if error is not None:
            self.abort()
            self._state.error = error
        elif not all(asked.finished for asked in self.round):
            return
        else:
            self._advance()
            if not self._over:
                self._ask()
                return
        if self._state.on_change is not None:
            self._state.on_change()

    def _advance(self) -> None:
        reports = [entry for asked in self.round for choice in asked.choices for entry in choice.logprobs or ()]
        if not self._beams.live[0].tokens:  # later rounds hit the search's own blocks
            self._state.cached_tokens = self.round[0].cached_tokens
        self._beams.advance(reports)
        self._over = self._beams.over
        if self._over:
            self._state.choices = [self._choice(*each) for each in enumerate(self._beams.best())]

    def _choice(self, index: int, beam: Beam) -> Choice:
        state, params = self._state, self._state.params
        choice = Choice(state, index, index, state.new_detokenizer(), None)
        last = len(beam.tokens) - 1
        for place, (token, entry) in enumerate(zip(beam.tokens, beam.logprobs, strict=True)):
            hidden = beam.completed and place == last and not params.include_stop_str_in_output
            shown = TokenLogprobs(token, entry.logprob, entry.rank, entry.top[: params.logprobs])
            choice.push(token, shown, hidden)
        choice.finish("stop" if beam.completed else "length")
        return choice

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        state, tokens = self._state, [*self._state.prompt_ids, *beam.tokens]
        hidden, skips = beam.completed and not self._params.include_stop_str_in_output, state.params.skip_special_tokens
        shown = tokens[:-1] if hidden else tokens
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[state.position(entry) for entry in beam.logprobs],
            cum_logprob=beam.cum_logprob,
            text=state.tokenizer.decode(shown, skips) if state.tokenizer.speaks else None,
            finish_reason="stop" if beam.completed else "length",
        )
