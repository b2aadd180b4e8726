"""Grammars and their states over the tokens of one model, for any library.

A mask is a row of int32 words; bit i % 32 of word i // 32 says whether token i is allowed.

A mask is made in this order. The grammar allows the tokens that may continue its text. Where the text may end, all stop
ids of the request are allowed too. Then ``min_tokens`` and ``ignore_eos`` remove the stop ids that they concern, unless
nothing else is left: a complete text that cannot go on ends all the same. Before the grammar begins, in a model's
reasoning, no stop id is allowed: a text that has not begun is not complete.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np

from preheat.core import Request, SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.grammar.budget import Budget
from preheat.ops.sampling import allowed
from preheat.utils.reasoning import Phase, Sign, phase_after

WORD = 32
_FIRST_WORD = re.compile(rb"\W")


class Matcher(Protocol):
    """A library's own state of a grammar."""

    def deep_copy(self) -> Matcher:
        """Return a copy that changes independently."""

    def consume_token(self, token: int) -> bool:
        """Move on behind ``token``; False, now and from then on, if the grammar does not allow it."""

    def is_error(self) -> bool:
        """Return whether the grammar cannot go on: a token was refused, or it became too complex."""

    def get_error(self) -> str:
        """Return the reason why the grammar cannot go on."""

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens of the text that must follow; other tokens may spell the same text."""


class Library(Protocol):
    """A library of grammars over the tokens of one model.

    Logits are of ``vocab_size`` tokens, so masks have ``words`` words. ``end``: a token that never stands for text; in
    the library's own masks it says that the text may end.
    """

    vocab_size: int
    words: int
    end: int

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of ``params``. May take seconds.

        Raises InvalidRequest, naming the part, if there is no grammar.
        """

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` never stands for text."""

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of ``tokens``."""

    def fill(self, masks: np.ndarray, rows: Sequence[Row]) -> None:
        """Write masks, int32 [rows, words]. Nobody looks at the masks behind a draft that the grammar refuses."""


class Grammar:
    """A compiled grammar. Its states share structures that grow in use. Without a ``matcher`` it allows all."""

    def __init__(self, backend: Library, matcher: Any) -> None:
        self.backend, self._matcher = backend, matcher

    def state(self, request: Request) -> State:
        """Return the state behind the tokens that the client of ``request`` has, mostly none.

        Raises InvalidRequest if no token could end the text, or if the grammar refuses one of these tokens.
        """
        if self._matcher is None:
            return State(self.backend, None, request).resumed(request)
        if not request.stop_ids:
            raise InvalidRequest(
                "structured_outputs needs a token that ends the text: the model has no end-of-sequence token; give "
                "stop_token_ids",
                param="structured_outputs",
            )
        return State(self.backend, self._matcher.deep_copy(), request).resumed(request)

    def explore(self, tokens: int, walks: int) -> int:
        """Build the states on ``walks`` paths through the grammar.

        The paths have at most ``tokens`` tokens, and are the same at every call. Return the number of masks computed.
        Raises ValueError if the grammar cannot go on from a state.
        """
        if self._matcher is None:
            return 0
        mask, count = np.zeros((1, self.backend.words), np.int32), 0
        for seed in range(walks):
            draw = np.random.default_rng(seed)
            state = State(self.backend, self._matcher.deep_copy(), _NO_REQUEST)
            for _ in range(tokens):
                self.backend.fill(mask, [(state, 0, ())])
                ids = np.flatnonzero(allowed(mask[0], self.backend.vocab_size))
                count += 1
                if not len(ids) or state.accept(int(draw.choice(ids))):
                    break
            if state.error:
                raise ValueError(state.error)
        return count


class State:
    """The state of one sequence's grammar; see :class:`preheat.schedule.grammar.GrammarState`.

    ``bans``: stop ids may have to be removed from its masks. ``phase``: the progress of the reasoning; the text is free
    within it. Without a ``matcher``, the text is free to its end. ``rules`` and ``budget``: other limits of the
    request's parameters. The budget's end of the reasoning wins over everything else.
    """

    def __init__(self, backend: Library, matcher: Any, request: Request) -> None:
        self.matcher, self.error = matcher, ""
        params = request.params
        chosen = set(params.stop_token_ids or ())
        stops, own = list(request.stop_ids), [id for id in request.stop_ids if id not in chosen]
        words = backend.words
        self._stops, self._model_stops = _mask_of(stops, words), _mask_of(own, words)
        # Stop ids that are text to the grammar would end the sequence within the text.
        texts = _mask_of([id for id in own if not backend.is_special(id)], words)
        self._ban_stops, self._ban_model_stops, self._ban_texts = map(
            _parts_of, (self._stops, self._model_stops, texts)
        )
        self.rules = Rules(request, words) if params.allowed_token_ids or request.bad_words else None
        self.budget = None if request.thinking is None else Budget(request.thinking, self._is_space)
        self._min_tokens, self._ignore_eos, self._accepted = params.min_tokens, params.ignore_eos, 0
        self.bans = params.min_tokens > 0 or params.ignore_eos or bool(texts.any())
        self._backend, self._signs, self.phase = backend, _signs(params.structured_outputs), Phase.WITHIN
        asked = params.structured_outputs
        self._header = _Header(backend, *asked.after_header) if asked and asked.after_header else None
        if matcher is not None and Sign.END not in self._signs.values():
            self.phase = Phase.NEVER
        elif Sign.START in self._signs.values():
            self.phase = Phase.UNKNOWN
        self._first = matcher.deep_copy() if self.phase is Phase.UNKNOWN else None  # before any white space
        starts = [id for id, sign in self._signs.items() if sign is Sign.START]
        self._start = _parts_of(_mask_of(starts, words))
        ends = _mask_of([id for id in stops if id not in self._signs], words)
        self._unfinished = ends if matcher is not None else np.zeros_like(ends)

    def resumed(self, request: Request) -> State:
        """Accept the delivered tokens of ``request`` and return the state. Raises InvalidRequest."""
        for place, token in enumerate(request.delivered):
            if error := self.accept(token):
                raise InvalidRequest(f"the request cannot resume: its output token {place} breaks its rules: {error}")
        return self

    def accept(self, token: int) -> str:
        if self.error:
            return self.error
        self._accepted += 1
        if self.rules is not None:
            self.rules.recent.append(token)
        if self.budget is not None:
            self.budget.accept(token)
        before, sign = self.phase, self._sign(token, self.phase, self._header)
        self.phase = phase_after(before, sign)
        self._header = self._header and self._header.behind(token)
        if self.phase is Phase.WITHIN:
            if before is Phase.UNKNOWN:
                self.matcher = self._first
        elif not (before is Phase.WITHIN and sign is Sign.END) and not self.matcher.consume_token(token):
            reason = str(self.matcher.get_error()).partition("\n")[0]
            self.error = f"the grammar of structured_outputs does not allow token {token}: {reason}"
        return self.error

    def forced(self) -> Sequence[int]:
        return [] if self.error or not self.phase.is_content else self.matcher.compute_ff_tokens()

    def _sign(self, token: int, phase: Phase, header: _Header | None) -> Sign:
        """Return the meaning of ``token`` in ``phase`` behind ``header``; white space matters only at the beginning."""
        found = self._signs.get(token)
        if found is Sign.END and header is not None and not header.counts:
            return Sign.TEXT
        if found is None and phase is Phase.UNKNOWN and self._is_space(token):
            return Sign.SPACE
        return found or Sign.TEXT

    def _is_space(self, token: int) -> bool:
        return self._backend.text([token]).isspace()

    def _phases(self, drafts: Sequence[int]) -> list[Phase]:
        """Return the phases [1 + drafts]: before the first draft, and behind each of ``drafts``."""
        phases, header = [self.phase], self._header
        for draft in drafts:
            phases.append(phase_after(phases[-1], self._sign(draft, phases[-1], header)))
            header = header and header.behind(draft)
        return phases

    def fill_free(self, masks: np.ndarray, drafts: Sequence[int]) -> list[Row]:
        """Write the masks of the free text into ``masks``, int32 [1 + drafts, words].

        Return the rows for all other masks, with places in ``masks``.
        """
        if self.phase.is_content:
            return [(self, 0, drafts)]
        phases, rows = self._phases(drafts), list[Row]()
        begin = phases.index(Phase.WITHIN) if Phase.WITHIN in phases else len(masks)
        end = next((ahead for ahead in range(begin, len(masks)) if phases[ahead] is not Phase.WITHIN), len(masks))
        if begin:
            rows.append((self, 0, drafts[: begin - 1]))
        for ahead in range(begin, end):
            early = self._accepted + ahead < self._min_tokens
            banned = self._stops if early else self._model_stops if self._ignore_eos else np.int32(0)
            masks[ahead] = ~(banned | self._unfinished)
        if end < len(masks):
            rows.append((self._behind(drafts[:end]), end, drafts[end:]))
        return rows

    def _behind(self, drafts: Sequence[int]) -> State:
        """Return the state behind ``drafts``; the last draft ends the reasoning."""
        found = copy(self)
        found.matcher, found.phase = (self._first or self.matcher).deep_copy(), Phase.ENDED
        found._accepted += len(drafts)
        if self._signs.get(drafts[-1]) is Sign.CALL:
            found.matcher.consume_token(drafts[-1])
        return found

    def add_start(self, mask: np.ndarray, drafts: Sequence[int]) -> None:
        """Allow the reasoning to begin in the ``mask`` behind ``drafts``, if it may."""
        if self._phases(drafts)[-1] is Phase.UNKNOWN:
            words, bits = self._start
            mask[words] |= bits

    @property
    def ruled(self) -> bool:
        """Whether :meth:`keep_rules` may remove a token from a mask."""
        return self.rules is not None or self.budget is not None

    def keep_rules(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Remove the tokens that rules and budget forbid from ``masks``, int32 [1 + drafts, words]."""
        for ahead, mask in enumerate(masks):
            forced = None if self.budget is None else self.budget.forced(drafts[:ahead])
            if forced is not None:
                mask[:] = 0
                mask[forced // WORD] = _bit(forced)
            elif self.rules is not None:
                self._keep_rules(self.rules, mask, drafts[:ahead])

    def _keep_rules(self, rules: Rules, mask: np.ndarray, drafts: Sequence[int]) -> None:
        np.bitwise_and(mask, rules.mask(drafts), out=mask)
        if not mask.any() and not drafts:
            self.error = "allowed_token_ids, bad_words and structured_outputs together leave no token"
            mask[:] = -1

    def add_ends(self, mask: np.ndarray, ends: bool, ahead: int) -> None:
        """Finish the ``mask``, int32 [words], ``ahead`` tokens behind the state; ``ends``: the text may end there."""
        if ends and self.matcher.is_error():  # the mask would end a text that is not complete
            self.error = f"the grammar of structured_outputs cannot go on: {self.matcher.get_error()}"
            mask[:] = -1
            return
        if ends:
            mask |= self._stops
        early = self._accepted + ahead < self._min_tokens
        if early or self._ignore_eos or not ends:
            words, bits = self._ban_stops if early else self._ban_model_stops if self._ignore_eos else self._ban_texts
            banned = mask[words] & bits
            if banned.any():
                mask[words] &= ~bits
                if not mask.any():
                    mask[words] = banned


class _Header:
    """The text behind the last ``token``, for ``after_header``, as long as it may be the ``word``."""

    def __init__(self, backend: Library, token: int, word: str) -> None:
        self._backend, self._token, self._word = backend, token, word.encode()
        self._text: bytes | None = None

    @property
    def counts(self) -> bool:
        """Whether ``word`` is the first word behind the token."""
        return self._text is not None and _FIRST_WORD.split(self._text.lstrip(), maxsplit=1)[0] == self._word

    def behind(self, token: int) -> _Header:
        """Return the header with ``token`` behind it."""
        if token != self._token and (self._text is None or len(self._text.lstrip()) > len(self._word)):
            return self
        found = copy(self)
        more = b" " if self._backend.is_special(token) else self._backend.text([token])
        found._text = b"" if token == self._token else (self._text or b"") + more
        return found


class Rules:
    """The tokens that ``allowed_token_ids`` and ``bad_words`` allow behind the ``recent`` tokens of an output."""

    def __init__(self, request: Request, words: int) -> None:
        allowed = request.params.allowed_token_ids
        self._allowed = np.full(words, -1, np.int32) if allowed is None else _mask_of(allowed, words)
        self._bad = [(word[:-1], word[-1]) for word in request.bad_words]
        self.recent: deque[int] = deque(maxlen=max((len(begin) for begin, _ in self._bad), default=0))

    def mask(self, drafts: Sequence[int]) -> np.ndarray:
        """Return the tokens that are allowed behind ``drafts``, int32 [words]: none that would complete a bad word."""
        text, mask = [*self.recent, *drafts], self._allowed.copy()
        for begin, last in self._bad:
            if not begin or text[-len(begin) :] == begin:
                mask[last // WORD] &= ~np.int32(_bit(last))
        return mask


Row = tuple[State, int, Sequence[int]]
"""A state, the place of its first mask, and draft tokens; one more mask follows for each draft."""


def add_ends(masks: np.ndarray, rows: Sequence[Row], end: int) -> None:
    """Finish the ``masks`` of a library; in them, the token ``end`` says that a text may end."""
    word, bit = end // WORD, np.int32(_bit(end))
    ending = masks[:, word] & bit != 0
    for state, place, drafts in rows:
        for ahead in range(1 + len(drafts)):
            ends = bool(ending[place + ahead])
            if ends or state.bans:
                if ends:
                    masks[place + ahead, word] &= ~bit
                state.add_ends(masks[place + ahead], ends, ahead)
            if state.phase is Phase.UNKNOWN:
                state.add_start(masks[place + ahead], drafts[:ahead])


def _signs(params: StructuredOutputsParams | None) -> dict[int, Sign]:
    """Return the tokens that begin or end the reasoning before a text of ``params``."""
    if params is None or params.after_token_id is None:
        return {}
    starts = {} if params.start_token_id is None else {params.start_token_id: Sign.START}
    return starts | dict.fromkeys(params.call_token_ids, Sign.CALL) | {params.after_token_id: Sign.END}


def _bit(token: int) -> int:
    """Return the bit of ``token`` in its word, as int32."""
    return int(np.uint32(1 << token % WORD).view(np.int32))


def _mask_of(tokens: Sequence[int], words: int) -> np.ndarray:
    """Return the mask, int32 [words], of ``tokens``; tokens beyond the mask are left out."""
    mask = np.zeros(words, np.int32)
    for token in tokens:
        if 0 <= token < words * WORD:
            mask[token // WORD] |= np.int32(_bit(token))
    return mask


def _parts_of(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and the values of the nonzero words of ``mask``.

    There are few, so they are quickly applied to a row of masks.
    """
    words = np.flatnonzero(mask)
    return words, mask[words]


_NO_REQUEST = Request(0, [], SamplingParams(), seed=0, max_tokens=1)
