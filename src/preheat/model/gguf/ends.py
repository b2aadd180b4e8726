"""The tokens that end an answer, in a GGUF file with any tokenizer."""

from __future__ import annotations

from preheat.model.gguf.description import Description

CONTROL = 3
"""Kind of a token that is no text."""

ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
    "<|end_of_text|>", "<end_of_utterance>", "<|return|>", "<|call|>",
)  # fmt: skip
"""Control tokens that end an answer, as in llama.cpp: files name one end of text, and models have several."""


def ends_of(model: Description) -> list[int]:
    """Return the ids of the named ends, and of control tokens in :data:`ENDS`."""
    named = (model.field(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    tokens = model.field("tokenizer.ggml.tokens", list) or []
    types = model.field("tokenizer.ggml.token_type", list) or []
    both = enumerate(zip(tokens, types, strict=False))
    known = (id for id, (token, kind) in both if kind == CONTROL and token in ENDS)
    return sorted({*(id for id in named if id is not None and id >= 0), *known})
