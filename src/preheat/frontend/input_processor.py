"""From a client's request to what the engine runs: encode, check, resolve the sampling parameters, fan out the choices.

A request that cannot be served is refused here, before anything is allocated for it.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from preheat.core import MAX_STOP_IDS, SAMPLING_FIELDS, Ready, Request, SamplingParams
from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend.detokenize import SILENT, Detokenizer
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.tokenizer import Tokenizer

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 16_384
_RECOMMENDED = {name: field.recommended for name, field in SAMPLING_FIELDS.items() if field.recommended}


class InputProcessor:
    """Makes requests for one model. ``limits`` gives the engine's limits, or raises while it takes no requests.

    ``max_logprobs`` bounds the alternatives per position. ``seed`` fixes the seeds drawn for requests without one; None
    draws them from the system.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: Callable[[], Ready], *, max_logprobs: int = 20, seed: int | None = None
    ) -> None:
        self.tokenizer, self._limits = tokenizer, limits
        self._max_logprobs = max_logprobs
        self._random = random.Random(seed)
        self._ids = itertools.count(1)

    def params(self, **given: object) -> SamplingParams:
        """Sampling parameters from what a client gave; the checkpoint's recommendations, then our defaults, fill in.

        None means "not given". Raises InvalidRequest for a value outside its range or of the wrong type.
        """
        values = {name: self.tokenizer.generation.get(key) for name, key in _RECOMMENDED.items()}
        values |= {name: value for name, value in given.items() if value is not None}
        return check_params({n: value for n, value in values.items() if value is not None or n == "max_tokens"})

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        text: str | None = None,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        cap_length: bool = False,
    ) -> RequestState:
        """Check a request completely; nothing is sent yet.

        ``text`` is the prompt's text where ``prompt`` holds its token ids already. ``cap_length`` shortens
        ``max_tokens`` to what fits the context instead of refusing. Raises NotReady, EngineDead, InvalidRequest.
        """
        limits, params = self._limits(), check_params(msgspec.structs.asdict(params))
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = self._checked_ids(prompt)
        if not ids:
            raise InvalidRequest("The prompt is empty; give at least one token", param="prompt")
        self._check_params(params)
        max_tokens = _max_tokens(len(ids), params, limits, cap_length)
        return RequestState(request_id, text, ids, params, max_tokens, self.tokenizer, cache_salt=cache_salt)

    def fan_out(self, state: RequestState) -> list[Request]:
        """One request to the engine for each of the choices, which ``state`` holds afterwards."""
        params, prompt = state.params, state.prompt_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        stop_ids = self._stop_ids(params)
        strings = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        for index in range(params.n):
            stop = StopChecker(strings) if strings else None
            state.choices.append(Choice(state, index, next(self._ids), self._detokenizer(state), stop))
        state.unfinished = params.n
        others = msgspec.structs.replace(params, prompt_logprobs=None)  # the first choice's are those of all
        return [
            Request(
                choice.id, prompt, others if choice.index else params, seed, state.max_tokens, choice.index, stop_ids,
                state.cache_salt,
            )
            for choice in state.choices
        ]  # fmt: skip

    def _detokenizer(self, state: RequestState) -> Detokenizer:
        params = state.params
        return self.tokenizer.detokenizer(state.prompt_ids, params.skip_special_tokens) if params.detokenize else SILENT

    def check_vocabulary(self, ids: Iterable[int], param: str) -> None:
        """Raise InvalidRequest, naming ``param``, for the first id that the model does not know."""
        size = self.tokenizer.vocab_size
        bad = next((id for id in ids if not 0 <= id < size), None)
        if bad is not None:
            raise InvalidRequest(f"{param} has token id {bad}, but ids must be in 0 .. {size - 1}", param=param)

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if ``count`` alternatives are more than may be asked for."""
        if (count or 0) > self._max_logprobs:
            raise InvalidRequest(
                f"{param} is {count}, but at most {self._max_logprobs} are allowed (--max-logprobs)", param=param
            )

    def check_text(self, param: str, instead: str) -> None:
        """Raise InvalidRequest, naming ``param`` and what to do ``instead``, unless there is a tokenizer."""
        if not self.tokenizer.speaks:
            raise InvalidRequest(
                f"{param} is about text, and there is no tokenizer (skip_tokenizer_init): {instead}", param=param
            )

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(id) for id in prompt]
        except TypeError as error:
            raise InvalidRequest("A prompt of token ids must hold whole numbers only", param="prompt") from error
        self.check_vocabulary(ids, "prompt")
        return ids

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """The ids that end a sequence, ascending."""
        return sorted({*(() if params.ignore_eos else self.tokenizer.eos_ids), *(params.stop_token_ids or ())})

    def _check_params(self, params: SamplingParams) -> None:
        """What depends on the model or on the server's options; ranges are checked by SamplingParams itself."""
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
        stops = params.stop_strings
        if stops:
            self.check_text("stop", "use stop_token_ids")
        if len(stops) > MAX_STOP_STRINGS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop may have {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters together", param="stop"
            )


def check_params(values: Mapping[str, object]) -> SamplingParams:
    """``values`` as sampling parameters. Raises InvalidRequest for a wrong type, a bad value or an unknown name."""
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").partition("[")[0] or message.partition(" ")[0]
        raise InvalidRequest(f"{param}: {message}" if path else message, param=param) from error


def _max_tokens(prompt: int, params: SamplingParams, limits: Ready, cap: bool) -> int:
    """Tokens that may be generated after ``prompt`` tokens. Raises ContextTooLong, with the numbers."""
    _check_prompt_len(prompt, limits)
    room = limits.max_model_len - prompt
    asked = room if params.max_tokens is None else params.max_tokens
    if asked > room and not cap:
        raise ContextTooLong(
            f"{_maximum(limits)}you requested {prompt + asked} tokens ({prompt} in the prompt, {asked} in the "
            "completion). Please shorten the prompt or reduce max_tokens.",
            param="max_tokens",
        )
    if params.min_tokens > min(asked, room):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but only {min(asked, room)} can be generated", param="min_tokens"
        )
    return min(asked, room)


def _check_prompt_len(prompt: int, limits: Ready) -> None:
    if prompt >= limits.max_model_len:
        raise ContextTooLong(
            f"{_maximum(limits)}your prompt has {prompt} tokens, and at least 1 must be left for the completion. "
            "Please shorten the prompt.",
            param="prompt",
        )
    if limits.max_prompt_len is not None and prompt > limits.max_prompt_len:
        raise ContextTooLong(
            f"Your prompt has {prompt} tokens, but this server reads each prompt in one step, which has room for "
            f"{limits.max_prompt_len}. Shorten the prompt, or start the server with --enable-chunked-prefill or a "
            "larger --max-num-batched-tokens.",
            param="prompt",
        )


def _maximum(limits: Ready) -> str:
    return f"This model's maximum context length is {limits.max_model_len} tokens. However, "
