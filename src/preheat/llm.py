"""Offline inference: ``LLM(model).generate(prompts)``, with frontend and engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tqdm import tqdm

from preheat.core import SamplingParams
from preheat.engine.loop import Loop
from preheat.engine.progress import ProgressBar
from preheat.errors import InvalidRequest
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.frontend.outputs import RequestOutput
from preheat.frontend.request_state import RequestState
from preheat.settings import BUNDLED, Settings
from preheat.startup import boot_engine, boot_front
from preheat.transport import InlineTransport
from preheat.warmup.dummy_requests import DummyRequest, EchoLoop, spare_frontend, warm_up_frontend

Prompt = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` as in vLLM."""

Messages = list[dict[str, Any]]


class OfflineClient:
    """Completes prompts with a frontend, and a loop to which ``transport`` leads."""

    def __init__(
        self, frontend: Frontend, template: ChatTemplate, loop: Loop | EchoLoop, transport: InlineTransport
    ) -> None:
        self.frontend, self.template, self._loop, self._transport = frontend, template, loop, transport

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; results come in the order of the prompts.

        ``sampling_params`` None takes the checkpoint's recommendations; one object serves all prompts. Raises
        InvalidRequest, before anything runs, for the first prompt that cannot be served.
        """
        listed = _as_list(prompts)
        params = self._params_for(sampling_params, len(listed))
        return self._run(
            [self._prepare(i, p, s, True) for i, (p, s) in enumerate(zip(listed, params, strict=True))], use_tqdm
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        talks = cast("list[Messages]", [messages] if messages and isinstance(messages[0], dict) else list(messages))
        texts = [
            self.template.render(talk, add_generation_prompt=add_generation_prompt, variables=chat_template_kwargs)
            for talk in talks
        ]
        params = self._params_for(sampling_params, len(texts))
        return self._run(
            [self._prepare(i, p, s, False) for i, (p, s) in enumerate(zip(texts, params, strict=True))], use_tqdm
        )

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.frontend.input.params()
        listed = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(listed) != count:
            raise InvalidRequest(
                f"{count} prompts but {len(listed)} sampling_params: give one for all, or one for each"
            )
        return listed

    def _prepare(self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> RequestState:
        given: Any = prompt
        if isinstance(prompt, dict):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        return self.frontend.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True
        )

    def _run(self, states: list[RequestState], use_tqdm: bool) -> list[RequestOutput]:
        with tqdm(total=len(states), desc="Generating", disable=None if use_tqdm else True) as bar:
            for state in states:
                state.on_change = bar.update
            self.frontend.start(states)
            try:
                while self.frontend.busy:
                    self.advance()
            except BaseException:  # the caller interrupts: nothing of this call may stay behind
                for state in states:
                    self.frontend.abort(state)
                self._finish()
                raise
        for state in states:
            if state.error is not None:
                raise state.error
        self._finish()  # the cancels of sequences that ended on a stop string
        return [state.output() for state in states]

    def advance(self) -> None:
        """Run one step and book what it gave: what :meth:`generate` does until nothing is left to do."""
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

    Raises SettingsError for an option that is unknown or cannot be used, ModelError for a checkpoint that cannot,
    NotInvariant where the check at boot fails.
    """

    def __init__(self, model: str = BUNDLED, **options: Any) -> None:
        self.settings = Settings.load({"model": model, **options})
        transport = InlineTransport(ProgressBar().show)
        self.loop = boot_engine(self.settings, transport)
        frontend, template = boot_front(self.settings, transport.send)
        super().__init__(frontend, template, self.loop, transport)
        self._receive()
        frontend.check_blocked()
        if not self.settings.skip_warmup:
            _warm_up(frontend, template)


def _warm_up(frontend: Frontend, template: ChatTemplate) -> None:
    """The frontend warm-up: dummy requests through a client of their own."""
    transport, tokenizer = InlineTransport(), frontend.tokenizer
    spare = spare_frontend(tokenizer, transport.send)
    client = OfflineClient(spare, template, EchoLoop(transport, tokenizer), transport)

    def send(request: DummyRequest) -> None:
        if request.chat:
            client.chat([*request.messages], request.params, use_tqdm=False)
        else:
            client.generate([request.prompt], request.params, use_tqdm=False)

    warm_up_frontend(send)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids or a dict) as a list of one."""
    if isinstance(prompts, str | dict) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
