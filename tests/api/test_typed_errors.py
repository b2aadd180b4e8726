"""Errors keep their types from the loop to the client.

The raised class decides the status that the client sees.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preheat.core import Delta, Finish, Ready, Request, SamplingParams
from preheat.engine.loop import Loop
from preheat.errors import ContextTooLong, InvalidRequest, PreheatError, WireError, _kinds
from preheat.frontend.frontend import Frontend
from preheat.frontend.tokenizer import Tokenizer
from preheat.llm import OfflineClient
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.transport import EngineTransport, InlineTransport
from tests.api.conftest import Server, serving, write_model
from tests.meta.source import MODULES
from tests.pure.paper import Harness, PaperDevice, PaperStep, limits, request

COMPLETIONS = "/v1/completions"
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_threads": 1}


def test_a_prompt_beyond_the_token_budget_is_refused_when_prompts_are_not_chunked() -> None:
    with serving("bundled", engine=None, enable_chunked_prefill=False, **SMALL) as server:
        for stream in (False, True):
            refused = server.post(COMPLETIONS, {"prompt": [5] * 33, "max_tokens": 2, "stream": stream})
            assert refused.status == 400 and refused.error["param"] == "prompt"
            assert "--enable-chunked-prefill" in refused.error["message"]
            assert "--max-num-batched-tokens" in refused.error["message"]
        assert server.post(COMPLETIONS, {"prompt": [5] * 32, "max_tokens": 2}).status == 200


# ------------------------------------------------------------------------------- an error class of somebody's own


class Teapot(PreheatError):
    """The smallest error class: all that the loop, the wire and the server need."""

    status, kind, code = 418, "teapot", "short_and_stout"


REFUSED, BREAKS, FINE = 2, 5, 6
PLAIN = {"max_tokens": 20, "ignore_eos": True, "skip_special_tokens": False}


class TeapotScheduler(Scheduler):
    def add(self, request: Request, *given: Any) -> None:
        if request.prompt[0] == REFUSED:
            raise Teapot("no coffee here", param="prompt")
        super().add(request, *given)


class TeapotDevice(PaperDevice):
    """Device with steps that fail when a prompt with BREAKS gets its tenth token."""

    def launch(self, step: PaperStep) -> PaperStep:
        time.sleep(0.01)  # or all is over before a stream begins
        if any(row.owner.prompt[0] == BREAKS and len(row.tokens) == 10 for row in step.rows):
            raise Teapot("it is empty")
        return super().launch(step)

    def step(self, event: object) -> None:
        pass

    def report(self) -> bytes:
        return b""


def teapot_loop(transport: EngineTransport | InlineTransport) -> Loop:
    scheduler = TeapotScheduler(limits())
    device = TeapotDevice(scheduler)
    transport.put(Ready(scheduler.limits.max_model_len, 65, 4, 0.0, b"", "", scheduler.budget.max_prompt_len))
    return Loop(transport, scheduler, device, device, device)  # type: ignore[arg-type]


def run_engine(settings: Settings, address: str) -> None:
    transport = EngineTransport(address)
    teapot_loop(transport).run()
    transport.close()


@pytest.fixture(scope="module")
def teapot(folder: Path) -> Iterator[Server]:
    with serving(str(folder), engine="tests.api.test_typed_errors:run_engine", wait=False) as server:
        server.wait_until_open()
        while server.post(COMPLETIONS, {"prompt": [FINE], "max_tokens": 1}).status == 503:
            pass
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_scheduler_reaches_the_client(teapot: Server, stream: bool) -> None:
    answer = teapot.post(COMPLETIONS, {"prompt": [REFUSED], "stream": stream})
    assert answer.status == 418
    assert answer.error == {
        "message": "no coffee here", "type": "teapot", "param": "prompt", "code": "short_and_stout"
    }  # fmt: skip


def test_an_error_of_a_step_reaches_the_client(teapot: Server) -> None:
    answer = teapot.post(COMPLETIONS, {"prompt": [BREAKS], **PLAIN})
    assert answer.status == 418 and answer.error["message"] == "it is empty"
    assert teapot.post(COMPLETIONS, {"prompt": [FINE], **PLAIN}).status == 200  # the loop goes on


def test_a_stream_ends_with_the_error_as_an_event(teapot: Server) -> None:
    answer = teapot.post(COMPLETIONS, {"prompt": [BREAKS], **PLAIN, "stream": True})
    assert answer.status == 200
    *events, error, done = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert events and done == "[DONE]"
    assert json.loads(error)["error"] == {
        "message": "it is empty", "type": "teapot", "param": None, "code": "short_and_stout"
    }  # fmt: skip


def client(tokenizer: Tokenizer) -> OfflineClient:
    transport = InlineTransport()
    loop = teapot_loop(transport)
    frontend = Frontend(tokenizer, transport.send)
    for message in transport.receive():
        frontend.handle(message)
    return OfflineClient(frontend, loop, transport)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("prompt", "message"), [([REFUSED], "no coffee"), ([BREAKS], "empty")])
def test_offline_the_typed_error_is_raised(tokenizer: Tokenizer, prompt: list[int], message: str) -> None:
    with pytest.raises(Teapot, match=message) as raised:
        client(tokenizer).generate([prompt], SamplingParams(**PLAIN), use_tqdm=False)
    assert raised.value.status == 418


# ----------------------------------------------------------------------------------------------------- the wire


@pytest.mark.parametrize("error", [Teapot("a", param="b"), ContextTooLong("long", param="prompt"), PreheatError("x")])
def test_an_error_is_restored_as_it_was(error: PreheatError) -> None:
    delta = Delta(finished={1: Finish("error", error=WireError.of(error))})
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta).finished[1].error
    restored = back and back.restore()
    assert type(restored) is type(error) and restored is not error
    assert (restored.message, restored.param, restored.status) == (error.message, error.param, error.status)


def test_foreign_errors_become_internal_errors() -> None:
    restored = WireError.of(ZeroDivisionError("division by zero")).restore()
    assert type(restored) is PreheatError and restored.message == "ZeroDivisionError: division by zero"
    assert type(WireError("NeverHeardOf", "x").restore()) is PreheatError


def test_every_error_of_ours_can_be_restored_in_every_process() -> None:
    """Every error class is in preheat.errors, as each process must know it without another import."""
    ours = {kind.__name__: kind for kind in _kinds(PreheatError) if kind.__module__ == "preheat.errors"}
    bases = "|".join(ours)
    for path in MODULES:
        if path.name != "errors.py":
            assert re.findall(rf"^class (\w+)\((?:{bases})\)", path.read_text(), re.MULTILINE) == [], path
    assert len(ours) > 10
    assert all(type(WireError.of(kind("x")).restore()) is kind for kind in ours.values())


# --------------------------------------------------------------------------- a refusal of the scheduler is a 400


def slipped_through(harness: Harness, *requests: Request) -> PreheatError:
    """Return a frontend's error for a refusal of the scheduler.

    The refused request is the last of ``requests``; the frontend let them pass.
    """
    for each in requests:
        harness.transport.send(each)
    harness.loop.take(0)
    deltas = [message for message in harness.transport.receive() if isinstance(message, Delta)]
    (finish,) = [delta.finished[requests[-1].id] for delta in deltas if delta.finished]
    assert finish.reason == "error" and finish.error is not None
    return finish.error.restore()


@pytest.mark.parametrize(
    "requests",
    [
        [request(1, [])],
        [request(1, [1] * 64, 1)],
        [request(1, [1] * 60, 5)],
        [request(1, [1] * 33, 5)],
        [request(1, [1]), request(1, [1])],
    ],
    ids=["empty", "no-room", "too-long", "beyond-the-budget", "twice"],
)
def test_requests_that_the_scheduler_refuses_get_status_400(requests: list[Request]) -> None:
    error = slipped_through(Harness(limits(), enable_chunked_prefill=False), *requests)
    assert isinstance(error, InvalidRequest) and error.status == 400


def padded(rows: int, tokens: int, longest: int) -> int:
    """Pad to multiples of eight."""
    return -(-tokens // 8) * 8


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("budget", [12, 32, 128])
def test_frontend_and_scheduler_refuse_the_same_requests(tokenizer: Tokenizer, chunked: bool, budget: int) -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=budget), enable_chunked_prefill=chunked, padded=padded)
    frontend = Frontend(tokenizer, lambda message: None)
    frontend.handle(Ready(64, 65, 4, 0.0, b"", "", scheduler.budget.max_prompt_len))
    for length in range(70):
        for max_tokens in (1, 5, 64):
            try:
                frontend.prepare([5] * length, SamplingParams(max_tokens=max_tokens))
                refused = None
            except InvalidRequest as error:
                refused = error
            try:
                scheduler.add(request(1000 * length + max_tokens, [5] * length, max_tokens))
            except InvalidRequest:
                assert refused is not None and refused.status == 400 and refused.param, (length, max_tokens)
            else:
                assert refused is None, (length, max_tokens)
