"""llguidance: grammars over a tokenizer's tokens.

It computes many masks at once in its own threads and meanwhile holds no lock of Python. See
:mod:`preheat.grammar.state` for masks and states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preheat.core import StructuredOutputsParams
from preheat.grammar.guidance_source import grammar_source
from preheat.grammar.source import refused
from preheat.grammar.state import Grammar, Row, add_ends
from preheat.ops.sampling import words_of

ITEMS = 20_000
"""Items that a state of a parser may have. A thousand optional properties, in any order, have two thousand."""


class Guidance:
    """Grammars over the tokens of ``tokenizer``, for logits of ``vocab_size`` tokens.

    ``tokenizer`` is the text of a tokenizer.json. Masks are computed by ``threads`` threads. ``end`` is the tokenizer's
    own end-of-sequence token. Raises ValueError if llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, threads: int) -> None:
        from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size)
        self._matcher = LLMatcher
        self._limits = LLParserLimits(verbose_errors=False, max_items_in_row=ITEMS)
        self._executor = LLExecutor(num_threads=threads)
        self.vocab_size, self.words = vocab_size, words_of(vocab_size)
        self.end = int(self._tokenizer.eos_token)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of ``params``. May take seconds; Python's lock is free for nearly all of it.

        Raises InvalidRequest, naming the part, if there is no grammar.
        """
        source = grammar_source(params)
        matcher = self._matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise refused(params.kind, "no text satisfies it")
        if matcher.is_error():
            lines = [line.strip() for line in str(matcher.get_error()).splitlines() if line.strip()]
            raise refused(params.kind, f"it cannot be compiled: {' '.join(lines[:4])[:500]}")
        return Grammar(self, matcher)

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` never stands for text."""
        return bool(self._tokenizer.is_special_token(token))

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of ``tokens``."""
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def fill(self, masks: np.ndarray, rows: Sequence[Row]) -> None:
        """Write masks, int32 [rows, words].

        Each of ``rows`` has a state, the place of its mask, and draft tokens. One more mask follows for each draft.
        """
        plain = [(state.matcher, place) for state, place, drafts in rows if not len(drafts)]
        where = masks.ctypes.data, masks.strides[0], len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if len(plain) < len(rows):
            drafted = [(state.matcher, place, list(drafts)) for state, place, drafts in rows if len(drafts)]
            for _, place, drafts in drafted:  # nobody looks at the masks behind a draft that the grammar refuses
                masks[place + 1 : place + 1 + len(drafts)] = -1
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        add_ends(masks, rows, self.end)
