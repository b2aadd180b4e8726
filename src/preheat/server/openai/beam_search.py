"""Beam search over HTTP: vLLM's ``use_beam_search`` and ``length_penalty``; ``n`` is the beam width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.params_checker import check_params
from preheat.frontend.request_state import RequestState
from preheat.server.openai.schema import CompletionRequest, Sampling

_TAKEN = frozenset(
    "n max_tokens temperature seed ignore_eos include_stop_str_in_output skip_special_tokens logprobs "
    "truncate_prompt_tokens truncation_side".split()
)
_USUAL = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def search_params(body: Sampling, given: Mapping[str, object]) -> SamplingParams:
    """Return the parameters of a search, from the fields that the client has ``given``.

    The checkpoint's recommendations are ignored, as they concern sampling. Raises InvalidRequest, naming the field, for
    fields that a search does not use.
    """
    if body.stream:
        raise InvalidRequest(
            "beam search cannot be streamed, because the best sequences are known only at the end: set stream to false",
            param="stream",
        )
    if isinstance(body, CompletionRequest) and body.best_of not in {None, body.n or 1}:
        raise InvalidRequest("beam search returns its n best sequences: leave best_of out", param="best_of")
    stated = {name: value for name, value in given.items() if value is not None}
    for name, value in stated.items():
        if name not in _TAKEN and value not in (_USUAL[name], [], {}):
            raise InvalidRequest(f"beam search does not look at {name}: leave one of them out", param=name)
    return check_params({"max_tokens": None, "temperature": 0.0, **stated})


def as_searches(frontend: Frontend, body: Sampling, states: Sequence[RequestState]) -> None:
    """Turn ``states`` into searches if ``body`` asks for beam search."""
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if body.use_beam_search:
        for state in states:
            frontend.input.search(state, penalty, "n")
    elif penalty != 1:
        raise InvalidRequest("length_penalty is about beam search: set use_beam_search", param="length_penalty")
