"""From a client's request to engine requests.

Requests are encoded and checked, their parameters resolved, their choices fanned out. A request that cannot be served
is rejected here, before anything is allocated for it.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from preheat.core import (
    CALLERS_FIELDS,
    MAX_STOP_IDS,
    SAMPLING_FIELDS,
    Image,
    Ready,
    Request,
    SamplingParams,
    Segment,
    Thinking,
)
from preheat.errors import ContextTooLong, InvalidRequest, ModelError, SettingsError
from preheat.frontend.beam_search import BeamSearch
from preheat.frontend.beams import BeamSearchParams
from preheat.frontend.encoding import TOGETHER, TextBound, counted, in_groups
from preheat.frontend.long_texts import LongTexts
from preheat.frontend.marks import mark_texts
from preheat.frontend.pairs import Pair
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.reasoning import ReasoningFormat
from preheat.frontend.relay import Relay, check_relayed, shown_params, token_ids
from preheat.frontend.request_state import CheckedParams, Choice, RequestState
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from preheat.frontend.images import Images  # needs Pillow; models without images do without it

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 16_384
MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 65_536
_RECOMMENDED = {field.recommended: name for name, field in SAMPLING_FIELDS.items() if field.recommended}


class InputProcessor:
    """Maker of requests for one model.

    ``limits`` returns the engine's limits, or raises while it takes no requests.
    ``recommended`` are sampling defaults by parameter, see :func:`recommended_params`. ``max_logprobs`` bounds the
    alternatives per position. ``seed`` seeds the draw of seeds for requests without one. ``images``: of a model that
    sees images. ``priorities``: requests may have a priority. ``reasoning``: how the model reasons; None: unknown.
    ``long_texts``: the rule of texts in chunks, if there are any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Callable[[], Ready],
        *,
        recommended: Mapping[str, object],
        max_logprobs: int = 20,
        seed: int | None = None,
        images: Images | None = None,
        priorities: bool = False,
        reasoning: ReasoningFormat | None = None,
        long_texts: LongTexts | None = None,
    ) -> None:
        self._priorities, self._reasoning, self._long_texts = priorities, reasoning, long_texts
        self.tokenizer, self._limits, self._images = tokenizer, limits, images
        self.recommended = recommended
        self._max_logprobs = max_logprobs
        self._random = random.Random(seed)
        self._ids = itertools.count(1)

    def params(self, **given: object) -> SamplingParams:
        """Return sampling parameters: the client's values, else the checkpoint's recommendations, else our defaults.

        None means "not given"; for ``max_tokens`` without a recommendation it means the rest of the context. Raises
        InvalidRequest for a value out of range or of the wrong type.
        """
        given = {name: value for name, value in given.items() if value is not None}
        return check_params({"max_tokens": None, **self.recommended, **given})

    def checked(self, params: SamplingParams) -> CheckedParams:
        """Return ``params``, checked, with the values that all prompts share. Raises InvalidRequest."""
        params = recheck(params)
        self._check_params(params)
        return self._made(self._with_most_logprobs(params))

    def _made(self, params: SamplingParams) -> CheckedParams:
        strings = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        return CheckedParams(params, self._stop_ids(params), self._bad_words(params), strings)

    def prepare(
        self,
        prompt: str | Sequence[int] | Embedded | Pair,
        params: SamplingParams | CheckedParams,
        *,
        request_id: str = "",
        text: str | None = None,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        priority: int = 0,
        cap_length: bool = False,
        images: Sequence[Image] = (),
        lora_name: str = "",
        encoded: list[int] | None = None,
    ) -> RequestState:
        """Check a request completely; nothing is sent yet. Raises NotReady, EngineDead, InvalidRequest.

        ``prompt``: a text, token ids, embeddings, or a pair of texts. ``params`` are checked unless they are already.
        ``images``: the images of the prompt's image tokens, in order. ``lora_name``: the adapter, if any. ``text``: the
        prompt's text if ``prompt`` has its token ids. ``cap_length``: a ``max_tokens`` that exceeds the context is
        lowered instead of rejected. ``encoded``: the entry of :meth:`encode_all` for the prompt, if there is one.
        """
        limits = self._limits()
        checked = params if isinstance(params, CheckedParams) else self.checked(params)
        params = checked.params
        self._check_priority(priority)
        self.check_length(prompt, params)
        if isinstance(prompt, Embedded):
            _check_without_tokens(params)
            ids = prompt.ids
        elif isinstance(prompt, str):
            text, ids = prompt, encoded or self._bound(params).encode(self.tokenizer, prompt, add_special_tokens)
        elif isinstance(prompt, Pair):
            ids = encoded or self.tokenizer.encode_pair(prompt, _most_of_pair(params, limits, cap_length))
        else:
            ids = self._checked_ids(prompt)
        if not ids:
            raise InvalidRequest("The prompt is empty; give at least one token", param="prompt")
        ids, segments = (ids, prompt.segments) if isinstance(prompt, Embedded) else self._with_images(ids, images)
        long = self._long(params)
        if (kept := long.kept(params) if long else _kept_tokens(params, limits, cap_length)) < len(ids):
            if segments:
                raise InvalidRequest(
                    "truncate_prompt_tokens cannot cut a prompt with images or embeddings, and this one has "
                    f"{len(ids)} tokens: shorten the prompt instead",
                    param="truncate_prompt_tokens",
                )
            ids = ids[:kept] if params.truncation_side == "right" else ids[-kept:]
            text = None if text is None else self.tokenizer.decode(ids)
        chunks = long.chunks(ids, limits) if long else []
        max_tokens = _max_tokens(len(chunks[0] if chunks else ids), params, limits, cap_length)
        return RequestState(
            request_id, text, ids, params, max_tokens, self.tokenizer, cache_salt=cache_salt, segments=segments,
            priority=priority, lora_name=lora_name, embedded=isinstance(prompt, Embedded), checked=checked,
            chunks=chunks,
        )  # fmt: skip

    def encode_all(
        self,
        prompts: Sequence[object],
        params: Sequence[SamplingParams],
        *,
        add_special_tokens: bool = True,
        cap_length: bool = False,
    ) -> list[list[int] | None]:
        """Return the token ids of prompts that are texts or pairs, encoded together, with the ``params`` of each.

        An entry is None if :meth:`prepare` has to encode the prompt by itself, or to refuse it.
        """
        limits, found = self._limits(), list[list[int] | None]([None] * len(prompts))
        texts, pairs = dict[int, tuple[str, int]](), dict[int, tuple[Pair, int | None]]()
        for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            with suppress(InvalidRequest):  # preparing the prompt raises it, with the prompt's place
                if isinstance(prompt, str):
                    (bound := self._bound(own)).check(self.tokenizer, prompt)
                    if not bound.measures(prompt):
                        texts[place] = prompt, bound.most
                elif isinstance(prompt, Pair):
                    self.check_length(prompt, own)
                    pairs[place] = prompt, _most_of_pair(own, limits, cap_length)
        for given, encode in (
            (texts, partial(self.tokenizer.encode_all, add_special_tokens=add_special_tokens)),
            (pairs, self.tokenizer.encode_pairs),
        ):
            places: list[int] = list(given)
            for group in in_groups((len(given[place][0]) for place in places), TOGETHER):
                some = [places[each] for each in group]
                asked, most = zip(*(given[place] for place in some), strict=True)
                for place, ids in zip(some, encode(asked, most), strict=True):
                    found[place] = ids
        return found

    def relayed(self, request: Request, request_id: str) -> RequestState:
        """Check a request of another frontend, and return its state. Raises NotReady, EngineDead, InvalidRequest."""
        limits = self._limits()
        self._check_priority(request.priority)
        params = shown_params(request)
        self._check_params(recheck(params, logprobs=request.params.logprobs))
        self.check_logprobs(request.params.prompt_logprobs, "prompt_logprobs")
        _check_prompt_length(len(request.prompt), limits)
        check_relayed(request, limits.places - len(request.prompt))
        for name, ids in token_ids(request):
            self.check_vocabulary(ids, name)
        return RequestState(
            request_id, None, request.prompt, params, request.max_tokens, self.tokenizer, stream=True,
            priority=request.priority, lora_name=request.lora_name, relay=Relay(request),
        )  # fmt: skip

    def search(self, state: RequestState, length_penalty: float, width_param: str) -> RequestState:
        """Return ``state`` as a beam search.

        Its width is n, the number of choices. Raises InvalidRequest; it names ``width_param`` if the width is at fault.
        """
        asked, limits = state.params, self._limits()
        if 2 * asked.n > self._max_logprobs:
            raise InvalidRequest(
                f"{width_param} is {asked.n}: beam search looks at twice as many alternatives, but at most "
                f"{self._max_logprobs} are allowed (--max-logprobs)",
                param=width_param,
            )
        if asked.masked:
            raise InvalidRequest(
                f"beam search does not support {asked.masked[0]}: leave one out", param=asked.masked[0]
            )
        longest = len(state.prompt_ids) + state.max_tokens - 1
        _check_prompt_length(longest, limits, f"{longest} tokens with all but the last of the answer's")
        try:
            params = BeamSearchParams(
                asked.n, state.max_tokens, asked.ignore_eos, asked.temperature, length_penalty,
                asked.include_stop_str_in_output,
            )  # fmt: skip
        except ValueError as error:
            raise InvalidRequest(str(error), param=str(error).partition(" ")[0]) from error
        state.search = BeamSearch(state, params)
        return state

    def check_images(self, count: int) -> None:
        """Raise InvalidRequest unless a prompt may have ``count`` images, before they are read."""
        if not count:
            return
        if self._images is None:
            raise InvalidRequest(
                "The model sees no images: it has no vision tower, or no preprocessor_config.json; send text alone",
                param="messages",
            )
        if self._images.limit is not None and count > self._images.limit:
            raise InvalidRequest(
                f"The request has {count} images, but at most {self._images.limit} are allowed (--limit-mm-per-prompt)",
                param="messages",
            )
        tokens = count * self._images.tokens
        _check_prompt_length(tokens, self._limits(), f"{count} images of {self._images.tokens} tokens or more each")

    def _with_images(self, ids: list[int], images: Sequence[Image]) -> tuple[list[int], list[Segment]]:
        self.check_images(len(images))
        return self._images.place(ids, images) if self._images is not None else (ids, [])

    def _check_priority(self, priority: int) -> None:
        if priority and not self._priorities:
            raise InvalidRequest(
                "priority needs a server that was started with --scheduling-policy priority", param="priority"
            )
        if not -(2**63) <= priority < 2**63:
            raise InvalidRequest("priority must be a 64-bit integer", param="priority")

    def check_length(self, prompt: str | Sequence[object] | Embedded | Pair, params: SamplingParams) -> None:
        """Raise ContextTooLong if ``prompt`` has too many token ids, or too many characters.

        The characters are too many if no tokens that fit could stand for them. A far longer prompt is taken if
        ``params`` truncate it.
        """
        if isinstance(prompt, str):
            self._bound(params).check(self.tokenizer, prompt)
        elif isinstance(prompt, Pair):
            self._bound(params).check(self.tokenizer, prompt.first)
            cut = prompt.most_second is not None
            bound = counted(self._limits().max_model_len) if cut else self._bound(params)
            bound.check(self.tokenizer, prompt.second)
        elif params.truncate_prompt_tokens is None:
            if (long := self._long(params)) is not None:
                long.check(len(prompt))
            else:
                _check_prompt_length(len(prompt), self._limits())

    def encode_to_count(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``, which need not fit the model.

        Raises ContextTooLong if there are far too many.
        """
        return counted(self._limits().max_model_len).encode(self.tokenizer, text, add_special_tokens)

    def _bound(self, params: SamplingParams) -> TextBound:
        """Return the bound on the tokens of a prompt's text."""
        limits = self._limits()
        if (long := self._long(params)) is not None:
            return long.bound(params)
        if params.truncate_prompt_tokens is not None:
            return counted(limits.max_model_len)
        most = min(limits.places - 1, limits.max_prompt_len or sys.maxsize)
        return TextBound(most, lambda size: _check_prompt_length(most + 1, limits, size))

    def _long(self, params: SamplingParams) -> LongTexts | None:
        """Return the rule of texts in chunks, None if ``params`` ask for a text as a whole."""
        return self._long_texts if self._long_texts is not None and self._long_texts.serves(params) else None

    def fan_out(self, state: RequestState) -> list[Request]:
        """Return one engine request for each choice, or each chunk; add the choices to ``state``."""
        if state.relay is not None:
            choice = Choice(state, 0, next(self._ids), state.new_detokenizer(), None)
            state.choices, state.unfinished = [choice], 1
            return [msgspec.structs.replace(state.relay.request, id=choice.id, data_parallel_rank=None)]
        params, prompt = state.params, state.prompt_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        _, stop_ids, bad_words, strings = state.checked or self._made(params)
        thinking = self._thinking(state)
        if thinking is None and params.thinking_token_budget is not None:
            params = msgspec.structs.replace(params, thinking_token_budget=None)  # a mask would change nothing
        for index in range(state.sequences):
            stop = StopChecker(strings, mark_texts(state.marks)) if strings else None
            state.choices.append(Choice(state, index, next(self._ids), state.new_detokenizer(), stop))
        state.unfinished = state.sequences
        others = msgspec.structs.replace(params, prompt_logprobs=None) if params.n > 1 else params  # one is enough
        if state.chunks:
            asked = [(chunk, params, 0) for chunk in state.chunks]
        else:
            asked = [(prompt, others if index else params, index) for index in range(params.n)]
        return [
            Request(
                choice.id, own, wanted, seed, state.max_tokens, index, stop_ids,
                state.cache_salt, state.segments, bad_words, state.priority, state.lora_name,
                state.data_parallel_rank, thinking, source=state.source,
            )
            for choice, (own, wanted, index) in zip(state.choices, asked, strict=True)
        ]  # fmt: skip

    def _thinking(self, state: RequestState) -> Thinking | None:
        """Return the limit on the answers' reasoning, if they could reach it.

        There is no limit if a grammar constrains the text from its first token on.
        """
        budget, held = state.params.thinking_token_budget, state.params.structured_outputs
        if budget is None or self._reasoning is None or (held is not None and held.after_token_id is None):
            return None
        return self._reasoning.thinking(budget, state.shown_ids, state.phase, sorted(state.call_ids))

    def check_vocabulary(self, ids: Collection[int], param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if an id is outside the model's vocabulary."""
        size = self.tokenizer.vocab_size
        bad = next((id for id in (min(ids), max(ids)) if not 0 <= id < size), None) if ids else None
        if bad is not None:
            raise InvalidRequest(f"{param} has token id {bad}, but ids must be in 0 .. {size - 1}", param=param)

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if ``count`` exceeds the allowed number of alternatives."""
        if (count or 0) > self._max_logprobs:
            raise InvalidRequest(
                f"{param} is {count}, but at most {self._max_logprobs} are allowed (--max-logprobs)", param=param
            )

    def check_text(self, param: str, instead: str) -> None:
        """Raise InvalidRequest, naming ``param`` and the way out ``instead``, unless there is a tokenizer."""
        if not self.tokenizer.speaks:
            raise InvalidRequest(
                f"{param} needs a tokenizer, and there is none (skip_tokenizer_init): {instead}", param=param
            )

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        try:
            ids = list(map(operator.index, prompt))
        except TypeError as error:
            raise InvalidRequest("A prompt of token ids must hold whole numbers only", param="prompt") from error
        self.check_vocabulary(ids, "prompt")
        return ids

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Return the token ids that end a sequence, ascending.

        With a grammar, the end of sequence is always among them: a text that is complete by its grammar can only end.
        """
        goes_on = params.ignore_eos and params.structured_outputs is None
        return sorted({*(() if goes_on else self.tokenizer.eos_ids), *(params.stop_token_ids or ())})

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of ``bad_words``.

        Each word is encoded twice: as it begins a text, and behind a space. As in vLLM, a word is not found where other
        tokens spell it.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word.lstrip(), f" {word.lstrip()}"):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return [list(ids) for ids in found if ids]

    def _with_most_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the allowed maximum in place of -1, and no alternatives for ``logprob_token_ids``."""
        most = min(self._max_logprobs, self.tokenizer.vocab_size)
        asked: dict[str, Any] = {n: most for n in ("logprobs", "prompt_logprobs") if getattr(params, n) == -1}
        if params.logprob_token_ids:
            asked |= {"logprobs": 0, "logprob_token_ids": list(dict.fromkeys(params.logprob_token_ids))}
        return msgspec.structs.replace(params, **asked) if asked else params

    def _check_params(self, params: SamplingParams) -> None:
        """Check ``params`` against the model and the server's options; SamplingParams checks the ranges."""
        self.check_logprobs(params.logprobs, "logprobs")
        self.check_logprobs(params.prompt_logprobs, "prompt_logprobs")
        self.check_vocabulary(params.stop_token_ids or (), "stop_token_ids")
        if (count := len(self._stop_ids(params))) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids and the model's end-of-sequence ids are {count:,} together, but at most "
                f"{MAX_STOP_IDS:,} can end a request; give fewer stop_token_ids",
                param="stop_token_ids",
            )
        self.check_vocabulary(params.logit_bias or (), "logit_bias")
        self.check_vocabulary(params.allowed_token_ids or (), "allowed_token_ids")
        self.check_vocabulary(params.logprob_token_ids or (), "logprob_token_ids")
        if params.bad_words:
            self.check_text("bad_words", "use logit_bias with -100, or allowed_token_ids")
            if len(params.bad_words) > MAX_BAD_WORDS or sum(map(len, params.bad_words)) > MAX_BAD_CHARS:
                raise InvalidRequest(
                    f"bad_words may have at most {MAX_BAD_WORDS} texts of {MAX_BAD_CHARS} characters together",
                    param="bad_words",
                )
        if (count := len(params.allowed_token_ids or ())) > self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids has {count} ids, but the vocabulary has {self.tokenizer.vocab_size}: name each "
                "once",
                param="allowed_token_ids",
            )
        if params.thinking_token_budget is not None:
            if self._reasoning is None:
                raise InvalidRequest(
                    "thinking_token_budget needs to know where reasoning ends: start with --reasoning-parser, or leave "
                    "it out",
                    param="thinking_token_budget",
                )
            self._reasoning.check_budget()
        if params.structured_outputs is not None:
            self.check_text("structured_outputs", "check the text yourself")
        if stops := params.stop_strings:
            self.check_text("stop", "use stop_token_ids")
        if len(stops) > MAX_STOP_STRINGS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop may have at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters together",
                param="stop",
            )


def recommended_params(generation: Mapping[str, Any], source: object) -> dict[str, object]:
    """Return the sampling defaults of a generation_config.json, by parameter.

    Other fields are left out. Raises ModelError, naming the ``source``, for a value that no request could have.
    """
    found = {name: generation[key] for key, name in _RECOMMENDED.items() if generation.get(key) is not None}
    for name, value in found.items():
        try:
            check_params({name: value})
        except InvalidRequest as error:
            raise ModelError(
                f"{source} recommends sampling parameters that cannot be used: {error.message}; correct it, or start "
                "with --generation-config vllm"
            ) from error
    return found


def override_params(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the defaults of ``--override-generation-config``, by parameter. Raises SettingsError for other fields."""
    if unknown := sorted(values.keys() - _RECOMMENDED):
        raise SettingsError(
            f"override_generation_config: {unknown[0]!r} is not one of {', '.join(_RECOMMENDED)}",
            param="override_generation_config",
        )
    try:
        return recommended_params(values, "")
    except ModelError as error:
        cause = error.__cause__
        raise SettingsError(f"override_generation_config: {cause}", param="override_generation_config") from error


def check_params(values: Mapping[str, object]) -> SamplingParams:
    """Return ``values`` as sampling parameters. Raises InvalidRequest for an unknown name or a bad value."""
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").partition("[")[0] or message.partition(" ")[0]
        raise InvalidRequest(f"{param}: {message}" if path else message, param=param) from error


def recheck(params: SamplingParams, **changes: object) -> SamplingParams:
    """Return ``params`` with ``changes``, all checked again. Raises InvalidRequest for a bad value."""
    given = msgspec.structs.asdict(params)
    own = {name: given.pop(name) for name in CALLERS_FIELDS}
    return msgspec.structs.replace(check_params(given | changes), **own)


def _check_without_tokens(params: SamplingParams) -> None:
    """Raise InvalidRequest if ``params`` look at the tokens of a prompt, for a prompt without tokens."""
    if params.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_embeds have no token ids, so they have no log-probabilities: leave out prompt_logprobs and echo",
            param="prompt_logprobs",
        )
    if params.repetition_penalty != 1:
        raise InvalidRequest(
            f"repetition_penalty is {params.repetition_penalty} (the model may recommend it) and looks at the prompt's "
            "tokens, but prompt_embeds have none: set it to 1",
            param="repetition_penalty",
        )


def _most_of_pair(params: SamplingParams, limits: Ready, cap: bool) -> int | None:
    """Return the number of a pair's tokens that are kept; None: all of them."""
    kept = _kept_tokens(params, limits, cap)
    return None if kept == sys.maxsize else kept


def _kept_tokens(params: SamplingParams, limits: Ready, cap: bool) -> int:
    """Return the number of the prompt's tokens that ``truncate_prompt_tokens`` keeps.

    A negative value keeps as many as fit beside the answer.
    """
    asked = params.truncate_prompt_tokens
    if asked is None:
        return sys.maxsize
    if asked > limits.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}, but the model's maximum context length is {limits.max_model_len}: "
            "lower it",
            param="truncate_prompt_tokens",
        )
    if asked > 0:
        return asked
    answer = max(params.min_tokens, 1) if cap or params.max_tokens is None else params.max_tokens
    room = limits.places if limits.max_prompt_len is None else limits.max_prompt_len
    return max(min(limits.places - answer, room), 1)


@contextmanager
def naming_prompt(place: int, count: int) -> Iterator[None]:
    """Name the prompt in an error about it: prompt ``place`` of ``count``, if there are several."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1 or error.param != "prompt":
            raise
        name = f"prompt[{place}]"
        raise type(error)(f"{name}: {error.message}", param=name) from error


def _maximum(limits: Ready) -> str:
    return f"This model's maximum context length is {limits.max_model_len} tokens. However, "


def _check_prompt_length(prompt: int, limits: Ready, size: str = "") -> None:
    """Raise ContextTooLong if ``prompt`` tokens do not fit. ``size`` says their number in words."""
    size = size or f"{prompt} tokens"
    if limits.spare and prompt > limits.max_model_len:
        raise ContextTooLong(f"{_maximum(limits)}your text has {size}. Shorten the text.", param="prompt")
    if prompt >= limits.places:
        raise ContextTooLong(
            f"{_maximum(limits)}your prompt has {size}, and at least 1 must be left for the completion. Shorten the "
            "prompt.",
            param="prompt",
        )
    if limits.max_prompt_len is not None and prompt > limits.max_prompt_len:
        raise ContextTooLong(
            f"Your prompt has {size}, but this server reads each prompt in one step, with room for "
            f"{limits.max_prompt_len}. Shorten the prompt, or start the server with "
            f"{'' if limits.spare else '--enable-chunked-prefill or '}a larger --max-num-batched-tokens.",
            param="prompt",
        )


def _max_tokens(prompt: int, params: SamplingParams, limits: Ready, cap: bool) -> int:
    """Return the number of tokens to generate after ``prompt`` tokens. Raises ContextTooLong, with the numbers."""
    _check_prompt_length(prompt, limits)
    room = limits.places - prompt
    asked = room if params.max_tokens is None else params.max_tokens
    if asked > room and not cap:
        raise ContextTooLong(
            f"{_maximum(limits)}you requested {prompt + asked} tokens ({prompt} in the prompt, {asked} in the "
            "completion). Shorten the prompt or reduce max_tokens.",
            param="max_tokens",
        )
    if params.min_tokens > min(asked, room):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but only {min(asked, room)} can be generated: lower it",
            param="min_tokens",
        )
    return min(asked, room)
