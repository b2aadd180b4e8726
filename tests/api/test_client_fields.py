"""Fields and endpoints that vLLM's clients use by themselves, through the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from preheat.frontend.tokenizer import Tokenizer
from tests.api.conftest import Server, serving, write_model

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools | tojson }}]{% endif %}{% if flag %}({{ flag }}){% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}{{ raise_exception('tool calls?') }}{% endif %}"
    "<|im_start|>{{ m.role }}: {{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
HEAD, HI = "<s><|im_start|>user: ", "<s><|im_start|>user: hi\n"
MOST_LOGPROBS, MAX_MODEL_LEN = 2, 4096
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Run a server whose answers repeat the prompt's tokens, from the second token on."""
    with serving(str(folder), chat_template=TEMPLATE, max_logprobs=MOST_LOGPROBS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def complete(client: OpenAI, server: Server) -> Callable[..., Any]:
    def complete(prompt: object = "hi", stream: bool = False, **options: Any) -> Any:
        options = {"max_tokens": 4} | options
        return client.completions.create(
            model=server.model, prompt=prompt, stream=stream, extra_body={"return_token_ids": True} | options
        )

    return complete


@pytest.fixture(scope="module")
def chat(client: OpenAI, server: Server) -> Callable[..., Any]:
    def chat(messages: list[Any] | None = None, stream: bool = False, **options: Any) -> Any:
        options = {"max_tokens": 4} | options
        return client.chat.completions.create(
            model=server.model, messages=messages or [USER], stream=stream,
            extra_body={"return_token_ids": True} | options,
        )  # fmt: skip

    return chat


@pytest.fixture(scope="module")
def prompt_of(folder: Path) -> Callable[[Any], str]:
    """Return the text of the prompt, as the answer to a conversation reports it."""
    tokenizer = Tokenizer(folder)
    return lambda answer: tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[str | None, str]:
    """Return the field that the refusal names, and its message."""
    with pytest.raises(BadRequestError) as error:
        call(*args, **options)
    return error.value.param, error.value.message


def test_a_text_that_repeats_itself_ends(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    """An answer ends once the prompt's tokens have come three times, whole and streamed."""
    detection = {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 3}
    for stream in (False, True):
        answer = complete([40, 41, 42], stream=stream, max_tokens=40, repetition_detection=detection)
        answers = list(answer) if stream else [answer]
        choice = answers[-1].choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")
        assert sum(len(each.choices[0].token_ids or []) for each in answers if each.choices) == 9
    whole = chat(max_tokens=200, repetition_detection={"max_pattern_size": 100, "min_count": 2}).choices[0]
    assert whole.finish_reason == "repetition" and len(whole.token_ids) < 100
    with pytest.raises(BadRequestError, match="min_count"):
        complete("xyz", repetition_detection={"max_pattern_size": 3})


def test_an_answer_may_be_sent_back_unchanged(chat: Callable[..., Any], prompt_of: Callable[..., str]) -> None:
    """An answer may be sent back unchanged: ``model_dump`` has null in fields of OpenAI and of other clients."""
    answer = chat().choices[0].message
    plain = prompt_of(chat([USER, {"role": "assistant", "content": answer.content}, USER]))
    for message in (answer, answer.model_dump(), {**answer.model_dump(), "reasoning_content": None, "parsed": None},
                    {**answer.model_dump(), "annotations": [], "tool_calls": []}):  # fmt: skip
        assert prompt_of(chat([USER, message, USER])) == plain


def test_a_field_that_nobody_knows_is_ignored_and_named(server: Server, prompt_of: Callable[..., str]) -> None:
    """An unknown field is named in the header, once in the log, and in the metric.

    A null field is not.
    """
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "other": None}
    strange = {"messages": [{**USER, "content": [part], "what": 1}, {"role": "user", "content": "", "what": 2}],
               "why\r\n": {"a": 1}, "nothing": None, "max_tokens": 2, "stream_options": None,
               "reasoning_effort": "high"}  # fmt: skip
    for number in (1, 2):
        answer = server.post("/v1/chat/completions", strange | {"stream": number == 2})
        named = "messages[].content[].cache_control, messages[].what, why%0D%0A, reasoning_effort"
        assert (answer.status, answer.headers["x-ignored-fields"]) == (200, named)
        assert server.metric("request_fields_ignored_total", field="messages[].what") == number
    assert server.log is None or server.log.read_text().count("messages[].what") == 1
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "nothing": None})
    assert answer.status == 200 and "x-ignored-fields" not in answer.headers
    refusal = server.post("/v1/completions", {"prompt": "x", "what": 1, "temperature": -1})
    assert (refusal.status, refusal.headers["x-ignored-fields"]) == (400, "what")


def test_known_but_unsupported_fields_are_refused(chat: Callable[..., Any], complete: Callable[..., Any]) -> None:
    assert refused(chat, [{**USER, "annotations": [{}], "what": 1}])[0] == "messages[0].annotations"
    assert refused(complete, what=1, logit_bias={"5": None})[0] == "logit_bias[...]"  # no field, but a value


def test_strict_fields(folder: Path) -> None:
    with serving(str(folder), request_fields="strict", chat_template=TEMPLATE) as server:
        for path, body, param in (
            ("/v1/completions", {"prompt": "x", "what": None, "why": 1}, "why"),
            ("/v1/chat/completions", {"messages": [{**USER, "what": 1}]}, "messages[0].what"),
            ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "low"}, "reasoning_effort"),
            ("/v1/responses", {"input": [{**USER, "what": 1}]}, "input[0].what"),
        ):
            refusal = server.post(path, body)
            assert (refusal.status, refusal.error["param"]) == (400, param)
        assert server.post("/v1/completions", {"prompt": "x", "what": None}).status == 200


@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_has_the_usage_so_far(complete: Callable[..., Any], chat: Callable[..., Any], n: int) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for call in (complete, chat):
        events = list(call(stream=True, stream_options=usage, max_tokens=20, n=n))
        total = call(max_tokens=20, n=n).usage
        done = dict.fromkeys(range(n), 0)
        for event in events[:-1]:
            (choice,) = event.choices
            done[choice.index] += len(choice.model_extra["token_ids"] or ())
            assert event.usage.completion_tokens == done[choice.index]
            assert event.usage.prompt_tokens == total.prompt_tokens
            assert event.usage.total_tokens == event.usage.prompt_tokens + event.usage.completion_tokens
        assert set(done.values()) == {20}
        assert events[-1].choices == []
        assert events[-1].usage == total


def test_continuous_usage_includes_usage_unless_told_otherwise(
    complete: Callable[..., Any], chat: Callable[..., Any]
) -> None:
    events = list(complete(stream=True, stream_options={"continuous_usage_stats": True}))
    assert all(event.usage for event in events)
    assert events[-1].choices == []
    last_only = list(complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}))
    assert [bool(event.usage) for event in last_only] == [False] * (len(last_only) - 1) + [True]
    none = list(chat(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True}))
    assert none and all(event.usage is None and event.choices for event in none)
    scored = {"include_usage": True, "continuous_usage_stats": True}
    events = list(complete(stream=True, stream_options=scored, echo=True, max_tokens=0))
    assert {event.usage.completion_tokens for event in events} == {0}


def test_tools_are_shown_to_a_model_that_must_not_call_them(
    chat: Callable[..., Any], prompt_of: Callable[..., str], server: Server
) -> None:
    shown = '<s>[[{"type": "function", "function": {"name": "add", "parameters": {}}}]]' + HI.removeprefix("<s>")
    assert prompt_of(chat(tools=[TOOL], tool_choice="none")) == shown + ">"
    assert prompt_of(chat(tool_choice="none")) == prompt_of(chat(tools=[], tool_choice="auto")) == HI + ">"
    tokens = server.post("/tokenize", {"messages": [USER], "tools": [TOOL]}).json["tokens"]
    assert tokens == chat(tools=[TOOL], tool_choice="none").prompt_token_ids
    for choice in (None, "auto"):
        param, message = refused(chat, tools=[TOOL], tool_choice=choice)
        assert param == "tool_choice"
        assert "--tool-call-parser" in message


def test_variables_of_the_chat_template(chat: Callable[..., Any], prompt_of: Callable[..., str]) -> None:
    assert prompt_of(chat(chat_template_kwargs={"flag": "on"})) == "<s>(on)" + HI.removeprefix("<s>") + ">"
    assert prompt_of(chat(chat_template_kwargs={"flag": None})) == HI + ">"
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"):
        param, message = refused(chat, chat_template_kwargs={name: "x"})
        assert param == "chat_template_kwargs"
        assert name in message


def test_the_final_message_is_continued(
    chat: Callable[..., Any], prompt_of: Callable[..., str], server: Server
) -> None:
    begun = [USER, {"role": "assistant", "content": "The answer "}]
    prompt = HI + "<|im_start|>assistant: The answer"  # the template trims
    answer = chat(begun, continue_final_message=True)
    assert prompt_of(answer) == prompt
    assert prompt_of(chat(begun, continue_final_message=True, add_generation_prompt=False)) == prompt
    assert prompt_of(chat(begun, add_generation_prompt=False)) == prompt + "\n"
    assert prompt_of(chat(begun)) == prompt + "\n>"
    asked = {"messages": begun, "continue_final_message": True}
    assert server.post("/tokenize", asked).json["tokens"] == answer.prompt_token_ids
    param, message = refused(chat, begun, continue_final_message=True, add_generation_prompt=True)
    assert param == "continue_final_message"
    assert "add_generation_prompt" in message
    assert server.post("/tokenize", {"prompt": "x", "continue_final_message": True}).status == 400


def test_prompts_are_truncated_from_the_left(
    complete: Callable[..., Any], chat: Callable[..., Any], server: Server
) -> None:
    ids = server.post("/tokenize", {"prompt": "def add(a, b):"}).json["tokens"]
    for prompt in ("def add(a, b):", ids):
        cut = complete(prompt, truncate_prompt_tokens=3)
        assert cut.choices[0].prompt_token_ids == ids[-3:]
        assert cut.usage.prompt_tokens == 3
        assert complete(prompt, truncate_prompt_tokens=len(ids)).choices[0].prompt_token_ids == ids
        assert complete(prompt, truncate_prompt_tokens=-1).choices[0].prompt_token_ids == ids
    kept = server.post("/detokenize", {"tokens": ids[-3:]}).json["prompt"]
    echoed = complete("def add(a, b):", truncate_prompt_tokens=3, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (echoed.text, "".join(echoed.logprobs.tokens)) == (kept, kept)
    assert len(chat(truncate_prompt_tokens=5).prompt_token_ids) == 5


def test_minus_one_truncates_to_leave_room_for_the_answer(
    complete: Callable[..., Any], chat: Callable[..., Any]
) -> None:
    ids = [5 + at % 200 for at in range(MAX_MODEL_LEN + 10)]
    assert refused(complete, ids)[0] == "prompt"
    cut = complete(ids, truncate_prompt_tokens=-1, max_tokens=7)
    assert cut.choices[0].prompt_token_ids == ids[-(MAX_MODEL_LEN - 7) :]
    assert cut.usage.total_tokens == MAX_MODEL_LEN
    text = {"role": "user", "content": "x" * (MAX_MODEL_LEN + 10)}
    assert chat([text], truncate_prompt_tokens=-1, max_tokens=None).usage.prompt_tokens == MAX_MODEL_LEN - 1
    for wrong in (0, -2, MAX_MODEL_LEN + 1):
        assert refused(complete, truncate_prompt_tokens=wrong)[0] == "truncate_prompt_tokens"


def test_minus_one_asks_for_as_many_logprobs_as_there_may_be(
    complete: Callable[..., Any], chat: Callable[..., Any]
) -> None:
    choice = complete("hi", logprobs=-1, prompt_logprobs=-1).choices[0]
    assert choice.logprobs == complete("hi", logprobs=MOST_LOGPROBS).choices[0].logprobs
    assert {len(top) for top in choice.logprobs.top_logprobs} == {MOST_LOGPROBS}
    assert {len(entry) for entry in choice.prompt_logprobs[1:]} == {MOST_LOGPROBS}
    content = chat(logprobs=True, top_logprobs=-1).choices[0].logprobs.content
    assert {len(entry.top_logprobs) for entry in content} == {MOST_LOGPROBS}
    assert refused(complete, logprobs=-2)[0] == "logprobs"
    assert refused(complete, logprobs=MOST_LOGPROBS + 1)[0] == "logprobs"


def test_request_ids_in_bodies(complete: Callable[..., Any], chat: Callable[..., Any], server: Server) -> None:
    assert complete(request_id="mine-1").id == "cmpl-mine-1"
    assert chat(request_id="mine-2").id == "chatcmpl-mine-2"
    assert {event.id for event in chat(request_id="mine-3", stream=True)} == {"chatcmpl-mine-3"}
    body = {"prompt": "x", "request_id": "mine-4"}
    assert server.post("/v1/completions", body).headers["x-request-id"] == "mine-4"
    both = server.post("/v1/completions", body, **{"X-Request-Id": "header"})
    assert (both.json["id"], both.headers["x-request-id"]) == ("cmpl-header", "header")
    for wrong in ("a b", "x" * 129, "", "a\n", "é"):
        assert refused(complete, request_id=wrong)[0] == "request_id"
    assert server.post("/v1/completions", {"prompt": "x", "request_id": None}).status == 200


def test_ping(server: Server) -> None:
    for answer in (server.get("/ping"), server.post("/ping", b"")):
        assert (answer.status, answer.json) == (200, server.get("/health").json)


def test_load_counts_running_requests(folder: Path, complete: Callable[..., Any], server: Server) -> None:
    assert server.get("/load").json == {"server_load": 0}
    stream = complete(stream=True, max_tokens=3000)
    next(iter(stream))
    assert server.get("/load").json == {"server_load": 1}
    stream.close()
    end = time.monotonic() + 10
    while server.get("/load").json != {"server_load": 0}:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_tokenizer_info_of_a_model(tmp_path: Path) -> None:
    """Tokens are shown as their text, and no files are named, as in vLLM."""
    folder = write_model(tmp_path)
    token = {"content": "<s>", "lstrip": False, "special": True}
    config = {"tokenizer_class": "X", "bos_token": token, "added_tokens_decoder": {"0": token}, "model_max_length": 9,
              "additional_special_tokens": [token], "vocab_file": "/a/b", "chat_template": "{{ 1 }}"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shown = {"tokenizer_class": "X", "bos_token": "<s>", "added_tokens_decoder": {"0": "<s>"}, "model_max_length": 9,
             "additional_special_tokens": ["<s>"], "chat_template": "{{ 1 }}"}  # fmt: skip
    with serving(str(folder)) as server:
        assert server.get("/tokenizer_info").json == shown
    with serving(str(folder), skip_tokenizer_init=True) as server:
        assert "needs a tokenizer" in server.get("/tokenizer_info").error["message"]


def test_tokenizer_info(server: Server) -> None:
    assert server.get("/tokenizer_info").json == {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }  # fmt: skip


def test_keys_are_needed_where_something_can_be_changed_or_read(folder: Path) -> None:
    with serving(str(folder), api_key=["one"]) as server:
        for key, status in (({}, 401), ({"Authorization": "Bearer one"}, 200)):
            assert server.get("/tokenizer_info", **key).status == status
            assert server.post("/reset_prefix_cache", b"", **key).status == status
        assert server.get("/ping").status == server.get("/load").status == 200


def test_a_body_may_begin_with_the_mark_that_editors_on_windows_write(server):
    body = json.dumps({"model": server.model, "prompt": "hi", "max_tokens": 1}).encode("utf-8-sig")
    assert server.post("/v1/completions", body).status == 200


def test_the_answer_takes_up_the_last_message(chat: Callable[..., Any]) -> None:
    said = [USER, {"role": "assistant", "content": "so"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    plain = chat(said, **going_on).choices[0].message.content
    assert chat(said, echo=True, **going_on).choices[0].message.content == "so" + plain
    events = chat(said, echo=True, stream=True, **going_on)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == "so" + plain
    assert chat([USER], echo=True).choices[0].message.content == chat([USER]).choices[0].message.content


def test_events_of_several_tokens(complete: Callable[..., Any]) -> None:
    ids = [len(e.choices[0].model_extra["token_ids"]) for e in complete(stream=True, max_tokens=20, stream_interval=5)]
    assert sum(ids) == 20 and min(ids[1:-1]) >= 5


def test_the_server_may_say_how_many_tokens_an_event_has(tools_folder: Path) -> None:
    with serving(str(tools_folder), served_model_name=["m"], stream_interval=5) as server:
        body = {"model": "m", "prompt": list(range(5, 26)), "max_tokens": 20, "stream": True, "return_token_ids": True}
        for own, least in (({}, 5), ({"stream_interval": 2}, 2), ({"stream_interval": 7}, 7)):
            lines = server.post("/v1/completions", body | own).body.decode().split("\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            ids = [len(event["choices"][0]["token_ids"]) for event in events]
            assert sum(ids) == 20 and min(ids[1:-1]) >= least and len(ids) <= 20 // least + 2
        told = {"model": "m", "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "a" * 20}]}
        assert server.post("/v1/messages", told).body.count(b"text_delta") <= 6


def test_a_prompt_may_lose_its_end(complete: Callable[..., Any]) -> None:
    for side, kept in (("left", [10, 11]), ("right", [8, 9])):
        answer = complete([8, 9, 10, 11], truncate_prompt_tokens=2, truncation_side=side)
        assert answer.choices[0].model_extra["prompt_token_ids"] == kept
    assert refused(complete, truncation_side="up")[0] == "truncation_side"


def test_invocations_go_where_the_body_fits(server: Server) -> None:
    assert server.post("/invocations", {"messages": [USER], "max_tokens": 1}).json["object"] == "chat.completion"
    assert server.post("/invocations", {"prompt": "x", "max_tokens": 1}).json["object"] == "text_completion"
    assert server.post("/invocations", {"text": "x"}).status == 400
    rendered = server.post("/v1/chat/completions/render", {"messages": [USER]}).json
    assert rendered["token_ids"] == server.post("/tokenize", {"messages": [USER]}).json["tokens"]


def test_several_conversations_are_answered_together(server: Server) -> None:
    """Each conversation is answered as if it were alone, in order, with the usage of all."""
    said = [[{"role": "user", "content": text}] for text in ("hi", "good morning", "x")]
    common = {"max_tokens": 5, "logprobs": True, "return_token_ids": True}
    alone = [server.post("/v1/chat/completions", {"messages": messages, **common}).json for messages in said]
    together = server.post("/v1/chat/completions/batch", {"messages": said, **common})
    assert together.status == 200 and together.json["object"] == "chat.completion"
    assert [choice["index"] for choice in together.json["choices"]] == [0, 1, 2]
    for choice, answer in zip(together.json["choices"], alone, strict=True):
        assert {**choice, "index": 0} == answer["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together.json["usage"][name] == sum(answer["usage"][name] for answer in alone)
    assert alone[0]["choices"][0] != alone[1]["choices"][0]  # the control: they differ
    told = server.post("/v1/chat/completions/batch", {"messages": said, **common, "what": 1})
    assert told.status == 200 and told.headers["x-ignored-fields"] == "what"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"tools": [TOOL]}, "tools"), ({"messages": []}, "messages"),
        ({"use_beam_search": True}, "use_beam_search"), ({"messages": [[USER], []]}, "messages[1]"),
        ({"messages": [[USER], [USER, {**USER, "audio": {}}]]}, "messages[1][1].audio"),
        ({"messages": [[USER]] * 2049}, "messages"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [[USER], [{"role": "user", "content": "x " * 5000}]]}, None),
    ],
)  # fmt: skip
def test_invalid_batches_of_conversations_are_refused(server: Server, more: dict[str, Any], param: str | None) -> None:
    answer = server.post("/v1/chat/completions/batch", {"messages": [[USER]], "max_tokens": 2} | more)
    assert answer.status == 400 and (param is None or answer.error["param"] == param)


def test_a_chat_brings_its_own_template_where_that_is_trusted(server: Server, folder: Path) -> None:
    own = {"messages": [USER], "max_tokens": 2, "chat_template": "[{{ messages[0].content }}]"}
    refused = server.post("/v1/chat/completions", own)
    assert refused.status == 400 and refused.error["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.error["message"]
    with serving(str(folder), chat_template=TEMPLATE, trust_request_chat_template=True) as trusting:
        tokenizer = Tokenizer(folder)
        for path in ("/v1/chat/completions/render", "/v1/chat/completions"):
            answer = trusting.post(path, own | {"return_token_ids": True}).json
            ids = answer.get("prompt_token_ids") or answer["token_ids"]
            assert tokenizer.decode(ids) == "[hi]"
        both = {"messages": [[USER], [{"role": "user", "content": "yo"}]], "chat_template": own["chat_template"]}
        count = sum(len(tokenizer.encode(text)) for text in ("[hi]", "[yo]"))
        told = trusting.post("/v1/chat/completions/batch", both | {"max_tokens": 1}).json
        assert count - 2 <= told["usage"]["prompt_tokens"] <= count
        for broken in ("{% for", "{{ messages[0].nothing.at.all }}", "{{ raise_exception('no') }}"):
            assert trusting.post("/v1/chat/completions", own | {"chat_template": broken}).status == 400
        usual = trusting.post("/v1/chat/completions/render", {"messages": [USER]}).json
        assert tokenizer.decode(usual["token_ids"]).startswith("user: hi")


def test_verbosity_reaches_templates_that_read_it(server: Server, folder: Path) -> None:
    low = {"messages": [USER], "max_tokens": 2, "verbosity": "low"}
    assert server.post("/v1/chat/completions", low).headers["x-ignored-fields"] == "verbosity"
    assert "x-ignored-fields" not in server.post("/v1/chat/completions", low | {"verbosity": "medium"}).headers
    with serving(str(folder), chat_template="<s>{{ verbosity }}") as looking:
        rendered = looking.post("/v1/chat/completions/render", low)
        assert Tokenizer(folder).decode(rendered.json["token_ids"]).removeprefix("<s>") == "low"
        assert "x-ignored-fields" not in rendered.headers
        asked = looking.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "text": {"verbosity": "high"}})
        assert asked.status == 200 and "x-ignored-fields" not in asked.headers
        assert asked.json["text"]["verbosity"] == "high"
