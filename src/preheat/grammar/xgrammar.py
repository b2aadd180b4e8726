"""xgrammar: the other library of grammars, chosen by ``--structured-outputs-config '{"backend": "xgrammar"}'``.

It walks the text of tokens, never of special tokens. For each grammar it precomputes the allowed tokens of each state.
The parts of schemas and regular expressions that it would not keep to are refused here, by
:mod:`preheat.grammar.xgrammar_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from preheat.core import StructuredOutputsParams
from preheat.grammar.source import refused
from preheat.grammar.state import Grammar, Row, add_ends
from preheat.grammar.xgrammar_source import compiled, plain_message
from preheat.ops.sampling import words_of


class XGrammar:
    """Grammars over the tokens of ``tokenizer``, for logits of ``vocab_size`` tokens.

    ``tokenizer`` is the text of a tokenizer.json. Masks are computed by ``threads`` threads. Raises ValueError if the
    tokenizer's tokens are not made of bytes, or if it has no special token.
    """

    def __init__(self, tokenizer: str, vocab_size: int, threads: int) -> None:
        import xgrammar
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer.from_str(tokenizer)
        special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special and id < vocab_size}
        if not special:
            raise ValueError("it has no special token")
        self.vocab_size, self.words, self.end = vocab_size, words_of(vocab_size), min(special)
        fast = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
        found = xgrammar.TokenizerInfo.from_huggingface(fast, vocab_size=vocab_size, stop_token_ids=[self.end])
        if found.vocab_type is xgrammar.VocabType.RAW:
            raise ValueError("its tokens are not made of bytes")
        words = [""] * vocab_size  # without a text a token is never allowed
        for word, id in backend.get_vocab(with_added_tokens=True).items():
            if id < vocab_size and id not in special:
                words[id] = word
        info = xgrammar.TokenizerInfo(
            words, found.vocab_type, vocab_size=vocab_size, stop_token_ids=[self.end],
            add_prefix_space=found.add_prefix_space,
        )  # fmt: skip
        self._encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        self._text: list[bytes] = info.decoded_vocab
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        self._matcher: Callable[..., Any] = xgrammar.GrammarMatcher
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=threads)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of ``params``. May take seconds.

        Raises InvalidRequest, naming the part, if there is no grammar.
        """
        try:
            grammar = compiled(self._compiler, params)
        except RuntimeError as error:
            raise refused(params.kind, f"it cannot be compiled: {plain_message(error)}") from error
        except RecursionError:
            raise refused(params.kind, "it is nested too deeply") from None
        inner, mask = self._matcher(grammar), np.zeros((1, self.words), np.int32)
        inner.fill_next_token_bitmask(mask)
        if not mask.any():
            raise refused(params.kind, "no text satisfies it")
        return Grammar(self, Matcher(inner, self._encode))

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` never stands for text."""
        return not self._text[token]

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of ``tokens``."""
        return b"".join(self._text[token] for token in tokens)

    def fill(self, masks: np.ndarray, rows: Sequence[Row]) -> None:
        """Write masks, int32 [rows, words].

        Each of ``rows`` has a state, the place of its mask, and draft tokens. One more mask follows for each draft.
        """
        self._batch.batch_fill_next_token_bitmask(
            [state.matcher.inner for state, _, _ in rows], masks, [place for _, place, _ in rows]
        )
        for state, place, drafts in rows:
            if len(drafts):
                self._fill_behind(masks[place + 1 : place + 1 + len(drafts)], state.matcher.inner, drafts)
        add_ends(masks, rows, self.end)

    def _fill_behind(self, masks: np.ndarray, inner: Any, drafts: Sequence[int]) -> None:
        """Write the ``masks``, int32 [drafts, words], behind each of ``drafts``, up to the first refused draft."""
        masks[:] = -1
        taken = 0
        for draft in drafts:
            if draft == self.end or not inner.accept_token(draft):
                break
            inner.fill_next_token_bitmask(masks, taken)
            taken += 1
        if taken:
            inner.rollback(taken)


class Matcher:
    """A :class:`preheat.grammar.state.Matcher` around ``inner``, the library's matcher.

    The library returns a forced text without tokens: ``encode`` cuts it into tokens.
    """

    def __init__(self, inner: Any, encode: Callable[[str], list[int]]) -> None:
        self.inner, self._encode, self._error = inner, encode, ""

    def deep_copy(self) -> Matcher:
        return Matcher(self.inner.fork(), self._encode)

    def consume_token(self, token: int) -> bool:
        if not self._error and not self.inner.accept_token(token):
            self._error = "its text does not go on with it"
        return not self._error

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def compute_ff_tokens(self) -> list[int]:
        text = self.inner.find_jump_forward_string()
        return self._encode(text) if text else []
