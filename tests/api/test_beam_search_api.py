"""Beam search over HTTP: the official client against a real server, and refusals by name."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.api.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEARCH = {"use_beam_search": True, "n": 3, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "What is a list?"}]


def test_completions_and_chats(server: Server) -> None:
    """Completions and chats get the best sequences.

    With equal lengths the likeliest comes first. Other requests change nothing.
    """
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        body = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True, "length_penalty": 0.5}
        answer = client.completions.create(
            model="bundled", prompt=["def add(a, b):", "import"], n=3, max_tokens=6, logprobs=2, extra_body=body
        )
        chat = client.chat.completions.create(
            model="bundled", messages=MESSAGES, n=2, max_completion_tokens=5, temperature=0, logprobs=True,
            extra_body={"use_beam_search": True},
        )  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 36
    for first in (0, 3):
        choices = answer.choices[first : first + 3]
        sums = [sum(choice.logprobs.token_logprobs) for choice in choices]
        assert sums == sorted(sums, reverse=True)
        assert len({tuple(choice.token_ids) for choice in choices}) == 3
        assert all(len(top) in (2, 3) for choice in choices for top in choice.logprobs.top_logprobs)
        assert {choice.finish_reason for choice in choices} == {"length"}
    assert [len(choice.logprobs.content) for choice in chat.choices] == [5, 5]
    assert chat.choices[0].message.content != chat.choices[1].message.content
    alone = server.post(COMPLETIONS, {"prompt": "import", **body, "n": 3, "max_tokens": 6, "logprobs": 2}).json
    assert [choice["text"] for choice in alone["choices"]] == [choice.text for choice in answer.choices[3:]]
    assert [c["logprobs"]["token_logprobs"] for c in alone["choices"]] == [
        c.logprobs.token_logprobs for c in answer.choices[3:]
    ]


def test_the_end_of_sequence(server: Server) -> None:
    body = {"prompt": "def add(a, b):", "use_beam_search": True, "n": 2, "max_tokens": 40, "return_token_ids": True}
    best = server.post(COMPLETIONS, body).json["choices"][0]
    shown = server.post(COMPLETIONS, body | {"include_stop_str_in_output": True, "skip_special_tokens": False}).json
    assert best["finish_reason"] == "stop" and best["stop_reason"] is None
    assert shown["choices"][0]["token_ids"] == best["token_ids"]
    assert shown["choices"][0]["text"].startswith(best["text"]) and shown["choices"][0]["text"] != best["text"]


REFUSED = [
    ({"stream": True}, "stream", "cannot be streamed"),
    ({"n": 11}, "n", "--max-logprobs"),
    ({"temperature": 0.7}, "temperature", "draws nothing"),
    ({"top_p": 0.5}, "top_p", "does not look at"),
    ({"stop": ["x"]}, "stop", "does not look at"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "does not look at"),
    ({"guided_regex": "a+"}, "guided_regex", "does not look at"),
    ({"best_of": 5}, "best_of", "leave best_of out"),
    ({"length_penalty": 20}, "length_penalty", "between"),
    ({"early_stopping": True}, "early_stopping", "not supported"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "set use_beam_search"),
]


@pytest.mark.parametrize(("more", "param", "message"), REFUSED, ids=[str(more) for more, _, _ in REFUSED])
def test_refusals(scripted: Server, more: dict[str, object], param: str, message: str) -> None:
    answer = scripted.post(COMPLETIONS, {"prompt": "hi", **SEARCH, **more})
    assert answer.status == 400
    assert answer.error["param"] == param and message in answer.error["message"]


def test_values_that_change_nothing_pass(scripted: Server) -> None:
    body = {"top_p": 1.0, "seed": 3, "stop": [], "temperature": 1.0, "best_of": 3, "length_penalty": 1.0, "n": 1}
    assert scripted.post(COMPLETIONS, {"prompt": "hi", **SEARCH, **body, "best_of": 1}).status == 200
    assert (
        scripted.post(CHAT, {"messages": MESSAGES, "use_beam_search": True, "n": 2, "top_k": 0, "max_tokens": 3}).status
        == 200
    )


def test_a_failing_step_is_the_answer(scripted: Server) -> None:
    answer = scripted.post(COMPLETIONS, {"prompt": [4, 5], **SEARCH})
    assert answer.status == 500 and answer.error["message"] == "the step failed"
