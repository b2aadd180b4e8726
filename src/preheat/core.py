"""Messages between the parts of the engine, in the order of a request's life.

- ``Request``: frontend to loop.
- ``Schedule``: scheduler to packer.
- ``Batch``: packer to executor; it has tensors, so it is in :mod:`preheat.execution`.
- ``StepResult``: executor to scheduler.
- ``Delta``: loop to frontend.

Messages between processes are :class:`msgspec.Struct`, sent as msgpack. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
import numpy as np

from preheat.errors import WireError
from preheat.utils.contract import Contract
from preheat.utils.exact_json import dumps, travels
from preheat.utils.text import plain_number
from preheat.utils.weight_transfer import Announced, TransferGroup

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

Transfer = Literal["load", "store"]
"""A copy of a block: "load" to the device, "store" to the host."""

MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 1024
MAX_LOGPROB_IDS = 128
"""Most ``logprob_token_ids`` of a request; vLLM's limit."""

MAX_PATTERN = 2048
"""Most tokens of a repeated pattern; the default limit of vLLM."""

OWN_ID = -2
"""The first id of dummy requests, which count down.

Ids of clients' requests are positive, and -1 is the sampler's empty row.
"""


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


_INT32 = 2**31 - 1
_Row = SamplingField


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint on the text of a request; names and meanings are vLLM's. Exactly one of the first six is given.

    - ``json``: a JSON schema, as an object or as its text.
    - ``regex``: a regular expression for the whole text.
    - ``choice``: texts; the whole text is one of them.
    - ``grammar``: a context-free grammar, in Lark's notation or in EBNF (GBNF).
    - ``json_object``: any JSON object.
    - ``structural_tag``: free text, where JSON follows certain beginnings; see docs/structured-outputs.md.
    - ``disable_any_whitespace``: JSON has no white space; by default it is bounded.
    - ``whitespace_pattern``: a regular expression for the white space between any two parts of JSON.
    - ``disable_additional_properties``: objects have only the properties in the schema, unless it says otherwise
      itself.
    - ``after_token_id``: the text is free up to this token, such as the end of reasoning; the constraint applies after
      it.
    - ``start_token_id``: the text is free only if it begins with this token, white space aside; otherwise the
      constraint applies from the first token on.
    - ``call_token_ids``: each of these tokens ends free text too, and is itself the first constrained token.
    - ``after_header``: a token and a word; ``after_token_id`` counts only if the word comes first after the last such
      token.

    A schema with numbers that msgpack would change is stored as text. Raises ValueError for a meaningless combination.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after_token_id: int | None = None
    start_token_id: int | None = None
    call_token_ids: tuple[int, ...] = ()
    after_header: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(_CONSTRAINTS)}; it has {said}")
        if self.choice is not None and not all(self.choice):
            raise ValueError("structured_outputs.choice must not hold an empty text")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace leaves no use for whitespace_pattern: give one of them")
        about_json = self.disable_any_whitespace or self.whitespace_pattern is not None
        if about_json and given[0] not in ("json", "json_object", "structural_tag"):
            raise ValueError(
                f"options of white space are about JSON: they have no meaning for structured_outputs.{given[0]}"
            )
        if self.disable_additional_properties and given[0] not in ("json", "structural_tag"):
            raise ValueError(f"disable_additional_properties has no meaning for structured_outputs.{given[0]}")
        if self.after_token_id is None and (
            self.start_token_id is not None or self.call_token_ids or self.after_header is not None
        ):
            raise ValueError(
                "start_token_id, call_token_ids and after_header say how free text ends: give after_token_id too"
            )
        for name in ("json", "structural_tag"):
            if not travels(value := getattr(self, name)):
                msgspec.structs.force_setattr(self, name, dumps(value))

    @property
    def kind(self) -> str:
        """The name of the given constraint, one of six."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RepetitionDetectionParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Repetition that ends a text; names and meanings are vLLM's.

    The text ends once its last tokens are ``min_count`` times the same pattern. The pattern has ``min_pattern_size``
    (0: 1) to ``max_pattern_size`` tokens; with ``max_pattern_size`` 0 the text never ends so. Raises ValueError for
    meaningless sizes.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN:
            raise ValueError(
                f"repetition_detection needs 0 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN}, got "
                f"{self.min_pattern_size} and {self.max_pattern_size}"
            )
        if self.max_pattern_size and not 2 <= self.min_count <= _INT32:
            raise ValueError(f"repetition_detection.min_count must be at least 2, got {self.min_count}")


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
    top_k: Annotated[int, _Row("keep this many top tokens; 0 or -1 keeps all", "sampler", -1, _INT32, "top_k")] = 0
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
    min_tokens: Annotated[int, _Row("minimum tokens to generate", "sampler", 0, _INT32)] = 0
    max_tokens: Annotated[int | None, _Row("maximum tokens to generate", "scheduler", 1, _INT32, "max_new_tokens")] = 16
    logprobs: Annotated[
        int | None, _Row("alternatives for each token; -1 asks for the maximum", "sampler", -1, _INT32, http=False)
    ] = None
    prompt_logprobs: Annotated[
        int | None, _Row("alternatives for each prompt token; -1 asks for the maximum", "sampler", -1, _INT32)
    ] = None
    logprob_token_ids: Annotated[list[int] | None, _Row("token ids to report logprobs of, in any case", "sampler")] = (
        None
    )
    skip_reading_prefix_cache: Annotated[
        bool | None, _Row("compute the whole prompt, even if it is cached", "scheduler", http=False)
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, _Row("keep this many tokens of the prompt; -1 keeps as many as fit", "frontend", -1, _INT32)
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
        int | None, _Row("maximum tokens of reasoning; -1 is no limit", "grammar", -1, _INT32)
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


PIECE = 64
"""Most positions of a piece of a prompt's embeddings."""


class Image(msgspec.Struct, array_like=True, weakref=True, frozen=True):
    """An image as the model's input, or a piece of a prompt's embeddings.

    ``pixels`` of an image are fp32 [channels, height, width]. An image of any size has a ``grid`` of rows and columns
    of cells, a position of a prompt each: its pixels are fp32 [patches, channels * size * size], cell by cell. A piece
    is [positions, hidden], at most :data:`PIECE` positions, of torch's type ``dtype``. An equal ``hash`` means equal
    pixels, and an equal grid.
    """

    hash: bytes
    pixels: bytes
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    grid: tuple[int, int] | None = None

    @property
    def cells(self) -> int:
        """Positions of an image with a grid."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1]


class Segment(msgspec.Struct, array_like=True):
    """The positions of a prompt from ``start`` up to ``end``, for ``image``.

    There is one position for each of the image's embeddings.
    """

    start: int
    end: int
    image: Image


class Thinking(msgspec.Struct, array_like=True, frozen=True):
    """The limit on a text's reasoning.

    ``left`` more tokens may come, then the tokens ``last``, which end the reasoning.

    With ``within`` the text begins in its reasoning. Otherwise the token ``start`` begins the reasoning, if it comes
    first, white space aside. ``ends`` are the tokens that end reasoning without a limit.
    """

    left: int
    within: bool
    start: int
    ends: tuple[int, ...]
    last: tuple[int, ...]


BACKGROUND_PRIORITY = 2**62
"""Priority from which requests yield.

A request that yields gives up its slot when another request waits for one.
"""

_SPAN = 2**60


def in_background(priority: int) -> int:
    """Return the priority of a request that yields to others.

    Yielding requests keep their order.
    """
    return BACKGROUND_PRIORITY + _SPAN + max(-_SPAN, min(priority, _SPAN))


class Resume(msgspec.Struct, array_like=True, frozen=True):
    """The output that a request's client has already; the sequence goes on behind it.

    ``tokens`` follow the prompt, and count as output: in noise, penalties, grammars, lengths and stops. ``adapter`` is
    the digest of the adapter that gave them, empty for the base model; None: any adapter of the request's name.
    """

    tokens: list[int]
    adapter: str | None = None


POOLS = ("MEAN", "MAX", "WEIGHTEDMEAN", "MEAN_SQRT_LEN", "ALL")
"""The ways to pool the states of all tokens. The ``prompt_logprobs`` of a pooling request is a place in this list."""


class BlockSource(msgspec.Struct, frozen=True):
    """An engine that read a prompt: where its blocks are, and the number of tokens that they cover."""

    host: str
    port: int
    tokens: int
    engine_id: str = ""


class Request(msgspec.Struct, tag="request"):
    """One sequence to run: a client's request with ``n`` choices becomes ``n`` of these.

    ``id`` is unique in a frontend and increases with arrival. ``seed`` is in [0, 2**64). ``max_tokens`` fits the
    model's length. ``stop_ids`` (at most ``MAX_STOP_IDS``) end the sequence after ``min_tokens``: the end-of-sequence
    ids, unless ``ignore_eos``, and ``stop_token_ids``. ``segments`` are in order and do not overlap.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    choice: int = 0
    stop_ids: list[int] = []
    cache_salt: str = ""  # part of every block's hash
    segments: list[Segment] = []
    bad_words: list[list[int]] = []  # token ids of the texts that params.bad_words forbid
    priority: int = 0  # lower values go first, and are preempted last; see BACKGROUND_PRIORITY
    lora_name: str = ""  # the adapter; empty: the base model
    data_parallel_rank: int | None = None  # the replica for it; None: the server's router chooses
    thinking: Thinking | None = None  # with params.thinking_token_budget
    resume: Resume | None = None  # the rest of the fields stay as they were when the sequence began
    source: BlockSource | None = None  # blocks of the prompt are pulled from there

    @property
    def delivered(self) -> list[int]:
        """The output tokens that the client has already."""
        return [] if self.resume is None else self.resume.tokens


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop this sequence and free its blocks.

    The client disconnected, or a stop string was found.
    """

    id: int


class Drain(msgspec.Struct, tag="drain"):
    """Finish the running requests, then exit; with ``now`` exit at once."""

    now: bool = False


class Wake(msgspec.Struct, tag="wake"):
    """End the engine's wait for messages: a thread of the engine has work for the loop."""


class Ask(msgspec.Struct, tag="ask"):
    """Request a Report from the engine."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget the contents of the prefix cache."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load an adapter and serve it as ``name``; AdapterReport answers, with the same ``id``.

    With ``in_place`` a taken name means the new adapter from now on; earlier requests keep theirs.
    """

    name: str
    path: str
    id: int = 0
    in_place: bool = False


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Serve ``name`` no longer. AdapterReport answers, with the same ``id``, when its last request has ended."""

    name: str
    id: int = 0


class Command(msgspec.Struct, tag="command"):
    """An operator's command to the whole engine.

    It is carried out between two steps, in order with the requests.

    An :class:`Outcome` with the same ``id`` answers it.

    - ``mode``: before a pause or sleep, running requests end with reason "abort", are waited for, or are kept.
    - ``level``: the level of a sleep.
    - ``tags``: the memory that wakes up; none means all.
    - ``path``: a folder of safetensors files with new weights, all below the folder ``root`` if one is given.
    - ``version``: the name of the new weights.
    - ``tensors``: the new weights by name, if both ends are one process.
    - ``announced``: the tensors that a trainer will send in the joined ``group``.
    """

    id: int
    name: Literal[
        "pause", "resume", "update_weights", "sleep", "wake_up",
        "init_weight_transfer_engine", "start_weight_update", "finish_weight_update", "audit",
    ]  # fmt: skip
    mode: Literal["abort", "wait", "keep"] = "abort"
    level: int = 1
    tags: list[str] = []
    path: str = ""
    root: str = ""
    version: str = ""
    tensors: Any = None
    group: TransferGroup | None = None
    announced: list[Announced] = []


class EngineState(msgspec.Struct):
    """The state of an engine.

    With ``paused`` no step runs. ``sleeping`` is the level of the sleep. ``weight_version`` names the weights;
    ``digest`` covers the logits of the boot check with them. ``blocked_reason``, if any, is the reason why no request
    is taken. ``contract`` has the engine's parts, None before the boot.
    """

    paused: bool = False
    sleeping: int | None = None
    weight_version: str = "default"
    digest: str = ""
    blocked_reason: str = ""
    contract: Contract | None = None


class Outcome(msgspec.Struct, tag="outcome"):
    """The answer to the Command ``id``.

    It has the state after the command, and the error if it failed.
    """

    id: int
    state: EngineState
    error: WireError | None = None


class Finish(msgspec.Struct, array_like=True):
    """The end of a sequence.

    ``stop_id`` is the stop token that ended it; ``error`` is set for reason "error".
    """

    reason: FinishReason
    stop_id: int | None = None
    error: WireError | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural logarithms of the model's distribution, before penalties and temperature, at one position.

    ``rank`` counts from 1. ``top`` has the most likely tokens in order; in a tie, the lowest id first. If a request has
    ``logprob_token_ids``, ``top`` has these instead, in their order.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, tag="delta"):
    """The results of one step: token ``tokens[i]`` for sequence ``ids[i]``.

    An id occurs k times for k tokens. ``tokens`` includes stop tokens. ``logprobs`` is by index i, ``finished`` and
    ``prompt_logprobs`` by id. ``started`` has, for each sequence that started in this step, the number of tokens found
    in the prefix cache.
    """

    ids: list[int] = []
    tokens: list[int] = []
    finished: dict[int, Finish] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    started: dict[int, int] = {}
    stats: Stats | None = None
    pooled: dict[int, bytes] = {}  # of a pooling engine: fp32 [hidden], by id
    adapters: dict[int, str] = {}  # the digests of the adapters of started sequences, by id; none for the base model
    digests: dict[int, int] = {}  # by index i, of the logits behind a token of a request that wants a receipt


class Stats(msgspec.Struct, tag="stats"):
    """Counters (since the start) and gauges of the engine, for ``/metrics``."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0  # tokens looked up on the host after misses in the device's cache
    external_hits: int = 0
    preemptions: int = 0
    blocks_moved: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0  # rows with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = []  # accepted tokens, by their position among a row's drafts
    grammars: GrammarStats | None = None
    audit: AuditStats | None = None  # sent after a pass
    kv_transfer: KvTransferStats | None = None
    engine: int = 0  # the replica; the server sets it
    corrupted_requests: int = 0  # requests that ended because of numbers that are not finite


class AuditStats(msgspec.Struct):
    """Counters of the audit. ``checks`` are checks of the boot that ran; ``slowest`` is the longest turn in seconds."""

    passes: int = 0
    slices: int = 0
    checks: int = 0
    faults: int = 0
    seconds: float = 0.0
    slowest: float = 0.0


class KvTransferStats(msgspec.Struct):
    """Counters of blocks that other engines send and take. ``failures`` are pulls that ended early, by reason."""

    pulls: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    pull_seconds: float = 0.0
    failures: dict[str, int] = {}
    sent_blocks: int = 0
    sent_bytes: int = 0
    refused_peers: int = 0

    @classmethod
    def sum(cls, each: Sequence[KvTransferStats]) -> KvTransferStats:
        """Return the sums of all counters."""
        failures: Counter[str] = Counter()
        for one in each:
            failures.update(one.failures)
        names = [name for name in cls.__struct_fields__ if name != "failures"]
        return cls(failures=dict(failures), **{name: sum(getattr(one, name) for one in each) for name in names})


class GrammarStats(msgspec.Struct):
    """Counters of structured outputs.

    ``mask_seconds`` is the time to compute masks, ``wait_seconds`` the part of it that the model did not hide.
    ``slowest_mask`` is the longest time for one step's masks; a state's first mask is slower than later ones.
    """

    compiled: int = 0
    reused: int = 0
    refused: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    wait_seconds: float = 0.0
    slowest_mask: float = 0.0


class Progress(msgspec.Struct, tag="progress"):
    """Progress of the engine's start: ``done`` of ``total`` items.

    ``eta_s`` is None while it cannot be estimated.
    """

    done: int
    total: int
    current: str
    eta_s: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine can run, within these limits. ``record`` is the warm-up record, as JSON.

    ``blocked_reason``, if any, is the reason why it takes no requests: a check at boot failed. ``max_prompt_len`` is
    None if only ``max_model_len`` limits the prompt. ``num_blocks`` counts blocks of all layers. ``digest`` covers the
    logits of the check. ``engine`` is the replica of the ``record``, as in Report. ``spare``: places behind
    ``max_model_len`` for a token that is never computed. ``contract`` has the engine's parts. ``sends``: where
    other engines get blocks, if this engine sends them.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: float
    record: bytes = b""
    blocked_reason: str = ""
    max_prompt_len: int | None = None
    digest: str = ""
    engine: int = 0
    spare: int = 0
    contract: Contract | None = None
    sends: BlockSource | None = None

    @property
    def places(self) -> int:
        """Places for a prompt and the tokens that follow it."""
        return self.max_model_len + self.spare


class Report(msgspec.Struct, tag="report"):
    """The answer to Ask: the current warm-up record, as JSON. The server sets ``engine``, the replica."""

    record: bytes
    engine: int = 0


class AdapterReport(msgspec.Struct, tag="adapter_report"):
    """The answer to LoadAdapter or UnloadAdapter ``id``: done, unless there is an ``error``."""

    name: str
    id: int = 0
    error: WireError | None = None


class Died(msgspec.Struct, tag="died"):
    """The engine's last message: ``error`` ended it."""

    error: WireError


class Leaving(msgspec.Struct, tag="leaving"):
    """The engine was asked to end: it wants to finish its requests and to get no others."""


class Declined(msgspec.Struct, tag="declined"):
    """A member has no room for the request ``id`` now, or has ``lost`` it though others go on."""

    id: int
    lost: bool = False


ToEngine = Request | Cancel | Drain | Wake | Ask | ResetPrefixCache | LoadAdapter | UnloadAdapter | Command
FromEngine = Delta | Progress | Ready | Report | AdapterReport | Died | Leaving | Outcome | Declined


NO_PERSISTENT_BATCH = 0  # of a step that shares its rows with no other step


class ImageSpan(NamedTuple):
    """The tokens of ``row`` at the positions from ``first`` up to ``last``.

    Their embeddings are the kept embeddings of images from index ``source`` on.
    """

    row: int
    first: int
    last: int
    source: int


@dataclass(slots=True)
class StepImages:
    """The images that a step encodes, and the tokens that stand for images.

    Each image to encode comes with its index in the kept embeddings.
    """

    encode: list[tuple[int, Image]]
    spans: list[ImageSpan]


class StepStates(NamedTuple):
    """The state slots that the rows of a step read and write, in parts: int64 [parts] each.

    A part is ``extend`` tokens of a ``row``, behind the row's earlier parts. It reads the state in slot ``read``, and
    leaves the state behind its tokens in slot ``write``.
    """

    row: np.ndarray
    extend: np.ndarray
    read: np.ndarray
    write: np.ndarray


def own_states(slots: np.ndarray, extend: np.ndarray) -> StepStates:
    """Return the parts of rows that each read and write the state slot of their own.

    Row i computes ``extend[i]`` tokens of the sequence in ``slots[i]``. State slot 0 is for padding.
    """
    own = slots.astype(np.int64) + 1
    return StepStates(np.arange(len(slots)), extend.astype(np.int64), own, own)


@dataclass(slots=True)
class Schedule:
    """The rows of one step.

    Row i computes ``extend[i]`` tokens of the sequence in ``slots[i]``, from position ``first[i]`` on. It samples a
    token after each of the last ``num_sampled[i]`` of them. That number is 0 if more of the prompt follows, k + 1 if
    the row ends with k draft tokens, otherwise 1.

    Decode rows come first, rows with drafts last. The arrays describe the moment of scheduling; the slots may have
    moved on. Steps with the same ``persistent_batch`` number have the same decode rows, one token further in each step.
    So they can share data that depends only on the rows.
    """

    slots: np.ndarray  # int64 [rows]
    first: np.ndarray  # int32 [rows]
    extend: np.ndarray  # int32 [rows], at least 1
    num_sampled: np.ndarray  # int32 [rows]
    num_decode: int  # rows at the front with extend == num_sampled == 1
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [rows] of requests; empty in dummy batches
    started: dict[int, int] = field(default_factory=dict)  # request id -> tokens found in the prefix cache
    persistent_batch: int = NO_PERSISTENT_BATCH
    num_drafted: int = 0  # rows at the end with drafts
    images: StepImages | None = None  # None: no token of the step stands for an image
    loads: list[tuple[int, Any]] = field(default_factory=list)  # adapters to load before the step, each with its slot
    transfers: tuple[Transfer, ...] = ()  # copies between host and device before it
    states: StepStates | None = None  # None: each row reads and writes its own state slot, if layers have states
    ends: np.ndarray = field(init=False)  # int32 [rows], the position after each row's last token

    def __post_init__(self) -> None:
        self.ends = self.first + self.extend

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def tokens(self) -> int:
        return self.rows if self.num_decode == self.rows else int(self.extend.sum())

    @property
    def samples(self) -> np.ndarray:
        """Whether each row samples at all: bool [rows]."""
        return self.num_sampled > 0

    @property
    def has_drafts(self) -> bool:
        """Whether any row has draft tokens; if so, the last row has."""
        return self.rows > 0 and bool(self.num_sampled[-1] > 1)

    @property
    def verifies(self) -> bool:
        """Whether all rows decode, and some of them end with drafts."""
        return self.num_drafted > 0 and self.num_decode + self.num_drafted == self.rows

    @property
    def total_sampled(self) -> int:
        """Number of tokens that the step samples."""
        return self.rows if self.num_decode == self.rows else int(self.num_sampled.sum())

    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return row and position, int [total_sampled] each, of every sampled token, in row order."""
        if not self.has_drafts:
            rows = self.num_sampled.nonzero()[0]
            return rows, self.ends[rows]
        rows = np.arange(self.rows).repeat(self.num_sampled)
        # Sampled tokens left in the row, including this one.
        left = self.num_sampled.cumsum()[rows] - np.arange(len(rows))
        return rows, self.ends[rows] + 1 - left


@dataclass(slots=True)
class Swaps:
    """Block swaps to do before the next step: ``pairs`` int32 [n, 2].

    ``pairs`` is padded to ``size`` by pairs of the pad block with itself. No id occurs in two different pairs.
    """

    pairs: np.ndarray
    size: int


@dataclass(slots=True)
class StepResult:
    """The results of the device for one step.

    ``tokens`` has the sampled tokens in row order, marked by :func:`marked`.

    ``logprobs`` maps an index in ``tokens`` to that token's alternatives. ``prompt_logprobs`` maps a row to one entry
    for each computed token with a successor in the prompt. The entry is the successor's logprob, NaN where the logits
    are not finite.
    """

    tokens: np.ndarray  # int32 [total_sampled]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden: dict[int, np.ndarray] | None = None  # of a pooling engine: by row, fp32 [tokens, hidden]
    digests: dict[int, int] = field(default_factory=dict)  # of logits, by index in ``tokens``


def marked(tokens: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Mark ``tokens`` [n] from logits that are not ``finite``.

    A marked token is its complement, below zero.
    """
    return np.where(finite, tokens, ~tokens)


def unmarked(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens before :func:`marked`."""
    return np.where(tokens < 0, ~tokens, tokens)
