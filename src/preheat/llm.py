"""Offline inference: ``LLM(model).generate(prompts)``, with frontend and engine in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from tqdm import tqdm

from preheat.core import EngineState, Outcome, SamplingParams
from preheat.engine.loop import Loop
from preheat.engine.progress import ProgressBar
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.image_parts import take_images
from preheat.frontend.input_processor import naming_prompt
from preheat.frontend.outputs import RequestOutput
from preheat.frontend.request_state import RequestState
from preheat.settings import BUNDLED, Settings
from preheat.startup import boot_engine, boot_front
from preheat.transport import InlineTransport
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


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]
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
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        ``sampling_params``: one object for all prompts or one for each; None: the checkpoint's recommendations. Raises
        InvalidRequest for the first prompt that cannot be served, before any runs. ``priority``: one for each prompt,
        with ``scheduling_policy="priority"``; the lowest goes first.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm, add_special_tokens=True, priority=priority)

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
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; the options are those of :meth:`ChatTemplate.render`. Parts of
        type "image_url" or, with an image of Pillow, "image_pil" are images.
        """
        talks = cast("list[Messages]", [messages] if messages and isinstance(messages[0], dict) else list(messages))
        render = self.frontend.template.render
        plain = [take_images(talk) for talk in talks]
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
        return self._run(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def _run(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        add_special_tokens: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(priority)} priorities: give one for each")
        if given is None:
            given = self.frontend.input.params()
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts but {len(params)} sampling_params: give one for all, or one for each"
            )
        states = []
        for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            with naming_prompt(place, len(prompts)):
                rank = 0 if priority is None else priority[place]
                states.append(self._prepare(place, prompt, own, add_special_tokens, rank))
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
        return [state.output() for state in states]

    def _prepare(
        self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool, priority: int
    ) -> RequestState:
        given, more = _given(prompt)
        more["images"] = self.frontend.load_images(_images_of(more.pop("multi_modal_data", None)))
        return self.frontend.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True,
            priority=priority, **more,
        )  # fmt: skip

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
        transport = InlineTransport(ProgressBar().show)
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
        self, weights: str | Path | Iterable[tuple[str, Tensor]], weight_version: str | None = None
    ) -> None:
        """Replace weights in place: those in the safetensors files of a folder, or these tensors, by their names in the
        checkpoint. They may be some of the model's. What was cached is forgotten.

        Raises ModelError, naming tensors, for what does not fit or is not finite; the old weights stay then.
        """
        if isinstance(weights, str | Path):
            self._command("update_weights", path=str(weights), version=weight_version or "")
        else:
            self._command("update_weights", tensors=dict(weights), version=weight_version or "")

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
        if request.chat:
            client.chat([*request.messages], request.params, use_tqdm=False)
        else:
            client.generate([request.prompt], request.params, use_tqdm=False)

    warm_up_frontend(send, images=frontend.images is not None)


def _images_of(data: dict[str, Any] | None) -> list[Any]:
    """The images in a prompt's ``multi_modal_data``."""
    if unknown := sorted((data or {}).keys() - {"image"}):
        raise InvalidRequest(f"multi_modal_data holds {unknown[0]!r}, but only 'image' is supported", param="prompt")
    images = (data or {}).get("image")
    return list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def _given(prompt: Prompt) -> tuple[str | Sequence[int], dict[str, Any]]:
    """The text or the token ids of a prompt, and what else :meth:`Frontend.prepare` is to know of it."""
    if not isinstance(prompt, dict):
        return prompt, {}
    more: dict[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    ids, text = more.pop("prompt_token_ids", None), more.pop("prompt", None)
    if unknown := more.keys() - {"cache_salt", "multi_modal_data"}:
        raise InvalidRequest(f"a prompt's {min(unknown)} is not supported", param="prompt")
    if ids is not None:
        return cast("Sequence[int]", ids), {"text": text, **more}
    if not isinstance(text, str):
        raise InvalidRequest("a prompt needs a text as prompt, or prompt_token_ids", param="prompt")
    return text, more


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also for a single one (text, ids or a dict)."""
    if isinstance(prompts, str | dict):
        return [cast("Prompt", prompts)]
    if len(prompts) and isinstance(prompts[0], int):  # type: ignore[literal-required]
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
