"""Offline inference: ``LLM(model).generate(prompts)``, with frontend and engine in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tqdm import tqdm

from preheat.core import SamplingParams
from preheat.engine.loop import Loop
from preheat.engine.progress import ProgressBar
from preheat.errors import InvalidRequest
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
    """Completes prompts with a frontend and a loop, connected by ``transport``."""

    def __init__(self, frontend: Frontend, loop: Loop | EchoLoop, transport: InlineTransport) -> None:
        self.frontend, self._loop, self._transport = frontend, loop, transport

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        ``sampling_params``: one object for all prompts or one for each; None: the checkpoint's recommendations. Raises
        InvalidRequest for the first prompt that cannot be served, before any runs.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm, add_special_tokens=True)

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
        render = self.frontend.template.render
        texts = [
            render(talk, add_generation_prompt=add_generation_prompt, variables=chat_template_kwargs) for talk in talks
        ]
        return self._run(texts, sampling_params, use_tqdm, add_special_tokens=False)

    def _run(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        if given is None:
            given = self.frontend.input.params()
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts but {len(params)} sampling_params: give one for all, or one for each"
            )
        states = [
            self._prepare(i, p, s, add_special_tokens) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]
        with tqdm(total=len(states), desc="Generating", disable=None if use_tqdm else True) as bar:
            for state in states:
                state.on_change = bar.update
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

    def _prepare(self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> RequestState:
        given: Any = prompt
        if isinstance(prompt, dict):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        return self.frontend.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True
        )

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
        self.loop = boot_engine(self.settings, transport)
        super().__init__(boot_front(self.settings, transport.send), self.loop, transport)
        self._receive()
        self.frontend.check_blocked()
        if not self.settings.skip_warmup:
            _warm_up(self.frontend)


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

    warm_up_frontend(send)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also for a single one (text, ids or a dict)."""
    if isinstance(prompts, str | dict) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
