"""Texts around a pair of texts, for models that were taught to read such texts."""

from __future__ import annotations

from typing import NamedTuple


class PairTemplate(NamedTuple):
    """The text of a pair: ``before``, ``body`` with both texts, ``behind``. Only the body may be cut.

    A first text that begins with ``mark`` is written by a client that has put the template there itself.
    """

    before: str
    body: str
    behind: str
    mark: str

    def filled(self, first: str, second: str) -> str:
        """Return the body with both texts."""
        start, middle, end = self.body.split("{}")
        return f"{start}{first}{middle}{second}{end}"


_TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

QWEN3_RERANKER = PairTemplate(
    before=f"<|im_start|>system\n{_TASK}<|im_end|>\n<|im_start|>user\n",
    body=f"<Instruct>: {_INSTRUCTION}\n<Query>: {{}}\n<Document>: {{}}",
    behind="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    mark="<|im_start|>",
)
"""The template of Qwen3-Reranker (source: the model's card)."""
