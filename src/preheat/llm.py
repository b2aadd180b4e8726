"""Offline inference: ``LLM(model).generate(prompts)``, with frontend and engine in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from tqdm import tqdm

from preheat.core import EngineState, Outcome, SamplingParams
from preheat.engine.loop import Loop
from preheat.engine.progress import ProgressBar
from preheat.errors import InvalidRequest, PreheatError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.beams import BeamSearchParams
from preheat.frontend.embedding import PoolingParams, asked_of, check_dimensions, cosine, embedding, paired
from preheat.frontend.frontend import Frontend
from preheat.frontend.image_parts import take_images
from preheat.frontend.input_processor import naming_prompt
from preheat.frontend.messages import told
from preheat.frontend.outputs import (
    BeamSearchOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.request_state import RequestState
from preheat.settings import BUNDLED, Settings
from preheat.startup import boot_engine, boot_front
from preheat.transport import InlineTransport
from preheat.utils.adapters import LoraModule
from preheat.utils.weight_transfer import TransferGroup, announced
from preheat.warmup.dummy_requests import DummyRequest, EchoLoop, spare_frontend, warm_up_frontend

if TYPE_CHECKING:
    from torch import Tensor


class TextPrompt(TypedDict):
    """A text; ``cache_salt``: only prompts with the same one share what is cached."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids, and their text if it is to be shown in the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A tensor of torch, [tokens, hidden], in place of tokens; needs ``enable_prompt_embeds``."""

    prompt_embeds: Tensor
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | dict[str, Any]
"""Text, token ids, or one of vLLM's dictionaries, whose ``"multi_modal_data": {"image": images}`` is one image of
Pillow or a list of them."""

Messages = list[dict[str, Any]]


class OfflineClient:
    """Completes prompts with a frontend and a loop, connected by ``transport``."""

    def __init__(self, frontend: Frontend, loop: Loop | EchoLoop, transport: InlineTransport) -> None:
        self.frontend, self._loop, self._transport = frontend, loop, transport

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        ``sampling_params``: one object for all prompts or one for each; None: the checkpoint's recommendations. Raises
        InvalidRequest for the first prompt that cannot be served, before any runs. ``priority``: one for each prompt,
        with ``scheduling_policy="priority"``; the lowest goes first. ``lora_request``: an adapter for all prompts, or
        one or None for each; needs ``enable_lora``.
        """
        return self._run(
            _as_list(prompts), sampling_params, use_tqdm, add_special_tokens=True, priority=priority, lora=lora_request
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best sequences after each prompt, by vLLM's rules: see docs/beam-search.md.

        At most ``concurrency_limit`` prompts are searched at once; None: all of them. ``lora_request`` is as in
        :meth:`generate`. Raises InvalidRequest for the first prompt that cannot be served, before any is.
        """
        self.frontend.check_generates("LLM.beam_search")
        asked, states = _as_list(prompts), list[RequestState]()
        adapters = _adapter_of_each(lora_request, len(asked))
        sampling = SamplingParams(
            n=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
            temperature=params.temperature, include_stop_str_in_output=params.include_stop_str_in_output,
        )  # fmt: skip
        for place, prompt in enumerate(asked):
            with naming_prompt(place, len(asked)):
                state = self._prepare(place, prompt, sampling, add_special_tokens=True, priority=0)
                states.append(self.frontend.input.search(state, params.length_penalty, "beam_width"))
        self._adapt(states, adapters)
        for first in range(0, len(states), concurrency_limit or max(len(states), 1)):
            self._complete(states[first : first + (concurrency_limit or len(states))], use_tqdm)
        return [state.search.output() for state in states if state.search is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; the options are those of :meth:`ChatTemplate.render`. Parts of
        type "image_url" or, with an image of Pillow, "image_pil" are images. ``lora_request``: as in :meth:`generate`.
        """
        talks = cast("list[Messages]", [messages] if messages and isinstance(messages[0], dict) else list(messages))
        render = self.frontend.template.render
        plain = [take_images(told(talk)) for talk in talks]
        texts = [
            render(
                talk,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )
            for talk, _ in plain
        ]
        prompts: list[Prompt] = [
            {"prompt": text, "multi_modal_data": {"image": images}} if images else text
            for text, (_, images) in zip(texts, plain, strict=True)
        ]
        return self._run(prompts, sampling_params, use_tqdm, add_special_tokens=False, lora=lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str = "embed",
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What each prompt is pooled to, in order. Of vLLM's tasks there is "embed". Raises InvalidRequest for the
        first prompt that cannot be served, before any runs.
        """
        if pooling_task != "embed":
            raise InvalidRequest(f"pooling_task is {pooling_task!r}, but only 'embed' is served", param="pooling_task")
        pooling, asked = self.frontend.embedding_of("LLM.encode"), _as_list(prompts)
        given = pooling_params or PoolingParams()
        check_dimensions(pooling, given.dimensions)
        wanted, states = asked_of(pooling, truncate_prompt_tokens), list[RequestState]()
        for place, prompt in enumerate(asked):
            with naming_prompt(place, len(asked)):
                states.append(self._prepare(place, prompt, wanted, add_special_tokens=True, priority=0))
        self._complete(states, use_tqdm)
        return [
            PoolingRequestOutput(
                state.request_id,
                PoolingOutput(embedding(state, pooling, given.dimensions, given.normalizes)),
                state.prompt_ids,
                num_cached_tokens=state.cached_tokens,
            )
            for state in states
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embedding of each prompt; as :meth:`encode`."""
        pooled = self.encode(prompts, pooling_params, use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens)
        return [
            PoolingRequestOutput(
                each.request_id, EmbeddingOutput(each.outputs.data.tolist()), each.prompt_token_ids,
                num_cached_tokens=each.num_cached_tokens,
            )
            for each in pooled
        ]  # fmt: skip

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How alike each of ``data_1`` is to its place in ``data_2``, or a single one to all: see :func:`cosine`."""
        first, second = _as_list(data_1), _as_list(data_2)
        count = paired(len(first), len(second), "data_1")
        pooled = self.encode([*first, *second], None, use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens)
        ones, others = pooled[: len(first)] * (count // len(first)), pooled[len(first) :]
        return [
            PoolingRequestOutput(
                str(place),
                ScoringOutput(cosine(one.outputs.data, other.outputs.data)),
                one.prompt_token_ids + other.prompt_token_ids,
                num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
            )
            for place, (one, other) in enumerate(zip(ones, others, strict=True))
        ]

    def _run(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        add_special_tokens: bool,
        priority: Sequence[int] | None = None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        self.frontend.check_generates("LLM.generate")
        if priority is not None and len(priority) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(priority)} priorities: give one for each")
        if given is None:
            given = self.frontend.input.params()
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts but {len(params)} sampling_params: give one for all, or one for each"
            )
        adapters = _adapter_of_each(lora, len(prompts))
        states = []
        for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            with naming_prompt(place, len(prompts)):
                rank = 0 if priority is None else priority[place]
                states.append(self._prepare(place, prompt, own, add_special_tokens, rank))
        self._adapt(states, adapters)
        self._complete(states, use_tqdm)
        return [state.output() for state in states]

    def _complete(self, states: Sequence[RequestState], use_tqdm: bool) -> None:
        """Run ``states`` to their ends. Raises the error of the first that failed."""
        with tqdm(total=len(states), desc="Generating", disable=None if use_tqdm else True) as bar:
            for state in states:
                state.on_change = bar.update
            if self.frontend.state.paused:
                raise InvalidRequest("the engine is paused: call resume() first")
            self.frontend.start(states)
            try:
                while self.frontend.busy:
                    self.advance()
            except BaseException:  # interrupted: leave nothing of this call behind
                for state in states:
                    self.frontend.abort(state)
                self._finish()
                raise
        for state in states:
            if state.error is not None:
                raise state.error
        self._finish()  # the cancels of sequences that ended on a stop string

    def _prepare(
        self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool, priority: int
    ) -> RequestState:
        given, more = _given(prompt, self._embedded)
        more["images"] = self.frontend.load_images(_images_of(more.pop("multi_modal_data", None)))
        return self.frontend.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True,
            priority=priority, **more,
        )  # fmt: skip

    def _embedded(self, tensor: object) -> Embedded:
        return self.frontend.prompt_embeds.of_tensor(tensor)

    def _adapt(self, states: Sequence[RequestState], adapters: Sequence[LoRARequest | None]) -> None:
        """Let ``states`` have their adapters, which are read unless they are served already."""
        for adapter in dict.fromkeys(each for each in adapters if each is not None):
            self._serve(adapter)
        for state, each in zip(states, adapters, strict=True):
            state.lora_name = each.lora_name if each else ""

    def _serve(self, asked: LoRARequest) -> None:
        """Have an adapter read, unless it is served already. Raises InvalidRequest."""
        served = self.frontend.adapters.served.get(asked.lora_name)
        if served is not None and not asked.load_inplace:
            if served.path != asked.lora_path:
                raise InvalidRequest(
                    f"the adapter {asked.lora_name!r} is that in {served.path}: give the one in {asked.lora_path} "
                    "another name, or set load_inplace",
                    param="lora_request",
                )
            return
        answers: list[PreheatError | None] = []
        module = LoraModule(asked.lora_name, asked.lora_path)
        self.frontend.adapters.load(module, answers.append, in_place=asked.load_inplace)
        while not answers:
            self.advance()
        if error := answers[0]:
            raise error

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self.frontend.reset_prefix_cache()
        self._loop.take(0)

    def advance(self) -> None:
        """Run one step and process its results, as :meth:`generate` does until all requests are finished."""
        self._loop.take(0)
        self._loop.step()
        self._receive()

    def _finish(self) -> None:
        self._loop.take(0)
        self._loop.finish()

    def _receive(self) -> None:
        for message in self._transport.receive():
            self.frontend.handle(message)


class LLM(OfflineClient):
    """One model in this process. ``options`` are those of the command line, by name: see docs/settings.md.

    Raises SettingsError for a bad option, ModelError for a bad checkpoint, NotInvariant if the check at boot fails.
    """

    def __init__(self, model: str = BUNDLED, **options: Any) -> None:
        self.settings = Settings.load({"model": model, **options})
        transport = InlineTransport(ProgressBar(self.settings.use_tqdm_on_load).show)
        frontend = boot_front(self.settings, transport.send)  # first: what is wrong with it shows without torch
        self.loop = boot_engine(self.settings, transport)
        super().__init__(frontend, self.loop, transport)
        self._receive()
        self.frontend.check_blocked()
        if not self.settings.skip_warmup:
            _warm_up(self.frontend)

    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Run no step until :meth:`resume`. ``mode`` is for requests that run, as they may under
        :meth:`OfflineClient.advance`: they end with reason "abort", are run to their end, or go on later.
        """
        self._command("pause", mode=mode)

    def resume(self) -> None:
        """Run again."""
        self._command("resume")

    @property
    def state(self) -> EngineState:
        """Whether it is paused or asleep, the version of its weights and the digest of the check's logits with them."""
        return self.frontend.state

    def update_weights(
        self,
        weights: str | Path | Iterable[tuple[str, Tensor]] | Mapping[str, Any],
        weight_version: str | None = None,
    ) -> None:
        """Replace weights in place: those in the safetensors files of a folder, or these tensors, by their names in the
        checkpoint; or, as in vLLM, ``{"update_info": {...}}``, those that a trainer sends. They may be some of the
        model's. What was cached is forgotten.

        Raises ModelError, naming tensors, for what does not fit or is not finite; the old weights stay then.
        """
        version = weight_version or ""
        if isinstance(weights, str | Path):
            self._command("update_weights", path=str(weights), version=version)
        elif isinstance(weights, Mapping):
            info = weights["update_info"]
            tensors = announced(info["names"], info["dtype_names"], info["shapes"])
            self._command("update_weights", announced=tensors, version=version)
        else:
            self._command("update_weights", tensors=dict(weights), version=version)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the group of a trainer, which waits in :class:`preheat.WeightGroup`; needs ``weight_transfer_config``.
        ``init_info`` has vLLM's ``master_address``, ``master_port``, ``rank_offset`` and ``world_size``, and
        ``timeout`` in seconds. Raises InvalidRequest.
        """
        self._command("init_weight_transfer_engine", group=TransferGroup(**init_info.get("init_info", init_info)))

    def start_weight_update(self) -> None:
        """Keep what a trainer sends until :meth:`finish_weight_update`."""
        self._command("start_weight_update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Replace weights in place by all that a trainer has sent since :meth:`start_weight_update`."""
        self._command("finish_weight_update", version=weight_version or "")

    def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Give back memory, with ``enable_sleep_mode``: at level 1 that of the cache, at level 2 that of the weights
        too, which :meth:`update_weights` must then bring back; level 0 only pauses. ``mode`` is as in :meth:`pause`.
        """
        self._command("sleep", level=level, mode=mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, of all or of what ``tags`` name ("weights", "kv_cache"), and run again once all is there.
        Raises NotInvariant if the check's logits are not those of before.
        """
        self._command("wake_up", tags=list(tags or ()))

    def _command(self, name: str, **fields: Any) -> None:
        outcomes: list[Outcome] = []
        self.frontend.command(name, outcomes.append, **fields)
        self._loop.take(0)
        self._receive()
        while not outcomes:  # running requests are waited for
            self.advance()
        if outcomes[0].error is not None:
            raise outcomes[0].error.restore()


def _warm_up(frontend: Frontend) -> None:
    """The frontend warm-up: dummy requests through a separate client."""
    transport = InlineTransport()
    spare = spare_frontend(frontend, transport.send)
    client = OfflineClient(spare, EchoLoop(transport, frontend.tokenizer), transport)

    def send(request: DummyRequest) -> None:
        if request.embeds:
            client.embed(request.prompt, use_tqdm=False)
        elif request.chat:
            client.chat([*request.messages], request.params, use_tqdm=False)
        else:
            client.generate([request.prompt], request.params, use_tqdm=False)

    warm_up_frontend(send, frontend)


def _adapter_of_each(given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """The adapter of each of ``count`` prompts. Raises InvalidRequest unless each name stands for one adapter."""
    found = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
    if len(found) != count:
        raise InvalidRequest(f"{count} prompts but {len(found)} lora_requests: give one for each")
    named: dict[str, LoRARequest] = {}
    for each in found:
        if each is not None and named.setdefault(each.lora_name, each) != each:
            raise InvalidRequest(f"two lora_requests are named {each.lora_name!r}: give one of them another name")
    return found


def _images_of(data: dict[str, Any] | None) -> list[Any]:
    """The images in a prompt's ``multi_modal_data``."""
    if unknown := sorted((data or {}).keys() - {"image"}):
        raise InvalidRequest(f"multi_modal_data holds {unknown[0]!r}, but only 'image' is supported", param="prompt")
    images = (data or {}).get("image")
    return list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def _given(
    prompt: Prompt, embedded: Callable[[object], Embedded]
) -> tuple[str | Sequence[int] | Embedded, dict[str, Any]]:
    """The text, the ids or the embeddings of a prompt, and what else :meth:`Frontend.prepare` is to know of it."""
    if not isinstance(prompt, dict):
        return prompt, {}
    more: dict[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    if (tensor := more.pop("prompt_embeds", None)) is not None:
        if unknown := more.keys() - {"cache_salt"}:
            raise InvalidRequest(f"a prompt is prompt_embeds or {min(unknown)}: leave one out", param="prompt")
        return embedded(tensor), more
    ids, text = more.pop("prompt_token_ids", None), more.pop("prompt", None)
    if unknown := more.keys() - {"cache_salt", "multi_modal_data"}:
        raise InvalidRequest(f"a prompt's {min(unknown)} is not supported", param="prompt")
    if ids is not None:
        return cast("Sequence[int]", ids), {"text": text, **more}
    if not isinstance(text, str):
        raise InvalidRequest("a prompt needs a text as prompt, prompt_token_ids or prompt_embeds", param="prompt")
    return text, more


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also for a single one (text, ids or a dict)."""
    if isinstance(prompts, str | dict):
        return [cast("Prompt", prompts)]
    if len(prompts) and isinstance(prompts[0], int):  # type: ignore[literal-required]
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
