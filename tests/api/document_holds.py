"""The promises of /openapi.json hold for any request that a client may send: see ``test_schemathesis.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from preheat.server import openapi
from tests.api.conftest import Server, serving

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method,
]  # fmt: skip


@pytest.fixture(scope="module")
def short(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lora = {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_root": str(folder)}
    kept = str(tmp_path_factory.mktemp("batches"))
    with serving(str(folder), engine="tests.api.scripted:run_short_engine", batch_dir=kept, **lora) as server:
        yield server


REPEATED = [
    "/",
    "/embed_sparse",
    "/score",
    "/tokenize",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/messages/count_tokens",
    "/v1/rerank",
]
"""Paths with bodies of other paths.

Random requests suffice for them: each field's limits are tried at the others.
"""

config = schemathesis.Config.from_dict(
    {"operations": [{"include-path": path, "phases": {"coverage": {"enabled": False}}} for path in REPEATED]}
)
schema = schemathesis.openapi.from_dict(json.loads(openapi.document()), config=config)


@schema.parametrize()
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_document_holds(case: schemathesis.Case, short: Server) -> None:
    page = case.operation.path == "/"  # GET there is the page to try the model; the document leaves it out
    checks = [check for check in CHECKS if not (page and check is unsupported_method)]
    answer = case.call_and_validate(base_url=short.url, checks=checks, timeout=20)  # raises the findings of the checks
    assert answer.status_code < 500
