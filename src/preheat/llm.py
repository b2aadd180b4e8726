"""The offline face: ``LLM(model).generate(prompts)``. It drives the loop inline, through the same front door."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from tqdm import tqdm

from preheat.core import SamplingParams
from preheat.engine.progress import ProgressBar
from preheat.engine.rehearsal import unwatched
from preheat.errors import InvalidRequest
from preheat.frontend.frontdoor import FrontDoor
from preheat.frontend.outputs import RequestOutput
from preheat.frontend.request_state import Ticket
from preheat.settings import BUNDLED, Settings
from preheat.startup import boot_engine, boot_front
from preheat.transport import InlineTransport

Prompt = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` as in vLLM."""

Messages = list[dict[str, Any]]

FRONT_ROUNDS = 3
"""Of the rehearsal: the loop has had its own, and what is left is mostly what a first call costs."""


class LLM:
    """One model in this process. ``options`` are those of the command line, by name: see docs/settings.md.

    Raises SettingsError for an option that is unknown or cannot be used, ModelError for a checkpoint that cannot,
    NotInvariant where the check at boot fails.
    """

    def __init__(self, model: str = BUNDLED, **options: Any) -> None:
        self.settings = Settings.load({"model": model, **options})
        transport = InlineTransport(ProgressBar().show)
        self.loop = boot_engine(self.settings, transport)
        self.frontdoor, self.template = boot_front(self.settings, transport.send)
        self._transport = transport
        self._receive()
        self.frontdoor.check_held()
        if not self.settings.skip_warmup and self.loop.scheduler.limits.answers:
            self._rehearse()

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
            [self._ticket(i, p, s, True) for i, (p, s) in enumerate(zip(listed, params, strict=True))], use_tqdm
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
            [self._ticket(i, p, s, False) for i, (p, s) in enumerate(zip(texts, params, strict=True))], use_tqdm
        )

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.frontdoor.params()
        listed = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(listed) != count:
            raise InvalidRequest(
                f"{count} prompts but {len(listed)} sampling_params: give one for all, or one for each"
            )
        return listed

    def _ticket(self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> Ticket:
        given: Any = prompt
        if isinstance(prompt, dict):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        return self.frontdoor.prepare(
            given, params, request_id=str(index), add_special_tokens=add_special_tokens, cap_length=True
        )

    def _rehearse(self) -> None:
        """Answer requests of nobody's, as the server does before it serves: the first one of a process is slower."""
        stage = copy.copy(self)
        stage.loop = unwatched(self.loop)
        stage.frontdoor = FrontDoor(self.frontdoor.tokenizer, self._transport.send)
        stage.frontdoor.ready = self.frontdoor.ready
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for _ in range(FRONT_ROUNDS):
            stage.generate([[0]], params, use_tqdm=False)
        self.loop.scheduler.forget()

    def _run(self, tickets: list[Ticket], use_tqdm: bool) -> list[RequestOutput]:
        with tqdm(total=len(tickets), desc="Generating", disable=None if use_tqdm else True) as bar:
            for ticket in tickets:
                ticket.on_change = bar.update
            self.frontdoor.start(tickets)
            try:
                while self.frontdoor.busy:
                    self.advance()
            except BaseException:  # the caller interrupts: nothing of this call may stay behind
                for ticket in tickets:
                    self.frontdoor.abort(ticket)
                self.loop.take(0)
                self.loop.finish()
                raise
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error
        self.loop.take(0)  # the cancels of sequences that ended on a stop string
        self.loop.finish()
        return [ticket.output() for ticket in tickets]

    def advance(self) -> None:
        """Run one step and book what it gave: what :meth:`generate` does until nothing is left to do."""
        self.loop.take(0)
        self.loop.step()
        self._receive()

    def _receive(self) -> None:
        for message in self._transport.receive():
            self.frontdoor.handle(message)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids or a dict) as a list of one."""
    if isinstance(prompts, str | dict) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
