"""Structured outputs over HTTP: the official client, vLLM's fields, and refusals before anything runs."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Literal

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.api.conftest import Server
from tests.schemas import closed

MESSAGES = [{"role": "user", "content": "Where do you live?"}]
SCHEMA = closed({"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, "rooms": {"enum": [1, 2, 3]}})


class Home(BaseModel):
    city: str = Field(pattern="^[A-Z][a-z]{2,8}$")
    rooms: Literal[1, 2, 3]
    pets: list[Literal["cat", "dog"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def client(server: Server):
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_clients_own_parse(client: OpenAI) -> None:
    """The client sends the class as a strict json_schema, and reads the answer into it."""
    answer = client.chat.completions.parse(
        model="bundled", messages=MESSAGES, response_format=Home, temperature=1.5, seed=3, max_completion_tokens=200
    )
    home = answer.choices[0].message.parsed
    assert isinstance(home, Home) and answer.choices[0].finish_reason == "stop"


def test_json_schema_json_object_and_streams(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "home", "schema": SCHEMA}}
    options = {"model": "bundled", "messages": MESSAGES, "seed": 1, "temperature": 1.5, "max_completion_tokens": 200}
    whole = client.chat.completions.create(**options, response_format=form).choices[0].message.content
    jsonschema.validate(json.loads(whole), SCHEMA)
    parts = client.chat.completions.create(**options, response_format=form, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole
    free = {"type": "json_object"}
    answer = client.chat.completions.create(**options | {"temperature": 0}, response_format=free).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


FIELDS = {
    "structured_outputs": {"structured_outputs": {"regex": "[0-9]{2}"}},
    "guided_regex": {"guided_regex": "[0-9]{2}"},
    "guided_choice": {"guided_choice": ["17", "42"]},
    "guided_grammar": {"guided_grammar": "start: /[0-9][0-9]/"},
    "guided_json": {"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}, "guided_whitespace_pattern": ""},
}


@pytest.mark.parametrize("name", FIELDS)
def test_vllms_fields(client: OpenAI, name: str) -> None:
    answer = client.completions.create(model="bundled", prompt="x = ", seed=2, max_tokens=9, extra_body=FIELDS[name])
    assert re.fullmatch("[0-9]{2}", answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


def test_structural_tags(client: OpenAI) -> None:
    tag = {"begin": "<call>", "schema": closed({"n": {"enum": [1, 2]}}), "end": "</call>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<call"]}
    extra = {"response_format": form}
    answer = client.completions.create(model="bundled", prompt="<call>", max_tokens=8, extra_body=extra)
    assert answer.choices[0].finish_reason in ("stop", "length")


def json_schema(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BAD = [
    (json_schema({"type": "string", "not": {"const": "x"}}), "response_format", r"\$\.not"),
    (json_schema({"$ref": "#/nowhere"}), "response_format", "does not exist"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_object", "triggers": []}}, "response_format.triggers", "no meaning"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"grammar": "???"}}, "structured_outputs.grammar", "neither"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "white space"),
    ({"structured_outputs": {"backend": "x"}}, "structured_outputs", "exactly one"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "give one"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
]


@pytest.mark.parametrize(("fields", "param", "why"), BAD)
def test_bad_grammars_are_refused(client: OpenAI, fields: dict[str, object], param: str, why: str) -> None:
    """A bad grammar is refused, of a stream too, before anything is sent."""
    for stream in (False, True):
        with pytest.raises(BadRequestError, match=why) as refused:
            for _ in client.completions.create(model="bundled", prompt="x", stream=stream, extra_body=fields):
                pass
        assert refused.value.param == param and refused.value.status_code == 400


def test_metrics(client: OpenAI, server: Server) -> None:
    names = ("grammars_compiled_total", "grammar_masks_total", "grammars_refused_total")
    before = [server.metric(name) for name in names]
    for pattern in ("measured [0-9]{3}", "not measured ("):
        with contextlib.suppress(BadRequestError):
            client.completions.create(model="bundled", prompt="x", extra_body={"guided_regex": pattern})
    compiled, masks, refused = (server.metric(name) - then for name, then in zip(names, before, strict=True))
    assert (compiled, refused) == (1, 1) and masks > 0 and server.metric("grammar_slowest_mask_seconds") > 0
