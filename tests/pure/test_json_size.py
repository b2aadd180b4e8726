"""The values of a JSON text are counted before it is decoded.

They are never too few, wherever the text is cut into chunks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InvalidRequest
from preheat.server.decoding import decode
from preheat.server.schema import ChatRequest, CompletionRequest
from preheat.utils import json_size as module
from preheat.utils.json_size import MOST_CONTAINERS, MOST_IDS, MOST_VALUES, json_size

TEXTS = st.text(alphabet='a\\"[]{},:\n', max_size=9)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Return the numbers of values, containers and members of decoded JSON."""
    if not isinstance(value, list | dict):
        return 1, 0, 0
    named = len(value) if isinstance(value, dict) else 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    values, containers, members = (sum(part) for part in zip((0, 0, 0), *inner, strict=True))
    return 1 + values, 1 + containers, named + members


@given(value=VALUES, chunk=st.sampled_from([1, 2, 3, 7, 1 << 18]), spaced=st.booleans())
def test_never_too_few(value: Any, chunk: int, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        found = json_size(text)
    values, containers, members = counted(value)
    assert (found.containers, found.members) == (containers, members)
    assert values <= found.values <= values + containers


def test_characters_within_strings_do_not_count() -> None:
    text = json.dumps("[{,\\" * 100 + '"[' * 100).encode()
    assert json_size(text) == (1, 0, 0)
    assert text.count(b"[") == 200  # a plain count would find these


def body(kind: str, count: int) -> bytes:
    items = {"ids": "7", "lists": "[1]", "texts": '""'}
    return ('{"prompt":[' + ",".join([items[kind]] * count) + "]}").encode()


@pytest.mark.parametrize(
    ("kind", "most", "said"),
    [("ids", MOST_IDS, "values"), ("texts", MOST_IDS, "values"), ("lists", MOST_CONTAINERS, "lists and objects")],
)
def test_a_body_of_too_many_values_is_not_decoded(
    kind: str, most: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decode(body(kind, most - 4), CompletionRequest).prompt
    monkeypatch.setattr("preheat.server.decoding._decoded", None)
    with pytest.raises(InvalidRequest, match=f"more than {most:,} {said}"):
        decode(body(kind, most + 1), CompletionRequest)


def test_members_take_longer_than_items() -> None:
    bias = b",".join(b'"%d":1' % number for number in range(MOST_VALUES + 1))
    with pytest.raises(InvalidRequest, match=f"more than {MOST_VALUES:,} values with names"):
        decode(b'{"logit_bias":{%b}}' % bias, CompletionRequest)


def test_only_bodies_of_ids_may_have_so_many() -> None:
    tools = b'{"messages":[],"tools":[{"a":[' + b",".join([b"1"] * (MOST_VALUES + 1)) + b"]}]}"
    with pytest.raises(InvalidRequest, match=f"more than {MOST_VALUES:,} values"):
        decode(tools, ChatRequest)
