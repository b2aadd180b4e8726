"""Structured answers of a model at a high temperature spend next to no tokens on white space."""

from __future__ import annotations

import pytest

from preheat import LLM
from tests.cpu.structured import held, problem, texts
from tests.schemas import SERVED

MOST = 200
SCHEMAS = {name: schema for name, schema in SERVED.items() if "number" not in name}
"""Schemas without numbers, since a number may have any number of digits."""


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(skip_warmup=True, cache_dir="off", on_cold="off", max_num_seqs=32)


def test_thirty_schemas_fit_into_200_tokens(bundled):
    schemas = list(SCHEMAS.items())[-30:]
    params = [held(seed=seed, max_tokens=MOST, json=schema) for seed, (_, schema) in enumerate(schemas)]
    answers = texts(bundled, params, prompt="Answer in JSON: ")
    wrong = {name: found for (name, schema), found in zip(schemas, answers, strict=True) if problem(schema, *found)}
    assert len(schemas) == 30 and wrong == {}
