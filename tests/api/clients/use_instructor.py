"""Instructor: an answer as an object, by a forced call, by tools or by a schema."""

from __future__ import annotations

from typing import Any

import instructor
from asked import API, JSON, KEY, MODEL, TEXT, WEATHER, Weather, run
from openai import OpenAI

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.JSON,
    instructor.Mode.RESPONSES_TOOLS,
)


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=API, api_key=KEY, max_retries=0), mode=mode)


def ask(what: str, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": what}], "max_retries": 0, **options}


def text() -> None:
    answer = client(instructor.Mode.TOOLS).chat.completions.create(**ask(TEXT, response_model=None))
    assert answer.choices[0].message.content == TEXT


def stream() -> None:
    wide = JSON.replace(",", "," + " " * 200)  # so that the text comes in several events on a busy machine too
    for mode in MODES[:2]:
        parts = list(client(mode).chat.completions.create_partial(**ask(wide, response_model=Weather)))
        assert len(parts) > 3 and parts[-1].model_dump() == WEATHER.model_dump()


def tools() -> None:
    answer, raw = client(MODES[0]).chat.completions.create_with_completion(**ask(JSON, response_model=Weather))
    assert (
        answer.model_dump() == WEATHER.model_dump() and raw.choices[0].message.tool_calls[0].function.name == "Weather"
    )


def json() -> None:
    for mode in MODES:
        answer = client(mode).chat.completions.create(**ask(JSON, response_model=Weather))
        assert answer.model_dump() == WEATHER.model_dump(), mode


run(text, stream, tools, json)
