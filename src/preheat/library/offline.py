"""Completion of prompts within this process, by a frontend and a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import msgspec
from tqdm import tqdm

from preheat.configs.adapters import LoraModule
from preheat.core import SamplingParams
from preheat.engine.loop import Loop
from preheat.errors import InvalidRequest, PreheatError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.beams import BeamSearchParams
from preheat.frontend.embedding import (
    PoolingParams,
    check_dimensions,
    check_of_tokens,
    cosine,
    late_interaction,
    paired,
    pairs_of,
    pooled_outputs,
)
from preheat.frontend.frontend import Frontend
from preheat.frontend.image_parts import take_images
from preheat.frontend.input_processor import naming_prompt
from preheat.frontend.messages import chat_messages
from preheat.frontend.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from preheat.frontend.pairs import Pair
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.request_state import CheckedParams, RequestState
from preheat.library.inputs import Messages, Prompt, adapter_of_each, as_list, images_of, parts_of, text_of
from preheat.transport import InlineTransport
from preheat.warmup.dummy_requests import EchoLoop

LoRAs = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one or None for each."""

UseTqdm = bool | Callable[..., Any]
"""Whether a progress bar is shown, or a class of tqdm."""

_CHAT_OPTIONS = {
    "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template_content_format"
}  # fmt: skip
_AS_IT_IS = {"add_special_tokens": False}
"""No special tokens are added, since a template writes all of them itself."""


class _NoBar:
    """A progress bar that shows nothing, in no time."""

    def update(self, count: int = 1) -> None:
        """Do nothing."""


def _bar(asked: UseTqdm, total: int, what: str) -> Any:
    """Make a progress bar; without ``asked`` it shows nothing."""
    if asked is False:
        return nullcontext(_NoBar())
    make = tqdm if isinstance(asked, bool) else asked
    return make(total=total, desc=what, disable=None if asked else True)


def _text_of(prompt: Prompt) -> str:
    """Return the text of one side of a pair. Raises InvalidRequest for token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise InvalidRequest("a cross-encoder reads pairs of texts: give texts, not token ids", param="prompt")
    return text


def _tokenized(given: Mapping[str, Any] | None) -> tuple[bool, int | None]:
    """Return whether special tokens are added, and the limit of truncation.

    A limit is the number of last tokens of a prompt that are kept.

    Raises InvalidRequest for other arguments.
    """
    if unknown := sorted((given or {}).keys() - {"add_special_tokens", "truncate_prompt_tokens"}):
        raise InvalidRequest(
            f"tokenization_kwargs has {unknown[0]!r}, but takes add_special_tokens and truncate_prompt_tokens",
            param="tokenization_kwargs",
        )
    return (given or {}).get("add_special_tokens", True), (given or {}).get("truncate_prompt_tokens")


class OfflineClient:
    """Client of a frontend and a loop, connected by ``transport``."""

    def __init__(self, frontend: Frontend, loop: Loop | EchoLoop, transport: InlineTransport) -> None:
        self.frontend, self._loop, self._transport = frontend, loop, transport
        self._queued: list[RequestState] = []
        self._queued_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | int | None = None,
        lora_request: LoRAs = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, and return the results in the order of the prompts.

        A single prompt has a list of one result. With ``logprobs`` in ``sampling_params``, ``outputs[i].logprobs`` has
        one dict for each token: token id -> ``Logprob``, from the raw logits at temperature 1.

        - ``sampling_params``: one object for all prompts or one for each; None means the checkpoint's recommendations.
        - ``priority``: a number for all prompts or one for each, with ``scheduling_policy="priority"``; the lowest goes
          first.
        - ``lora_request``: an adapter for all prompts, or one or None for each; needs ``enable_lora``.
        - ``use_tqdm``: whether a bar is shown, or a class that makes it.
        - ``tokenization_kwargs``: ``add_special_tokens`` and ``truncate_prompt_tokens``.

        Raises InvalidRequest for the first prompt that cannot be served, before any runs.
        """
        states = self.prepared(
            as_list(prompts), sampling_params, priority, lora_request, tokenization=tokenization_kwargs
        )
        self._complete(states, use_tqdm)
        return [state.output() for state in states]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRAs = None,
        priority: Sequence[int] | int | None = None,
        use_tqdm: UseTqdm = False,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for :meth:`wait_for_completion`, and return their ids.

        The arguments are as in :meth:`generate`; ``use_tqdm`` shows the progress of encoding.
        """
        asked = as_list(prompts)
        with _bar(use_tqdm, len(asked), "Encoding") as bar:
            states = self.prepared(
                asked, sampling_params, priority, lora_request, tokenization=tokenization_kwargs, done=bar.update
            )
        return self._enqueue(states)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRAs = None,
        priority: Sequence[int] | int | None = None,
        **options: Any,
    ) -> list[str]:
        """Queue conversations, as :meth:`enqueue`; ``options`` are as in :meth:`chat`."""
        prompts = self._prompts_of(messages, **options)
        return self._enqueue(self.prepared(prompts, sampling_params, priority, lora_request, tokenization=_AS_IT_IS))

    def _enqueue(self, states: list[RequestState]) -> list[str]:
        for state in states:
            state.request_id = str(next(self._queued_ids))
        self.start(states)
        self._queued += states
        return [state.request_id for state in states]

    def wait_for_completion(
        self, output_type: type[RequestOutput] = RequestOutput, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Complete the queued requests, in the order of :meth:`enqueue`. Raises the error of the first that failed."""
        if not issubclass(RequestOutput, output_type):
            raise InvalidRequest(f"queued requests give RequestOutput, not {output_type.__name__}")
        states, self._queued = self._queued, []
        self._wait(states, use_tqdm)
        return [state.output() for state in states]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRAs = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the ``beam_width`` best sequences after each prompt, by vLLM's rules: see docs/beam-search.md.

        At most ``concurrency_limit`` prompts are searched at once; None means all of them. ``lora_request`` is as in
        :meth:`generate`. Raises InvalidRequest for the first prompt that cannot be served, before any is.
        """
        self.frontend.tasks.check_generates("LLM.beam_search")
        asked, states = as_list(prompts), list[RequestState]()
        adapters = adapter_of_each(lora_request, len(asked))
        sampling = SamplingParams(
            n=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
            temperature=params.temperature, include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens, structured_outputs=params.structured_outputs,
        )  # fmt: skip
        for place, prompt in enumerate(asked):
            with naming_prompt(place, len(asked)):
                state = self._prepare(place, prompt, sampling)
                states.append(self.frontend.input.search(state, params.length_penalty, "beam_width"))
        self._adapt(states, adapters)
        for first in range(0, len(states), concurrency_limit or max(len(states), 1)):
            self._complete(states[first : first + (concurrency_limit or len(states))], use_tqdm)
        return [state.search.output() for state in states if state.search is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        *,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Parts of type "image_url" or, with an image of Pillow, "image_pil" are images. ``options`` are the arguments of
        :meth:`ChatTemplate.render`, with its ``variables`` named ``chat_template_kwargs``, and ``chat_template``, a
        template in place of the model's. The other arguments are as in :meth:`generate`.
        """
        prompts = self._prompts_of(messages, **options)
        tokenization = _AS_IT_IS | dict(tokenization_kwargs or {})
        states = self.prepared(prompts, sampling_params, priority, lora_request, tokenization=tokenization)
        self._complete(states, use_tqdm)
        return [state.output() for state in states]

    def _prompts_of(
        self,
        messages: Messages | Sequence[Messages],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Prompt]:
        """Return the prompt of each conversation. Raises InvalidRequest for an unknown option."""
        if unknown := sorted(options.keys() - _CHAT_OPTIONS):
            raise InvalidRequest(
                f"chat takes no {unknown[0]!r}: it takes {', '.join(sorted(_CHAT_OPTIONS))}, chat_template and "
                "chat_template_kwargs",
                param=unknown[0],
            )
        talks = cast("list[Messages]", [messages] if messages and isinstance(messages[0], dict) else list(messages))
        template = self.frontend.template
        if chat_template is not None:
            template = template.replaced(chat_template)
        prompts = list[Prompt]()
        for talk in talks:
            plain, images = take_images(chat_messages(talk))
            text = template.render(plain, variables=chat_template_kwargs, **options)
            prompts.append({"prompt": text, "multi_modal_data": {"image": images}} if images else text)
        return prompts

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAs = None,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str = "embed",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each prompt, in order.

        The task is "embed", "token_embed" for a vector of each token, or "classify" for a classifier.
        ``tokenization_kwargs`` are as in :meth:`generate`. Raises InvalidRequest for the first prompt that cannot be
        served, before any runs.
        """
        own = self.frontend.tasks.pooling_for(pooling_task, "LLM.encode")
        if pooling_task == "token_embed":
            check_of_tokens(own, pooling_params.dimensions if pooling_params else None)
            pooling_params = msgspec.structs.replace(pooling_params or PoolingParams(), task=pooling_task)
        return self._pooled(
            as_list(prompts), pooling_params, use_tqdm, lora_request,
            tokenization_kwargs=tokenization_kwargs, truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip

    def _pooled(
        self,
        prompts: Sequence[Prompt | Pair],
        params: PoolingParams | None,
        use_tqdm: UseTqdm,
        lora: LoRAs,
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each prompt or pair; options are as in :meth:`encode`."""
        pooling, given = self.frontend.tasks.pooling_of("LLM.encode"), params or PoolingParams()
        states = self.prepared_to_pool(prompts, given, lora, tokenization_kwargs, truncate_prompt_tokens)
        self._complete(states, use_tqdm)
        return pooled_outputs(states, pooling, given)

    def prepared_to_pool(
        self,
        prompts: Sequence[Prompt | Pair],
        params: PoolingParams,
        lora: LoRAs,
        tokenization: Mapping[str, Any] | None,
        truncate: int | None = None,
    ) -> list[RequestState]:
        """Prepare a pooling request for each prompt. ``truncate`` applies unless ``tokenization`` has a limit."""
        pooling, (adds, own) = self.frontend.tasks.pooling_of("LLM.encode"), _tokenized(tokenization)
        check_dimensions(pooling, params.dimensions)
        cut = truncate if own is None else own
        wanted = self.frontend.tasks.asked_of(pooling, cut, of_tokens=params.task == "token_embed")
        adapters, states = adapter_of_each(lora, len(prompts)), list[RequestState]()
        encoded = self._encoded(prompts, [wanted.params] * len(prompts), adds)
        for place, prompt in enumerate(prompts):
            with naming_prompt(place, len(prompts)):
                states.append(self._prepare(place, prompt, wanted, adds, encoded=encoded[place]))
        self._adapt(states, adapters)
        return states

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRAs = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; ``options`` are as in :meth:`encode`."""
        pooled = self.encode(prompts, pooling_params, use_tqdm, lora_request, **options)
        return [EmbeddingRequestOutput.from_base(each) for each in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRAs = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the numbers of each prompt's classes; ``options`` are as in :meth:`encode`."""
        self.frontend.tasks.classes_of("LLM.classify")
        options |= {"pooling_task": "classify"}
        pooled = self.encode(prompts, pooling_params, use_tqdm, lora_request, **options)
        return [ClassificationRequestOutput.from_base(each) for each in pooled]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRAs = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the score of pairs of ``data_1`` and ``data_2``: a cross-encoder's, or the :func:`cosine`.

        A single one of ``data_1`` is compared with each of ``data_2``. A cross-encoder reads pairs of texts.
        Models with a vector for each token are compared by :func:`late_interaction`.
        """
        first, second = as_list(data_1), as_list(data_2)
        count, pooling = paired(len(first), len(second), "data_1"), self.frontend.tasks.scoring_of("LLM.score")
        if pooling.scores_pairs:
            texts = [*map(_text_of, first)], [*map(_text_of, second)]
            pooled = self._pooled(pairs_of(pooling, *texts), pooling_params, use_tqdm, lora_request, **options)
            return [ScoringRequestOutput.from_base(self._without_types(each)) for each in pooled]
        options["pooling_task"] = "token_embed" if pooling.of_tokens else "embed"
        pooled = self.encode([*first, *second], pooling_params, use_tqdm, lora_request, **options)
        alike = late_interaction if pooling.of_tokens else cosine
        ones, others = pooled[: len(first)] * (count // len(first)), pooled[len(first) :]
        return [
            ScoringRequestOutput(
                str(place),
                ScoringOutput(alike(one.outputs.data, other.outputs.data)),
                one.prompt_token_ids + other.prompt_token_ids,
                num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
            )
            for place, (one, other) in enumerate(zip(ones, others, strict=True))
        ]

    def _without_types(self, pooled: PoolingRequestOutput[PoolingOutput]) -> PoolingRequestOutput[PoolingOutput]:
        """Return the output of a pair with the plain ids of its tokens."""
        size = self.frontend.tokenizer.vocab_size
        pooled.prompt_token_ids = [id % size for id in pooled.prompt_token_ids]
        return pooled

    def prepared(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | int | None,
        lora: LoRAs,
        *,
        tokenization: Mapping[str, Any] | None,
        done: Callable[[], object] = lambda: None,
    ) -> list[RequestState]:
        """Prepare a request for each prompt; ``done`` is called after each."""
        self.frontend.tasks.check_generates("LLM.generate")
        count, (adds, truncate) = len(prompts), _tokenized(tokenization)
        ranks = [priority or 0] * count if isinstance(priority, int | None) else list(priority)
        if len(ranks) != count:
            raise InvalidRequest(f"{count} prompts but {len(ranks)} priorities: give one for each")
        if given is None:
            given = self.frontend.input.params()
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise InvalidRequest(
                f"{count} prompts but {len(params)} sampling_params: give one for all, or one for each"
            )
        if truncate is not None:
            params = [msgspec.structs.replace(own, truncate_prompt_tokens=truncate) for own in params]
        adapters, states = adapter_of_each(lora, count), list[RequestState]()
        encoded = self._encoded(prompts, params, adds)
        for place, (prompt, own, rank) in enumerate(zip(prompts, params, ranks, strict=True)):
            with naming_prompt(place, count):
                states.append(self._prepare(place, prompt, own, adds, rank, encoded=encoded[place]))
            done()
        self._adapt(states, adapters)
        return states

    def _complete(self, states: Sequence[RequestState], use_tqdm: UseTqdm) -> None:
        """Run ``states`` to their ends. Raises the error of the first that failed."""
        self.start(states)
        self._wait(states, use_tqdm)

    def start(self, states: Sequence[RequestState]) -> None:
        """Send prepared requests to the engine; :meth:`advance` runs them."""
        if self.frontend.state.paused:
            raise InvalidRequest("the engine is paused: call resume() first")
        self.frontend.start(states)

    def _wait(self, states: Sequence[RequestState], use_tqdm: UseTqdm) -> None:
        """Step until all requests have ended. Raises the error of the first of ``states`` that failed."""
        with _bar(use_tqdm, len(states), "Generating") as bar:
            for state in states:
                state.on_change = bar.update
            bar.update(sum(state.finished for state in states))
            try:
                with self._loop.context():
                    while self.frontend.busy:
                        self.advance()
            except BaseException:  # interrupted: leave nothing of this call behind
                for state in states:
                    self.frontend.abort(state)
                self.finish()
                raise
        for state in states:
            if state.error is not None:
                raise state.error
        self.finish()  # sends the cancels of sequences that ended on a stop string

    def _encoded(
        self, prompts: Sequence[Prompt | Pair], params: Sequence[SamplingParams], add_special_tokens: bool
    ) -> list[list[int] | None]:
        """Return the token ids of several texts or pairs, encoded together; None: the prompt is prepared alone."""
        if len(prompts) < 2:
            return [None] * len(prompts)
        texts = [text_of(prompt) if isinstance(prompt, dict) else prompt for prompt in prompts]
        return self.frontend.input.encode_all(texts, params, add_special_tokens=add_special_tokens, cap_length=True)

    def _prepare(
        self,
        index: int,
        prompt: Prompt | Pair,
        params: SamplingParams | CheckedParams,
        add_special_tokens: bool = True,
        priority: int = 0,
        *,
        encoded: list[int] | None = None,
    ) -> RequestState:
        given, more = (prompt, {}) if isinstance(prompt, Pair) else parts_of(prompt, self._embedded)
        more["images"] = self.frontend.load_images(images_of(more.pop("multi_modal_data", None)))
        return self.frontend.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True,
            priority=priority, encoded=encoded, **more,
        )  # fmt: skip

    def _embedded(self, tensor: object) -> Embedded:
        return self.frontend.prompt_embeds.of_tensor(tensor)

    def _adapt(self, states: Sequence[RequestState], adapters: Sequence[LoRARequest | None]) -> None:
        """Assign the adapters to ``states``, and load adapters that are not served yet."""
        for adapter in dict.fromkeys(each for each in adapters if each is not None):
            self.serve(adapter)
        for state, each in zip(states, adapters, strict=True):
            state.lora_name, state.lora_request = each.lora_name if each else "", each

    def serve(self, asked: LoRARequest) -> None:
        """Load an adapter, unless it is served already. Raises InvalidRequest."""
        served = self.frontend.adapters.served.get(asked.lora_name)
        module = LoraModule(asked.lora_name, asked.lora_path)
        if served is not None and not asked.load_inplace:
            if served.path != module.path:
                raise InvalidRequest(
                    f"the adapter {asked.lora_name!r} was loaded from {served.path}: give the adapter in "
                    f"{asked.lora_path} another name, or set load_inplace",
                    param="lora_request",
                )
            return
        answers: list[PreheatError | None] = []
        self.frontend.adapters.load(module, answers.append, in_place=asked.load_inplace)
        while not answers:
            self.advance()
        if error := answers[0]:
            raise error

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache for later requests.

        Return True, as vLLM does on success.

        Running requests keep their blocks, with or without ``reset_running_requests``, but no other request reads these
        blocks. Blocks on the host are dropped too, whatever ``reset_connector`` is.
        """
        self.frontend.reset_prefix_cache()
        self._loop.take(0)
        return True

    def advance(self) -> None:
        """Run one step and process its results.

        :meth:`generate` repeats this until all requests are finished.
        """
        self._loop.take(0)
        self._loop.step()
        self._receive()

    def finish(self) -> None:
        """Let the engine end canceled requests when nothing else runs."""
        self._loop.take(0)
        self._loop.finish()

    def _receive(self) -> None:
        for message in self._transport.receive():
            self.frontend.handle(message)
