"""The frontend against an engine played by hand: its messages, and its answers to the engine's."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.configs.adapters import LoraModule
from preheat.core import (
    AdapterReport,
    Cancel,
    Delta,
    Died,
    Finish,
    LoadAdapter,
    Ready,
    RepetitionDetectionParams,
    Request,
    SamplingParams,
    ToEngine,
    TokenLogprobs,
    UnloadAdapter,
)
from preheat.errors import (
    AdapterError,
    AlreadyThere,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    ModelError,
    NotFound,
    NotReady,
    PreheatError,
    SettingsError,
    TooManyRequests,
    WireError,
)
from preheat.frontend import frontend as frontend_module
from preheat.frontend.adapters import Adapters
from preheat.frontend.frontend import Frontend
from preheat.frontend.input_processor import naming_prompt
from preheat.frontend.options import FrontendOptions
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.tokenizer import Tokenizer
from preheat.llm import LLM
from preheat.server.openai.conversation import plain_messages
from preheat.server.openai.schema import Message
from preheat.settings import Settings
from preheat.startup import boot_front
from tests.api.conftest import write_model

READY = Ready(max_model_len=64, num_blocks=10, block_size=16, seconds=0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model")))


class Played:
    """A frontend, and the messages that it sent."""

    def __init__(self, tokenizer: Tokenizer, **options: int) -> None:
        self.sent: list[ToEngine] = []
        self.frontend = Frontend(tokenizer, self.sent.append, FrontendOptions(**options))
        self.frontend.handle(READY)

    def ask(self, prompt: str | list[int] = "hi", stream: bool = False, **params: object) -> RequestState:
        state = self.frontend.prepare(prompt, self.frontend.input.params(**params))
        state.stream = stream
        self.frontend.start([state])
        return state

    @property
    def requests(self) -> list[Request]:
        return [message for message in self.sent if isinstance(message, Request)]

    def say(self, text: str | list[int], finish: Finish | None = None, id: int = 1) -> None:
        """Give the tokens of ``text`` as the engine, one step each."""
        ids = self.frontend.tokenizer.encode(text, False) if isinstance(text, str) else text
        for place, token in enumerate(ids):
            last = finish is not None and place == len(ids) - 1
            self.frontend.handle(Delta(ids=[id], tokens=[token], finished={id: finish} if last else {}))


@pytest.fixture
def played(tokenizer: Tokenizer) -> Played:
    return Played(tokenizer)


def test_adapters_are_asked_for(tokenizer: Tokenizer) -> None:
    sent: list[ToEngine] = []
    settings = Settings(enable_lora=True, lora_modules=("first=/a",), max_cpu_loras=3, served_model_name=("tiny",))
    frontend = Frontend(tokenizer, sent.append, FrontendOptions(adapters=Adapters(sent.append, settings)))
    frontend.handle(READY)
    told: list[PreheatError | None] = []
    frontend.adapters.load(LoraModule("second", "/b"), told.append)
    assert sent == [LoadAdapter("second", "/b", 1)]
    for name, error in (("second", "being loaded"), ("first", "served already"), ("tiny", "the model itself")):
        with pytest.raises(AlreadyThere, match=error):
            frontend.adapters.load(LoraModule(name, "/c"), told.append)
    assert not told and list(frontend.adapters.served) == ["first"]
    frontend.handle(AdapterReport("second", 1))
    assert told == [None] and list(frontend.adapters.served) == ["first", "second"]

    frontend.adapters.load(LoraModule("first", "/d"), told.append, in_place=True)
    frontend.handle(AdapterReport("first", 2, WireError.of(AdapterError("no"))))
    assert isinstance(told[1], AdapterError) and frontend.adapters.served["first"].path == "/a"
    frontend.adapters.unload("second", told.append)
    assert sent[-1] == UnloadAdapter("second", 3) and list(frontend.adapters.served) == ["first"]
    with pytest.raises(AlreadyThere, match="being unloaded"):
        frontend.adapters.unload("second", told.append)
    with pytest.raises(NotFound, match="no adapter named 'third'"):
        frontend.adapters.unload("third", told.append)
    frontend.handle(Died(WireError.of(EngineDead("gone"))))
    assert isinstance(told[2], EngineDead) and len(told) == 3


def test_without_enable_lora_no_adapter_is_asked_for(played: Played) -> None:
    with pytest.raises(InvalidRequest, match="enable_lora"):
        played.frontend.adapters.load(LoraModule("a", "/a"), lambda _: None)


def test_requests_are_logged_for_who_asks(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quiet = Played(tokenizer)
        quiet.ask()
        quiet.say("ab", Finish("length"))
        assert caplog.messages == []
        played = Played(tokenizer, log_requests=True)
        state = played.ask("a secret", n=2, max_tokens=3)
        played.say("ab", Finish("length"))
        assert len(caplog.messages) == 1  # a choice is still running
        played.say("c", Finish("stop"), id=2)
        aborted = played.ask([5, 6])
        played.frontend.abort(aborted)
    count = len(state.prompt_ids)
    begun, ended, other, gone = caplog.messages
    assert begun == f"Received request {state.request_id}: {count} prompt tokens, n=2, max_tokens=3"
    generated = sum(len(choice.token_ids) for choice in state.choices)
    assert re.fullmatch(
        rf"Finished request {state.request_id}: length and stop, {count} prompt tokens \(0 cached\), "
        rf"{generated} generated, the first after \d+\.\d{{3}} s, \d+\.\d{{3}} s in total",
        ended,
    )
    assert other.startswith(f"Received request {aborted.request_id}: 2 prompt tokens")
    assert gone.startswith(f"Finished request {aborted.request_id}: abort, 2 prompt tokens (0 cached), 0 generated, ")
    assert "secret" not in caplog.text


def test_a_request_is_resolved(played: Played) -> None:
    state = played.ask("hi", n=3, seed=-1, stop_token_ids=[9], max_tokens=5, prompt_logprobs=2, logprobs=1)
    prompt = played.frontend.tokenizer.encode("hi")
    assert [r.choice for r in played.requests] == [0, 1, 2] and len({r.id for r in played.requests}) == 3
    assert all(r.seed == 2**64 - 1 and r.prompt == prompt and r.stop_ids == [1, 9] for r in played.requests)
    assert [r.params.prompt_logprobs for r in played.requests] == [2, None, None]
    assert state.unfinished == 3 and played.frontend.metrics.waiting == 3
    played.ask(ignore_eos=True, max_tokens=None)
    assert played.requests[-1].stop_ids == [] and played.requests[-1].max_tokens == 64 - len(prompt)


def test_seeds_are_drawn(tokenizer: Tokenizer) -> None:
    def drawn(**options: int) -> list[int]:
        played = Played(tokenizer, **options)
        played.ask()
        played.ask()
        return [r.seed for r in played.requests]

    assert drawn(seed=1) == drawn(seed=1) and len({*drawn(seed=1), *drawn()}) == 4


def test_text_token_ids_and_ends(played: Played) -> None:
    state = played.ask()
    played.say("Grüße 😀", Finish("length"))
    output = state.output()
    assert output.finished and output.outputs[0].text == "Grüße 😀" and output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == played.frontend.tokenizer.encode("Grüße 😀", False)
    assert not played.frontend.busy and played.frontend.metrics.finished["length"] == 1


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<|im_start|>")])
def test_a_stop_token_is_an_id_and_no_text(played: Played, include: bool, text: str) -> None:
    state = played.ask(stop_token_ids=[2], include_stop_str_in_output=include, skip_special_tokens=False)
    played.say([*played.frontend.tokenizer.encode("a", False), 2], Finish("stop", stop_id=2))
    output = state.output().outputs[0]
    assert (output.text, output.token_ids[-1], output.finish_reason, output.stop_reason) == (text, 2, "stop", 2)


def test_the_end_of_sequence_is_no_stop_reason(played: Played) -> None:
    state = played.ask()
    played.say([1], Finish("stop", stop_id=1))
    assert state.output().outputs[0].stop_reason is None and state.output().outputs[0].text == ""


def test_a_stop_string_cancels_and_later_tokens_are_ignored(played: Played) -> None:
    state = played.ask(stop=["return"], stream=True)
    shown = []
    state.on_change = lambda: shown.extend(c.take_delta().text for c in state.choices if c.has_delta)
    played.say("x\n    return a + b")
    output = state.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("x\n    ", "stop", "return")
    assert Cancel(1) in played.sent and "".join(shown) == "x\n    " and not played.frontend.busy
    assert played.frontend.metrics.finished["stop"] == 1 and played.sent.count(Cancel(1)) == 1


def test_min_tokens_keeps_stop_strings_off(played: Played) -> None:
    state = played.ask(stop=["a"], min_tokens=4, max_tokens=20)
    played.say([*played.frontend.tokenizer.encode("a", False)] * 6)
    output = state.output().outputs[0]
    assert output.text == "aaaa" and len(output.token_ids) == 5


REPEATS = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)


def test_repetition_cancels_and_later_tokens_are_ignored(played: Played) -> None:
    state = played.ask(repetition_detection=REPEATS, stream=True)
    played.say([9, 7, 8, 7, 8, 7, 8, 7, 8])
    output = state.output().outputs[0]
    assert (output.token_ids, output.finish_reason) == ([9, 7, 8, 7, 8, 7, 8], "repetition")
    assert output.stop_reason == "repetition_detected" and played.sent.count(Cancel(1)) == 1
    assert not played.frontend.busy and played.frontend.metrics.finished["repetition"] == 1


@pytest.mark.parametrize(
    ("options", "tokens", "end", "reason", "count"),
    [
        ({"min_tokens": 7}, [7, 8] * 6, None, "repetition", 7),
        ({"min_tokens": 6}, [7, 8] * 6, None, "repetition", 6),
        ({}, [7, 8] * 3, Finish("length"), "length", 6),  # as in vLLM: the engine's own reasons go before it
        ({"stop_token_ids": [8]}, [7, 8] * 3, Finish("stop", stop_id=8), "stop", 6),
        ({}, [7, 8, 7, 8, 7, 7, 8, 7, 8, 9], Finish("length"), "length", 10),
    ],
)
def test_when_repetition_counts(
    played: Played, options: dict[str, object], tokens: list[int], end: Finish | None, reason: str, count: int
) -> None:
    state = played.ask(repetition_detection=REPEATS, **options)
    played.say(tokens, end)
    output = state.output().outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == (reason, count)


def test_each_choice_repeats_on_its_own(played: Played) -> None:
    state = played.ask(n=2, repetition_detection=REPEATS)
    first, second = state.choices
    for place in range(8):
        rows = [choice for choice in (first, second) if choice.finish_reason is None]
        tokens = [7 + place % 2 if choice is first else place for choice in rows]
        played.frontend.handle(Delta(ids=[choice.id for choice in rows], tokens=tokens))
    assert first.finish_reason == "repetition" and second.finish_reason is None and len(second.token_ids) == 8


def test_a_buffered_character_is_shown_at_the_end(played: Played) -> None:
    state = played.ask(stream=True)
    deltas = []
    state.on_change = lambda: deltas.extend(c.take_delta().text for c in state.choices if c.has_delta)
    half = played.frontend.tokenizer.encode("🦜", False)[:2]
    played.say([*played.frontend.tokenizer.encode("a", False), *half], Finish("length"))
    assert deltas == ["a", "\ufffd"] and state.output().outputs[0].text == "a\ufffd"


words = st.lists(st.sampled_from(["return", " a", "+", "😀", "\n", "é", "x"]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(words=words, stops=st.lists(st.sampled_from(["a+", "retu", "😀é", "\n", "zz"]), max_size=3), n=st.integers(1, 3))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, words: list[str], stops: list[str], n: int) -> None:
    """The joined deltas of each choice are its text, in any interleaving.

    Without stops, they are the decoded tokens.
    """
    played, rng = Played(tokenizer), random.Random(len(words))
    state = played.ask(n=n, stop=stops or None, stream=True)
    told = [""] * n

    def listen() -> None:
        for choice in state.choices:
            if choice.has_delta and rng.random() < 0.5 + 0.5 * state.finished:
                told[choice.index] += choice.take_delta().text

    state.on_change = listen
    ids = tokenizer.encode("".join(words) + "!", False)
    for place, token in enumerate(ids):
        rows = [choice.id for choice in state.choices]
        end = {id: Finish("length") for id in rows} if place == len(ids) - 1 else {}
        played.frontend.handle(Delta(ids=rows, tokens=[token] * n, finished=end))
    listen()
    for choice in state.choices:
        assert told[choice.index] == state.output().outputs[choice.index].text
        if choice.stop_reason is None:
            assert told[choice.index] == tokenizer.decode(ids)
        else:
            assert tokenizer.decode(ids).startswith(told[choice.index] + str(choice.stop_reason))


def test_logprobs(played: Played) -> None:
    state = played.ask(logprobs=2)
    played.frontend.handle(
        Delta(ids=[1], tokens=[70], logprobs={0: TokenLogprobs(70, -2.0, 3, ((71, -0.5), (72, -1.0)))},
              finished={1: Finish("length")})
    )  # fmt: skip
    output = state.output().outputs[0]
    assert output.logprobs and list(output.logprobs[0]) == [70, 71, 72] and output.cumulative_logprob == -2.0
    assert [p.rank for p in output.logprobs[0].values()] == [3, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", {"add": False}, InvalidRequest, "empty"),
        ([], {}, InvalidRequest, "empty"),
        ([1.5], {}, InvalidRequest, "whole numbers"),
        ([-1], {}, InvalidRequest, "-1"),
        ([10**9], {}, InvalidRequest, "1000000000"),
        ([5] * 64, {}, ContextTooLong, "maximum context length is 64 tokens.*64 tokens"),
        ([5] * 60, {"max_tokens": 5}, ContextTooLong, r"65 tokens \(60 in the prompt, 5 in the completion\)"),
        ([5] * 60, {"max_tokens": None, "min_tokens": 5}, InvalidRequest, "only 4"),
        ([5], {"logprobs": 21}, InvalidRequest, "at most 20"),
        ([5], {"prompt_logprobs": 21}, InvalidRequest, "prompt_logprobs"),
        ([5], {"logit_bias": {10**6: 1.0}}, InvalidRequest, "logit_bias"),
        ([5], {"stop_token_ids": [10**6]}, InvalidRequest, "stop_token_ids"),
        ([5], {"stop": ["x"] * 129}, InvalidRequest, "stop"),
        ([5], {"temperature": -1}, InvalidRequest, "temperature"),
        ([5], {"temperature": "hot"}, InvalidRequest, "temperature"),
        ([5], {"n": 0}, InvalidRequest, "n must be"),
        ("a\ud800", {}, InvalidRequest, "Unicode"),
    ],
)
def test_refusals_allocate_nothing(
    played: Played, prompt: str | list[int], params: dict, error: type[PreheatError], message: str
) -> None:
    special = params.pop("add", True)
    with pytest.raises(error, match=message) as refused:
        played.frontend.prepare(prompt, played.frontend.input.params(**params), add_special_tokens=special)
    assert (refused.value.status == 400 and refused.value.param is not None) or "Unicode" in message
    assert not played.sent and not played.frontend.busy


def test_wrong_types_in_a_ready_made_object_are_refused(played: Played) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        played.frontend.prepare("x", SamplingParams(stop_token_ids="5"))  # type: ignore[arg-type]


def test_lengths_are_capped_on_demand(played: Played) -> None:
    assert played.frontend.prepare([5] * 60, SamplingParams(max_tokens=50), cap_length=True).max_tokens == 4


def test_minus_one_stands_for_a_number(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer, max_logprobs=7)
    params = played.ask(logprobs=-1, prompt_logprobs=-1).params
    assert (params.logprobs, params.prompt_logprobs) == (7, 7) == (
        played.requests[-1].params.logprobs, played.requests[-1].params.prompt_logprobs
    )  # fmt: skip
    most = Played(tokenizer, max_logprobs=10**6).ask(logprobs=-1).params
    assert (most.logprobs, most.prompt_logprobs) == (tokenizer.vocab_size, None)


@pytest.mark.parametrize(("asked", "max_tokens", "kept"), [(5, 4, 5), (-1, 4, 60), (-1, None, 63)])
def test_truncation_keeps_the_end_of_the_prompt(played: Played, asked: int, max_tokens: int | None, kept: int) -> None:
    ids = [5 + at for at in range(80)]
    params = played.frontend.input.params(truncate_prompt_tokens=asked, max_tokens=max_tokens)
    assert played.frontend.prepare(ids, params).prompt_ids == ids[-kept:]


@pytest.mark.parametrize(("asked", "max_tokens"), [(64, 4), (-1, 64)])
def test_truncation_makes_no_room_that_there_is_not(played: Played, asked: int, max_tokens: int) -> None:
    params = played.frontend.input.params(truncate_prompt_tokens=asked, max_tokens=max_tokens)
    with pytest.raises(ContextTooLong, match="maximum context length is 64"):
        played.frontend.prepare([5] * 80, params)


def test_the_prompt_of_a_truncated_text_is_its_kept_part(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer)
    played.frontend.handle(msgspec.structs.replace(READY, max_prompt_len=3))
    text = "def add(a, b):"
    state = played.frontend.prepare(text, played.frontend.input.params(truncate_prompt_tokens=-1))
    assert state.prompt_ids == tokenizer.encode(text)[-3:]
    assert state.prompt == state.prompt_text == tokenizer.decode(state.prompt_ids)
    assert text.endswith(state.prompt)


def test_the_queue_is_bounded(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer, max_queued=2)
    first = played.ask(n=2)
    with pytest.raises(TooManyRequests):
        played.ask()
    played.frontend.handle(Delta(started={1: 0, 2: 8}))
    played.ask()
    assert first.cached_tokens == 0 and played.frontend.metrics.running == 2


def test_abort_frees_at_once(played: Played) -> None:
    state = played.ask(n=2)
    played.frontend.abort(state)
    assert played.sent[-2:] == [Cancel(1), Cancel(2)] and not played.frontend.busy and state.finished
    assert state.output().outputs[0].finish_reason == "abort"
    played.say("late")
    metrics = played.frontend.metrics
    assert not any(choice.token_ids for choice in state.choices) and (metrics.waiting, metrics.running) == (0, 0)


def test_an_error_ends_all_choices(played: Played) -> None:
    state = played.ask(n=2)
    other = played.ask()
    played.frontend.handle(Delta(finished={1: Finish("error", error=WireError("PreheatError", "boom"))}))
    assert state.finished and state.error is not None and state.error.message == "boom" and Cancel(2) in played.sent
    assert not other.finished


def test_death_ends_everything(played: Played) -> None:
    state = played.ask()
    played.frontend.handle(Died(WireError.of(MemoryError("no memory"))))
    assert isinstance(state.error, EngineDead) and not played.frontend.busy
    with pytest.raises(EngineDead, match="no memory"):
        played.ask()


def test_nothing_before_ready(tokenizer: Tokenizer) -> None:
    with pytest.raises(NotReady):
        Frontend(tokenizer, print).prepare("x", SamplingParams())


def test_recommended_parameters(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}')
    frontend = Frontend(Tokenizer(tmp_path), print)
    params = frontend.input.params
    assert (params().temperature, params().top_k, params().max_tokens) == (0.5, 7, 9)
    assert (params(temperature=1.5).temperature, params(max_tokens=3).max_tokens) == (1.5, 3)


@pytest.mark.parametrize("broken", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": 3}, {"max_new_tokens": 0}])
def test_recommendations_that_cannot_be_used_are_found_at_once(tmp_path: Path, broken: dict[str, object]) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(broken))
    with pytest.raises(ModelError, match=r"generation_config\.json recommends sampling parameters that cannot be used"):
        Frontend(Tokenizer(tmp_path), print)


def booted(folder: Path, **options: object) -> Frontend:
    return boot_front(Settings(model=str(folder), **options), print)  # type: ignore[arg-type]


def test_the_generation_config_setting_chooses_the_recommendations(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (other := tmp_path / "other").mkdir()
    write_model(model)
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 5}')
    (other / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 6}')

    def resolved(**options: object) -> tuple[object, ...]:
        frontend = booted(model, **options)
        params = frontend.input.params()
        return params.temperature, params.top_k, params.top_p, frontend.tokenizer.eos_ids

    assert resolved() == (0.5, 7, 1.0, [1, 5])
    assert resolved(generation_config="vllm") == (1.0, 0, 1.0, [1, 5])  # the ends of a sequence are no sampling default
    assert resolved(generation_config=str(other)) == (1.0, 0, 0.5, [1, 6])
    assert resolved(override_generation_config={"top_k": 3}) == (0.5, 3, 1.0, [1, 5])
    assert resolved(override_generation_config={"top_k": 3}, generation_config="vllm") == (1.0, 3, 1.0, [1, 5])
    assert resolved(generation_config=str(model)) == (0.5, 7, 1.0, [1, 5])
    with pytest.raises(SettingsError, match="'top_n' is not one of temperature, top_p"):
        resolved(override_generation_config={"top_n": 3})
    with pytest.raises(SettingsError, match="top_k: Expected `int`"):
        resolved(override_generation_config={"top_k": "x"})
    with pytest.raises(SettingsError, match=r"holds no generation_config\.json"):
        resolved(generation_config=str(tmp_path))
    (model / "generation_config.json").write_text('{"temperature": "hot"}')
    assert resolved(generation_config="vllm")[0] == 1.0
    assert resolved(override_generation_config={"temperature": 0.25})[0] == 0.25


def test_overrides_of_the_config_reach_the_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path)
    frontend = booted(tmp_path, hf_overrides={"vocab_size": 300, "eos_token_id": 9})
    assert (frontend.tokenizer.vocab_size, frontend.tokenizer.eos_ids) == (300, [1, 9])


@pytest.mark.parametrize("template", ["{% for x %}", "{{ messages | nofilter }}", "{{ messages[0].a.b }}"])
def test_a_broken_template_is_found_at_the_start(tmp_path: Path, template: str) -> None:
    write_model(tmp_path)
    with pytest.raises(ModelError, match=r"the chat template .*--chat-template"):
        booted(tmp_path, chat_template=template)


def test_settings_give_template_variables_of_every_conversation(tmp_path: Path) -> None:
    write_model(tmp_path)
    frontend = booted(tmp_path, chat_template="{{ mood }}", default_chat_template_kwargs={"mood": "calm"})
    assert frontend.template.render([]) == "calm"
    assert frontend.template.render([], variables={"mood": "wild"}) == "wild"
    with pytest.raises(SettingsError, match="cannot set messages"):
        booted(tmp_path, chat_template="{{ mood }}", default_chat_template_kwargs={"messages": []})


def test_offline_chats_are_rendered_as_over_http(tmp_path: Path) -> None:
    """Templates get a thought under its other name too, and arguments of calls as objects, as over HTTP."""
    write_model(tmp_path)
    source = (
        "{% for m in messages %}{{ m.reasoning_content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    talk = [{"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]}]
    frontend = booted(tmp_path, chat_template=source)
    client = SimpleNamespace(frontend=frontend)
    assert LLM._prompts_of(client, talk) == ["why7"]  # type: ignore[arg-type]
    body = msgspec.convert(talk, list[Message])
    assert frontend.template.render(plain_messages(body)) == "why7"


def test_unsupported_fields_of_a_generation_config_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "temperature": 0.5}')
    with pytest.raises(ModelError, match=r"generation_config\.json: num_beams 4 .*--generation-config vllm"):
        booted(tmp_path)
    booted(tmp_path, generation_config="vllm")


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    write_model(tmp_path)
    frontend = booted(tmp_path, chat_template="{{ raise_exception('a system message first') }}")
    with pytest.raises(InvalidRequest, match="a system message first"):
        frontend.template.render([{"role": "user", "content": "x"}])


def test_more_sequences_than_can_ever_wait(tokenizer: Tokenizer) -> None:
    """A request that will never fit is the client's mistake.

    A request that does not fit now may come again.
    """
    played = Played(tokenizer, max_queued=4)
    with pytest.raises(InvalidRequest, match=r"asks for 5 sequences .* at most 4 can wait"):
        played.ask(n=5)
    played.ask(n=3)
    with pytest.raises(TooManyRequests):
        played.ask(n=2)


def test_an_error_names_the_prompt_of_a_list() -> None:
    with pytest.raises(ContextTooLong, match=r"^prompt\[2\]: This model's maximum") as error, naming_prompt(2, 3):
        raise ContextTooLong("This model's maximum", param="prompt")
    assert error.value.param == "prompt[2]"
    with pytest.raises(ContextTooLong, match=r"^One"), naming_prompt(0, 1):
        raise ContextTooLong("One", param="prompt")
    with pytest.raises(InvalidRequest, match=r"^Another"), naming_prompt(0, 2):
        raise InvalidRequest("Another", param="logprobs")


def test_others_may_work_between_the_messages_of_a_request(tokenizer: Tokenizer) -> None:
    """Requests that begin meanwhile count the requests under way.

    A request that stops leaves nothing behind.
    """
    played = Played(tokenizer, max_queued=10)
    frontend = played.frontend
    params = frontend.input.params(n=4)
    states = [frontend.prepare("hi", params) for _ in range(2)]
    sending = frontend.starting(states)
    for count in range(5):
        next(sending)
        assert len(played.requests) == count
    with pytest.raises(TooManyRequests, match="8 sequences are waiting already"):
        played.ask(n=3)
    played.ask(n=2)
    sending.close()
    for state in states:
        frontend.abort(state)
    assert len([message for message in played.sent if isinstance(message, Cancel)]) == 8
    played.ask(n=4)
    assert frontend.num_unfinished == 6


def test_sending_ends_when_the_engine_dies(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer)
    states = [played.frontend.prepare("hi", SamplingParams()) for _ in range(2)]
    sending = played.frontend.starting(states)
    next(sending)
    played.frontend.die("gone")
    with pytest.raises(EngineDead):
        list(sending)
    assert isinstance(states[0].error, EngineDead) and len(played.requests) == 1


def test_the_bytes_of_a_request_are_counted_for_each_choice(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(frontend_module, "MOST_BYTES", 1000)
    played = Played(tokenizer, max_queued=1000)
    played.ask([5] * 20, n=5)
    for params in ({"n": 7}, {"n": 5, "allowed_token_ids": [*range(100, 200)]}):
        with pytest.raises(InvalidRequest, match="each counted n times") as refused:
            played.ask([5] * 20, **params)
        assert refused.value.param == "n"
    offline = Played(tokenizer)  # here the caller owns the memory
    offline.ask([5] * 20, n=7)


@pytest.mark.parametrize("forgets", [True, False])
def test_ended_requests_are_freed_without_the_garbage_collector(tokenizer: Tokenizer, forgets: bool) -> None:
    """Control: without the cleanup, choices and their state refer to each other and stay in memory."""

    def choices() -> int:
        return sum(type(each) is Choice for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        played, before = Played(tokenizer), choices()
        state = played.ask(max_tokens=1)
        assert choices() == before + 1
        played.say("x", Finish("length"))
        if forgets:
            state.forget()
        del state
        assert choices() - before == (not forgets)
    finally:
        gc.enable()
