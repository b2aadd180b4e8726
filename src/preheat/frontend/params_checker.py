"""The check of sampling parameters, for every request and for one model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from preheat.core import CALLERS_FIELDS, MAX_STOP_IDS, SAMPLING_FIELDS, SamplingParams
from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.reasoning import ReasoningFormat
from preheat.frontend.request_state import CheckedParams
from preheat.frontend.stop import StopStrings
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.parts import parts

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 16_384
MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 65_536
_RECOMMENDED = {field.recommended: name for name, field in SAMPLING_FIELDS.items() if field.recommended}


class ParamsChecker:
    """Checks sampling parameters against one model and the server's options.

    ``max_logprobs`` bounds the alternatives per position. ``reasoning``: how the model reasons; None: unknown.
    """

    def __init__(self, tokenizer: Tokenizer, max_logprobs: int, reasoning: ReasoningFormat | None) -> None:
        self._tokenizer, self.max_logprobs, self._reasoning = tokenizer, max_logprobs, reasoning

    def checked(self, params: SamplingParams) -> CheckedParams:
        """Return ``params``, checked, with the values that all prompts share. Raises InvalidRequest."""
        params = recheck(params)
        self.check(params)
        return self.made(self._with_most_logprobs(params))

    def made(self, params: SamplingParams) -> CheckedParams:
        """Return ``params`` with the values that all prompts share."""
        strings = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        return CheckedParams(params, self._stop_ids(params), self._bad_words(params), strings)

    def check_vocabulary(self, ids: Collection[int], param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if an id is outside the model's vocabulary."""
        size = self._tokenizer.vocab_size
        ends = (end for part in parts(ids) for end in (min(part), max(part)))
        if (bad := next((id for id in ends if not 0 <= id < size), None)) is not None:
            raise InvalidRequest(f"{param} has token id {bad}, but ids must be in 0 .. {size - 1}", param=param)

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if ``count`` exceeds the allowed number of alternatives."""
        if (count or 0) > self.max_logprobs:
            raise InvalidRequest(
                f"{param} is {count}, but at most {self.max_logprobs} are allowed (--max-logprobs)", param=param
            )

    def check_text(self, param: str, instead: str) -> None:
        """Raise InvalidRequest, naming ``param`` and the way out ``instead``, unless there is a tokenizer."""
        if not self._tokenizer.speaks:
            raise InvalidRequest(
                f"{param} needs a tokenizer, and there is none (skip_tokenizer_init): {instead}", param=param
            )

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Return the token ids that end a sequence, ascending.

        With a grammar, the end of sequence is always among them: a text that is complete by its grammar can only end.
        """
        goes_on = params.ignore_eos and params.structured_outputs is None
        return sorted({*(() if goes_on else self._tokenizer.eos_ids), *(params.stop_token_ids or ())})

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of ``bad_words``.

        Each word is encoded twice: as it begins a text, and behind a space. As in vLLM, a word is not found where other
        tokens spell it.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word.lstrip(), f" {word.lstrip()}"):
                found[tuple(self._tokenizer.encode(text, add_special_tokens=False))] = None
        return [list(ids) for ids in found if ids]

    def _with_most_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the allowed maximum in place of -1, and no alternatives for ``logprob_token_ids``."""
        most = min(self.max_logprobs, self._tokenizer.vocab_size)
        asked: dict[str, Any] = {n: most for n in ("logprobs", "prompt_logprobs") if getattr(params, n) == -1}
        if params.logprob_token_ids:
            asked |= {"logprobs": 0, "logprob_token_ids": list(dict.fromkeys(params.logprob_token_ids))}
        return msgspec.structs.replace(params, **asked) if asked else params

    def check(self, params: SamplingParams) -> None:
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
        if (count := len(params.allowed_token_ids or ())) > self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids has {count} ids, but the vocabulary has {self._tokenizer.vocab_size}: name each "
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
