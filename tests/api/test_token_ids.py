"""An engine without a tokenizer, and requests without text: token ids in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat import LLM, SamplingParams
from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.tokenizer import NoTokenizer
from preheat.settings import Settings
from tests.api.conftest import Server, serving

PROMPT = [300, 301, 302]
SMALL = {"max_num_seqs": 4, "max_model_len": 64}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(skip_tokenizer_init=True, **SMALL)


def test_ids_come_back_and_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    (plain,) = LLM(**SMALL).generate([PROMPT], params, use_tqdm=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    ours, theirs = output.outputs[0], plain.outputs[0]
    assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, "", theirs.finish_reason)
    assert theirs.text
    assert ours.logprobs is not None
    assert ours.logprobs[0][ours.token_ids[0]].decoded_token == f"token_id:{ours.token_ids[0]}"


def test_the_end_of_sequence_is_known_without_a_tokenizer(llm: LLM) -> None:
    assert llm.frontend.tokenizer.eos_ids == LLM(**SMALL).frontend.tokenizer.eos_ids != []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("text", SamplingParams(), "give the prompt as token ids"),
        (PROMPT, SamplingParams(stop="x"), "use stop_token_ids"),
        ([10**6], SamplingParams(), "ids must be in"),
    ],
)
def test_text_is_refused(llm: LLM, prompt: str | list[int], params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([prompt], params, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logprobs=21), "logprobs is 21, but at most 20"),
        (SamplingParams(prompt_logprobs=21), "prompt_logprobs is 21, but at most 20"),
        (SamplingParams(stop_token_ids=[*range(1025)]), "at most 1,024 can end a request"),
    ],
)
def test_requests_beyond_the_devices_limits_are_refused(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([PROMPT], params, use_tqdm=False)


def test_detokenize_false_makes_no_text_and_refuses_stop_strings() -> None:
    llm = LLM(**SMALL)
    asked = [SamplingParams(temperature=0, max_tokens=4, detokenize=wanted) for wanted in (True, False)]
    with_text, without = (llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0] for params in asked)
    assert with_text.token_ids == without.token_ids
    assert with_text.text and not without.text
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(detokenize=False, stop=["x"])


def test_settings_and_checkpoints_that_cannot_do_without(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="skip_tokenizer_init"):
        Settings(skip_tokenizer_init=True, chat_template="x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="vocab_size"):
        NoTokenizer(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server of a folder without tokenizer files.

    So a read of such a file would fail.
    """
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 1}))
    with serving(str(folder), skip_tokenizer_init=True) as running:
        yield running


def test_a_stream_of_ids_has_an_event_for_each_token(server: Server) -> None:
    body = {"prompt": [5, 6], "max_tokens": 3, "stream": True, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", body)
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert answer.status == 200
    assert [choice["text"] for choice in choices] == [""] * len(choices)
    assert sum(len(choice["token_ids"]) for choice in choices) == 3
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "text"}, "token ids"),
        ("/v1/completions", {"prompt": [5], "echo": True}, "echo needs a tokenizer"),
        ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop_token_ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "token ids"),
        ("/tokenize", {"prompt": "text"}, "token ids"),
        ("/detokenize", {"tokens": [5]}, "no tokenizer"),
    ],
)
def test_the_server_refuses_text(server: Server, path: str, body: dict[str, object], message: str) -> None:
    answer = server.post(path, body)
    assert answer.status == 400
    assert message in answer.error["message"]
