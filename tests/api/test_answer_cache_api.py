"""The answer cache over HTTP, before two engines: usage, streams and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Server, serving

ASKED = {"prompt": "abc", "temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def keeping(folder: Path) -> Iterator[Server]:
    with serving(str(folder), answer_cache_size=0.01, data_parallel_size=2) as server:
        yield server


def test_a_kept_answer_is_marked_in_the_usage_and_streamed_at_once(keeping: Server) -> None:
    first, again = (keeping.post("/v1/completions", ASKED).json for _ in range(2))
    assert "cached_answer" not in first["usage"] and again["usage"].pop("cached_answer") is True
    assert again["choices"] == first["choices"] and again["usage"] == first["usage"]
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    stream = keeping.post("/v1/completions", asked).body.decode()
    assert stream.count('"text":') == 1 and '"cached_answer":true' in stream and "[DONE]" in stream
    assert keeping.metric("answer_cache_hits_total") == 2 and keeping.metric("answer_cache_different_total") == 0
