"""Frontend warm-up: dummy requests through everything that handles a request around the device.

The first requests of a process are slower than later ones even if nothing is compiled, because the interpreter
specializes code as it runs. So a few dummy requests are repeated: through the engine's loop at its boot, and through
``LLM`` or the server's HTTP application. ``LLM`` and the server use a spare frontend in front of an :class:`EchoLoop`,
so that the real one's ids, seeds and metrics are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from preheat.configs.structured import JSON_OBJECT
from preheat.core import OWN_ID, Delta, Finish, Ready, Request, SamplingParams, Stats, ToEngine, TokenLogprobs
from preheat.engine.loop import Loop
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.options import FrontendOptions
from preheat.frontend.tokenizer import Tokenizer
from preheat.plan.sampler_settings import POOLER_SETTINGS
from preheat.transport import InlineTransport

LOOP_ROUNDS, FRONTEND_ROUNDS = 8, 12
"""Rounds that are enough for the interpreter to specialize the code."""

_PROMPT_ID = _STOP_ID = 0
_ECHOED = 2  # tokens
_POOLED = bytes(4 * 64)
_MAX_MODEL_LEN = 65_536  # room for any chat template


class DummyRequest(msgspec.Struct, frozen=True):
    """A dummy request.

    ``text`` is its prompt, or a user's message of a ``chat``; without text, the prompt is a token id.
    """

    params: SamplingParams
    text: str = ""
    chat: bool = False
    stream: bool = False
    image: bool = False
    embeds: bool = False

    @property
    def prompt(self) -> str | list[int]:
        return self.text or [_PROMPT_ID]

    @property
    def messages(self) -> list[dict[str, Any]]:
        if not self.image:
            return [{"role": "user", "content": self.text}]
        parts = [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": self.text}]
        return [{"role": "user", "content": parts}]


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
"""The smallest image."""

LOOP_REQUESTS = (
    DummyRequest(SamplingParams(temperature=0.0, max_tokens=3)),
    DummyRequest(SamplingParams(temperature=1.0, max_tokens=3, seed=1)),
)

POOLED_REQUESTS = tuple(DummyRequest(replace(params, max_tokens=1)) for params in POOLER_SETTINGS)
"""The requests of a loop that pools: they end with their prompt."""

MASKED_REQUEST = DummyRequest(SamplingParams(max_tokens=3, seed=1, structured_outputs=JSON_OBJECT["json_object"]))
"""The request of a loop with grammars."""

_PLAIN = SamplingParams(max_tokens=_ECHOED)
_STOPPED = SamplingParams(max_tokens=_ECHOED, temperature=0.5, seed=1, stop=["zzz"])
FRONTEND_REQUESTS = (
    DummyRequest(_STOPPED, "def add(a, b):"),
    DummyRequest(SamplingParams(max_tokens=_ECHOED, logprobs=1, n=2)),
    DummyRequest(_STOPPED, "def add(a, b):", stream=True),
    DummyRequest(_PLAIN, stream=True),
    DummyRequest(_PLAIN, "Add.", chat=True),
    DummyRequest(SamplingParams(max_tokens=_ECHOED, logprobs=0), "Add.", chat=True, stream=True),
)


EMBEDDING_REQUESTS = tuple(DummyRequest(_PLAIN, text, embeds=True) for text in ("Add.", ""))
"""The requests of an engine that makes embeddings."""

IMAGE_REQUEST = DummyRequest(_PLAIN, "Look.", chat=True, image=True)


def warm_up_frontend(send: Callable[[DummyRequest], None], frontend: Frontend) -> None:
    """Send dummy requests to the spare frontend of ``frontend``.

    ``send`` sends one and reads the answer.
    """
    if frontend.pooling is not None:
        _repeat(send, EMBEDDING_REQUESTS, FRONTEND_ROUNDS)
        return
    with_images = frontend.images is not None
    _repeat(send, (*FRONTEND_REQUESTS, IMAGE_REQUEST) if with_images else FRONTEND_REQUESTS, FRONTEND_ROUNDS)


def warm_up_loop(loop: Loop, *, pools: bool = False) -> None:
    """Run dummy requests through ``loop`` and drop its messages.

    Its scheduler must be idle; its counts are reset.
    """
    room = loop.scheduler.limits.max_model_len - 1

    def send(dummy: DummyRequest) -> None:
        tokens = min(dummy.params.max_tokens or 1, room)
        stop_ids = [_STOP_ID] if dummy.params.structured_outputs else []
        loop.admission.add(
            Request(OWN_ID, [_PROMPT_ID], dummy.params, dummy.params.seed or 0, tokens, stop_ids=stop_ids)
        )
        loop.finish()

    if room:
        _repeat(send, POOLED_REQUESTS if pools else LOOP_REQUESTS, LOOP_ROUNDS)
        if not isinstance(loop.grammars, str):
            _repeat(send, [MASKED_REQUEST], LOOP_ROUNDS)
            loop.grammars.forget()
    loop.scheduler.forget()


def _repeat(send: Callable[[DummyRequest], None], requests: Iterable[DummyRequest], rounds: int) -> None:
    for _ in range(rounds):
        for request in requests:
            with suppress(InvalidRequest):  # a chat template may reject it; there may be no tokenizer
                send(request)


class EchoLoop:
    """A loop without a model.

    Each step gives every request the same token, and a request ends after two.
    """

    def __init__(self, transport: InlineTransport, tokenizer: Tokenizer) -> None:
        self._transport = transport
        self._token = tokenizer.encode("a", add_special_tokens=False)[-1] if tokenizer.speaks else 0
        self._new: list[Request] = []
        self._ending: list[Request] = []
        self.context = nullcontext

    def take(self, timeout: float | None) -> None:
        self._new += [message for message in self._transport.take(timeout) if isinstance(message, Request)]

    def step(self) -> None:
        rows, token = [*self._new, *self._ending], self._token
        delta = Delta([row.id for row in rows], [token] * len(rows), stats=Stats())
        delta.started = {row.id: 0 for row in self._new}
        delta.finished = {row.id: Finish("length") for row in self._ending}
        delta.pooled = dict.fromkeys(delta.finished, _POOLED)
        for place, row in enumerate(rows):
            if (count := row.params.logprobs) is not None:
                delta.logprobs[place] = TokenLogprobs(token, -1.0, 1, ((token, -1.0),) * count)
        self._new, self._ending = [], self._new
        self._transport.put(delta)

    def finish(self) -> None:
        self._new, self._ending = [], []


def spare_frontend(frontend: Frontend, send: Callable[[ToEngine], None]) -> Frontend:
    """Return a frontend for dummy requests.

    It shares only the tokenizer, the chat template, the formats, the pooling and the image reader with the real one.
    """
    options = FrontendOptions(
        template=frontend.template, recommended={}, images=frontend.images, formats=frontend.formats,
        pooling=frontend.pooling,
    )  # fmt: skip
    spare = Frontend(frontend.tokenizer, send, options)
    spare.handle(Ready(_MAX_MODEL_LEN, 2, 64, 0.0))
    return spare
