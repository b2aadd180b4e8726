"""Sampling parameters: each is declared once, with its range, its help and the part where it acts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from preheat.core.constraints import INT32_MAX, RepetitionDetectionParams, StructuredOutputsParams
from preheat.utils.text import plain_number

MAX_LOGIT_BIAS = 1024
MAX_LOGPROB_IDS = 128
"""Most ``logprob_token_ids`` of a request; vLLM's limit."""


class SamplingField(NamedTuple):
    """Metadata of a sampling parameter, besides its name, type and default.

    - ``acts``: the part where it takes effect; "frontend" means before the engine sees the request.
    - ``low``, ``high``: the bounds of a number, inclusive.
    - ``recommended``: the key of generation_config.json that may replace the default.
    - ``http``: whether both completion endpoints accept it by this name.
    """

    help: str
    acts: Literal["sampler", "grammar", "scheduler", "frontend", "text"]
    low: float | None = None
    high: float | None = None
    recommended: str | None = None
    http: bool = True


_Row = SamplingField


_MASKED = ("structured_outputs", "allowed_token_ids", "bad_words", "thinking_token_budget")

_NOT_HERE = {
    "prompt_logprob_token_ids": "prompt_logprobs report the most likely tokens at each position and the prompt's own",
    "routed_experts_prompt_start": "answers contain tokens and logprobs, but not the experts used",
    "watermarking": "there is one way to draw tokens, and a seed repeats it",
}
"""Parameters of vLLM without a meaning here, and the reasons."""


class RequestOutputKind(Enum):
    """The contents of each result of a running request; names and numbers are vLLM's."""

    CUMULATIVE = 0  # all output so far
    DELTA = 1  # the new output
    FINAL_ONLY = 2  # one result, at the end


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The choice of a request's tokens.

    Names and meanings follow vLLM and the OpenAI API.

    The command line, the HTTP bodies, the range checks and the OpenAPI document are made from this table. Raises
    ValueError for a value out of range.

    - ``seed``: None draws a seed.
    - ``max_tokens``: None means up to the model's length.
    - ``logprobs``, ``prompt_logprobs``: alternatives per position (0: the chosen token alone; -1: ``--max-logprobs``).
    - ``truncate_prompt_tokens``: -1 keeps as many as fit beside ``max_tokens``.
    - ``logprob_token_ids``: the alternatives of each generated token, instead of the ``logprobs`` most likely ones.

    The fields after the table are for callers of the library; nothing that computes reads them. ``output_kind`` and
    ``stream_interval`` (tokens) set when ``LLMEngine`` and ``AsyncLLM`` report. With ``flat_logprobs``, logprobs come
    as :class:`~preheat.frontend.flat_logprobs.FlatLogprobs`. ``spaces_between_special_tokens``, ``extra_args`` (for
    plugins) and ``skip_clone`` change nothing in the tokens, as with vLLM's own samplers and fast tokenizers. The last
    three fields are refused unless they ask for nothing. Values may be changed until a request is made, and are checked
    again then.
    """

    n: Annotated[int, _Row("choices per prompt", "frontend", 1, 128)] = 1
    temperature: Annotated[float, _Row("0 is greedy", "sampler", 0, 100, "temperature")] = 1.0
    top_p: Annotated[float, _Row("keep the top tokens with this total probability", "sampler", 0, 1, "top_p")] = 1.0
    top_k: Annotated[int, _Row("keep this many top tokens; 0 or -1 keeps all", "sampler", -1, INT32_MAX, "top_k")] = 0
    min_p: Annotated[float, _Row("drop tokens below this share of the top token's", "sampler", 0, 1, "min_p")] = 0.0
    presence_penalty: Annotated[float, _Row("subtracted from the logits of generated tokens", "sampler", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, _Row("subtracted for each time a token was generated", "sampler", -2, 2)] = 0.0
    repetition_penalty: Annotated[
        float,
        _Row("divides positive logits of seen tokens, multiplies others", "sampler", 0, 100, "repetition_penalty"),
    ] = 1.0
    logit_bias: Annotated[dict[int, float] | None, _Row('added to logits, as JSON: {"42": -5}', "sampler")] = None
    seed: Annotated[
        int | None, _Row("the same seed gives the same tokens; random by default", "sampler", -(2**63), 2**64 - 1)
    ] = None
    stop: Annotated[list[str] | str | None, _Row("strings that end the text", "text")] = None
    stop_token_ids: Annotated[list[int] | None, _Row("token ids that end the text", "sampler")] = None
    include_stop_str_in_output: Annotated[bool, _Row("keep the stop string in the text", "text")] = False
    ignore_eos: Annotated[bool, _Row("continue after the end-of-sequence token", "frontend")] = False
    min_tokens: Annotated[int, _Row("minimum tokens to generate", "sampler", 0, INT32_MAX)] = 0
    max_tokens: Annotated[
        int | None, _Row("maximum tokens to generate", "scheduler", 1, INT32_MAX, "max_new_tokens")
    ] = 16
    logprobs: Annotated[
        int | None, _Row("alternatives for each token; -1 asks for the maximum", "sampler", -1, INT32_MAX, http=False)
    ] = None
    prompt_logprobs: Annotated[
        int | None, _Row("alternatives for each prompt token; -1 asks for the maximum", "sampler", -1, INT32_MAX)
    ] = None
    logprob_token_ids: Annotated[list[int] | None, _Row("token ids to report logprobs of, in any case", "sampler")] = (
        None
    )
    skip_reading_prefix_cache: Annotated[
        bool | None, _Row("compute the whole prompt, even if it is cached", "scheduler", http=False)
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, _Row("keep this many tokens of the prompt; -1 keeps as many as fit", "frontend", -1, INT32_MAX)
    ] = None
    truncation_side: Annotated[
        str | None, _Row("the end of a prompt to cut: left (the default) or right", "frontend")
    ] = None
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        _Row('end a text that repeats itself, as JSON: {"max_pattern_size": 8, "min_count": 4}', "text"),
    ] = None
    skip_special_tokens: Annotated[bool, _Row("leave special tokens out of the text", "text")] = True
    detokenize: Annotated[bool, _Row("convert tokens to text", "text", http=False)] = True
    allowed_token_ids: Annotated[list[int] | None, _Row("only these tokens can be drawn", "grammar")] = None
    bad_words: Annotated[list[str] | None, _Row("texts that must not be generated", "grammar")] = None
    thinking_token_budget: Annotated[
        int | None, _Row("maximum tokens of reasoning; -1 is no limit", "grammar", -1, INT32_MAX)
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, _Row('constraint on the text, as JSON: {"regex": "yes|no"}', "grammar")
    ] = None
    receipt: Annotated[bool, _Row("return a receipt, from which the answer can be given again", "scheduler")] = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    flat_logprobs: bool = False
    spaces_between_special_tokens: bool = True
    extra_args: dict[str, Any] | None = None
    skip_clone: bool = False
    prompt_logprob_token_ids: Any = None
    routed_experts_prompt_start: Any = None
    watermarking: Any = None

    def __post_init__(self) -> None:
        self._check_here()
        self.stop_token_ids = self.stop_token_ids and list(dict.fromkeys(self.stop_token_ids))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # rejects NaN as well
                raise ValueError(f"{name} must be between {plain_number(low)} and {plain_number(high)}, got {value}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if self.top_p <= 0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1 or above 0: a prompt has at least one token")
        if self.truncation_side not in (None, "left", "right"):
            raise ValueError(f"truncation_side must be left or right, got {self.truncation_side!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self._check_text()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty: no token could be drawn")
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_IDS:
            raise ValueError(
                f"logprob_token_ids has {len(self.logprob_token_ids or ())} ids, at most {MAX_LOGPROB_IDS} are allowed"
            )
        if not all(self.bad_words or ()):
            raise ValueError("bad_words must not contain an empty string")
        biases = (self.logit_bias or {}).values()
        if len(biases) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIAS} are allowed")
        for bias in biases:
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias values must be between -100 and 100, got {bias}")

    def _check_here(self) -> None:
        for name, reason in _NOT_HERE.items():
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name} is not supported: {reason}")

    def _check_text(self) -> None:
        if any(not s for s in self.stop_strings):
            raise ValueError("stop must not contain an empty string")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings are found in text: set detokenize to true, or use stop_token_ids")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, got {self.stream_interval}")

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make parameters from ``given``, where None means "not given"."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return a deep copy, or the same object with ``skip_clone``."""
        return self if self.skip_clone else deepcopy(self)

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def masked(self) -> tuple[str, ...]:
        """The given parameters that restrict the tokens by a mask, computed for each token."""
        return tuple(name for name in _MASKED if getattr(self, name) not in (None, []))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


SAMPLING_FIELDS: Mapping[str, SamplingField] = MappingProxyType(
    {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
        if hasattr(hint, "__metadata__")
    }
)
"""The rows of the table by name, in order."""

CALLERS_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name not in SAMPLING_FIELDS)
"""The fields without a row: only callers of the library set them."""

_RANGES = tuple(
    (name, field.low, field.high)
    for name, field in SAMPLING_FIELDS.items()
    if field.low is not None and field.high is not None
)


class Level(IntEnum):
    """The part of the sampler that a step runs. A row gets the same token at every sufficient level."""

    GREEDY = 0  # argmax only
    FILTERED = 1  # some row is sampled
    FULL = 2  # some row's logits are changed first: penalties, a grammar's mask, logit_bias, min_tokens

    @classmethod
    def of(cls, params: SamplingParams) -> Level:
        """Return the lowest level for rows with ``params``."""
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        if penalised or params.logit_bias or params.min_tokens or params.masked:
            return cls.FULL
        return cls.GREEDY if params.greedy else cls.FILTERED
