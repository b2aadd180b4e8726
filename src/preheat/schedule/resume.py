"""The checks of a request that resumes behind tokens that its client has.

The law. For every request and every k: going on behind its first k tokens gives the tokens, log-probabilities and
logits that the uninterrupted run has from k on. Prompt, seed, parameters and limits stay the same; the k tokens are
output. Tokens that were appended to the prompt instead would move the noise, and change penalties, grammars and limits.
"""

from __future__ import annotations

from preheat.core import Request
from preheat.errors import InvalidRequest


def check_resume(request: Request, adapter: str) -> None:
    """Raise InvalidRequest if ``request`` cannot go on; ``adapter`` is the digest of the adapter that it gets."""
    resume = request.resume
    if resume is None:
        return
    if resume.tokens and min(resume.tokens) < 0:
        raise InvalidRequest(f"the request cannot resume: its output has the token {min(resume.tokens)}")
    if len(resume.tokens) >= request.max_tokens:
        raise InvalidRequest(
            f"the request cannot resume: its output has {len(resume.tokens)} tokens already, and max_tokens is "
            f"{request.max_tokens}"
        )
    if (end := _end_of(request, resume.tokens)) is not None:
        raise InvalidRequest(
            f"the request cannot resume: its output ends at token {end}, the stop token {resume.tokens[end]}"
        )
    if resume.adapter not in (None, adapter):
        raise InvalidRequest(
            f"the request cannot resume: the adapter {request.lora_name!r} has the digest {adapter or 'of none'} here, "
            f"and its output came from {resume.adapter or 'the base model'}",
            param="model",
        )


def _end_of(request: Request, tokens: list[int]) -> int | None:
    """Return the index of the first token that ends the sequence, None if no token does."""
    stops, least = set(request.stop_ids), 0 if request.params.masked else request.params.min_tokens
    return next((place for place, token in enumerate(tokens) if place >= least and token in stops), None)
