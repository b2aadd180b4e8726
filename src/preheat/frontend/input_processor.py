"""From a client's request to engine requests.

Requests are encoded and checked, their parameters resolved, their choices fanned out. A request that cannot be served
is rejected here, before anything is allocated for it.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from preheat.core import Image, Ready, Request, SamplingParams, Segment, Thinking
from preheat.errors import InvalidRequest
from preheat.frontend.beam_search import BeamSearch
from preheat.frontend.beams import BeamSearchParams
from preheat.frontend.encoding import TOGETHER, EncodedText, TextBound, counted, in_groups
from preheat.frontend.long_texts import LongTexts
from preheat.frontend.marks import mark_texts
from preheat.frontend.pairs import Pair
from preheat.frontend.params_checker import ParamsChecker, check_params, recheck
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.prompt_length import (
    answer_tokens,
    check_prompt_length,
    kept_tokens,
    most_of_pair,
    room_for_images,
)
from preheat.frontend.reasoning import ReasoningFormat
from preheat.frontend.relay import Relay, check_relayed, shown_params, token_ids
from preheat.frontend.request_state import CheckedParams, Choice, RequestState
from preheat.frontend.room import Room
from preheat.frontend.stop import StopChecker
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.parts import parts

if TYPE_CHECKING:
    from preheat.frontend.images import Images  # needs Pillow; models without images do without it


class InputProcessor:
    """Maker of requests for one model.

    ``limits`` returns the engine's limits, or raises while it takes no requests. ``recommended`` are sampling
    defaults by parameter, see :func:`preheat.frontend.params_checker.recommended_params`. ``max_logprobs`` bounds
    the alternatives per position. ``seed`` seeds the draw of seeds for requests without one. ``images``: of a model
    that sees images. ``priorities``: requests may have a priority. ``reasoning``: how the model reasons; None:
    unknown. ``long_texts``: the rule of texts in chunks, if there are any.
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
        self.checker = ParamsChecker(tokenizer, max_logprobs, reasoning)
        self._random = random.Random(seed)
        self._ids = itertools.count(1)

    def params(self, **given: object) -> SamplingParams:
        """Return sampling parameters: the client's values, else the checkpoint's recommendations, else our defaults.

        None means "not given"; for ``max_tokens`` without a recommendation it means the rest of the context. Raises
        InvalidRequest for a value out of range or of the wrong type.
        """
        given = {name: value for name, value in given.items() if value is not None}
        return check_params({"max_tokens": None, **self.recommended, **given})

    def prepare(
        self,
        prompt: str | EncodedText | Sequence[int] | Embedded | Pair,
        params: SamplingParams | CheckedParams,
        *,
        request_id: str = "",
        add_special_tokens: bool = True,
        cache_salt: str = "",
        priority: int = 0,
        cap_length: bool = False,
        images: Sequence[Image] = (),
        lora_name: str = "",
        encoded: list[int] | None = None,
    ) -> RequestState:
        """Check a request completely; nothing is sent yet. Raises NotReady, EngineDead, InvalidRequest.

        ``prompt``: a text, token ids with or without their text, embeddings, or a pair of texts. ``params`` are checked
        unless they are already. ``images``: the images of the prompt's image tokens, in order. ``lora_name``: the
        adapter, if any. ``cap_length``: a ``max_tokens`` that exceeds the context is lowered instead of rejected.
        ``encoded``: the entry of :meth:`encode_all` for the prompt, if there is one.
        """
        limits, text = self._limits(), None
        if isinstance(prompt, EncodedText):
            prompt, text = prompt
        checked = params if isinstance(params, CheckedParams) else self.checker.checked(params)
        params = checked.params
        self._check_priority(priority)
        if not isinstance(prompt, str):  # the encoder of a text checks its length
            self.check_length(prompt, params)
        if isinstance(prompt, Embedded):
            _check_without_tokens(params)
            ids = prompt.ids
        elif isinstance(prompt, str):
            text, ids = prompt, encoded or self._bound(params).encode(self.tokenizer, prompt, add_special_tokens)
        elif isinstance(prompt, Pair):
            ids = encoded or self.tokenizer.encode_pair(prompt, most_of_pair(params, limits, cap_length))
        else:
            ids = self._checked_ids(prompt)
        if not ids:
            raise InvalidRequest("The prompt is empty; give at least one token", param="prompt")
        ids, segments = (ids, prompt.segments) if isinstance(prompt, Embedded) else self._with_images(ids, images)
        long = self._long(params)
        if (kept := long.kept(params) if long else kept_tokens(params, limits, cap_length)) < len(ids):
            if segments:
                raise InvalidRequest(
                    "truncate_prompt_tokens cannot cut a prompt with images or embeddings, and this one has "
                    f"{len(ids)} tokens: shorten the prompt instead",
                    param="truncate_prompt_tokens",
                )
            ids = ids[:kept] if params.truncation_side == "right" else ids[-kept:]
            text = None if text is None else self.tokenizer.decode(ids)
        chunks = long.chunks(ids, limits) if long else []
        max_tokens = answer_tokens(len(chunks[0] if chunks else ids), params, limits, cap_length)
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
                    pairs[place] = prompt, most_of_pair(own, limits, cap_length)
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
        self.checker.check(recheck(params, logprobs=request.params.logprobs))
        self.checker.check_logprobs(request.params.prompt_logprobs, "prompt_logprobs")
        check_prompt_length(len(request.prompt), limits)
        check_relayed(request, limits.places - len(request.prompt))
        for name, ids in token_ids(request):
            self.checker.check_vocabulary(ids, name)
        return RequestState(
            request_id, None, request.prompt, params, request.max_tokens, self.tokenizer, stream=True,
            priority=request.priority, lora_name=request.lora_name, relay=Relay(request),
        )  # fmt: skip

    def search(self, state: RequestState, length_penalty: float, width_param: str) -> RequestState:
        """Return ``state`` as a beam search.

        Its width is n, the number of choices. Raises InvalidRequest; it names ``width_param`` if the width is at fault.
        """
        asked, limits = state.params, self._limits()
        if 2 * asked.n > self.checker.max_logprobs:
            raise InvalidRequest(
                f"{width_param} is {asked.n}: beam search looks at twice as many alternatives, but at most "
                f"{self.checker.max_logprobs} are allowed (--max-logprobs)",
                param=width_param,
            )
        if asked.masked:
            raise InvalidRequest(
                f"beam search does not support {asked.masked[0]}: leave one out", param=asked.masked[0]
            )
        longest = len(state.prompt_ids) + state.max_tokens - 1
        check_prompt_length(longest, limits, f"{longest} tokens with all but the last of the answer's")
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
        check_prompt_length(tokens, self._limits(), f"{count} images of {self._images.tokens} tokens or more each")

    def room_for_images(self) -> Room:
        """Return the positions of a prompt that images may take."""
        return room_for_images(self._limits())

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
                check_prompt_length(len(prompt), self._limits())

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
        return TextBound(most, lambda size: check_prompt_length(most + 1, limits, size))

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
        _, stop_ids, bad_words, strings = state.checked or self.checker.made(params)
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

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        ids: list[int] = []
        try:
            for part in parts(prompt):
                ids += map(operator.index, part)
        except TypeError as error:
            raise InvalidRequest("A prompt of token ids must hold whole numbers only", param="prompt") from error
        self.checker.check_vocabulary(ids, "prompt")
        return ids


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
