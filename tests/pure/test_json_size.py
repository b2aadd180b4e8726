"""The values of a JSON text are counted before it is decoded.

They are never too few, wherever the text is cut into chunks.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InvalidRequest
from preheat.server.http.decoding import decode
from preheat.server.openai.schema import ChatRequest, CompletionRequest
from preheat.utils import json_size as module
from preheat.utils.json_size import (
    MOST_CONTAINERS,
    MOST_DEPTH,
    MOST_DIGITS,
    MOST_IDS,
    MOST_VALUES,
    SHORT_DIGITS,
    check_size,
    json_size,
)

TEXTS = st.text(alphabet='a\\"[]{},:\n', max_size=9)
VALUES = st.recursive(
    TEXTS | st.integers() | st.sampled_from([10**18, 10**19, -(10**25)]) | st.booleans() | st.none(),
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


def long_digits(value: Any) -> int:
    """Return the digits behind the first ones of each number in decoded JSON."""
    if isinstance(value, int):
        return max(len(str(abs(value))) - SHORT_DIGITS, 0)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(long_digits, inner))


def levels(value: Any) -> int:
    """Return the most lists and objects within each other in decoded JSON."""
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(levels, value.values() if isinstance(value, dict) else value), default=0)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_a_text_of_too_many_levels_is_not_decoded(begin: str, end: str) -> None:
    for depth in (MOST_DEPTH, MOST_DEPTH + 1):
        text = f"{begin * depth}1{end * depth}".encode()
        beside = json.dumps([[begin] * 9] * MOST_DEPTH).encode()
        with pytest.raises(InvalidRequest, match="nested") if depth > MOST_DEPTH else nullcontext():
            check_size(text, "The text")
            check_size(beside, "The text")


@given(value=VALUES, chunk=st.sampled_from([1, 2, 3, 7, 1 << 18]), spaced=st.booleans())
def test_never_too_few(value: Any, chunk: int, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        patch.setattr(module, "MOST_DEPTH", 0)  # else the few levels of a small text are not counted
        found = json_size(text)
    values, containers, members = counted(value)
    assert (found.containers, found.members, found.digits) == (containers, members, long_digits(value))
    assert values <= found.values <= values + containers
    assert found.depth == levels(value)


def test_characters_within_strings_do_not_count() -> None:
    text = json.dumps(("[{,\\" + "7" * 30) * 100 + '"[' * 100).encode()
    assert json_size(text) == (1, 0, 0, 0, 0)
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
    monkeypatch.setattr("preheat.server.http.decoding._decoded", None)
    with pytest.raises(InvalidRequest, match=f"more than {most:,} {said}"):
        decode(body(kind, most + 1), CompletionRequest)


def test_members_take_longer_than_items() -> None:
    bias = b",".join(b'"%d":1' % number for number in range(MOST_VALUES + 1))
    with pytest.raises(InvalidRequest, match=f"more than {MOST_VALUES:,} values with names"):
        decode(b'{"logit_bias":{%b}}' % bias, CompletionRequest)


@pytest.mark.parametrize("length", [SHORT_DIGITS + 1, 640])
def test_numbers_of_too_many_digits_are_not_decoded(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST_DIGITS // (length - SHORT_DIGITS)
    text = '{"prompt":"' + "9" * 2 * MOST_DIGITS + '","unknown":[%s]}'
    assert decode((text % ",".join(["9" * length] * most)).encode(), CompletionRequest, {}).prompt
    monkeypatch.setattr("preheat.server.http.decoding._decoded", None)
    with pytest.raises(InvalidRequest, match=f"more than {MOST_DIGITS:,} digits in numbers .* send shorter numbers"):
        decode((text % ",".join(["9" * length] * (most + 1))).encode(), CompletionRequest, {})


def test_only_bodies_of_ids_may_have_so_many() -> None:
    tools = b'{"messages":[],"tools":[{"a":[' + b",".join([b"1"] * (MOST_VALUES + 1)) + b"]}]}"
    with pytest.raises(InvalidRequest, match=f"more than {MOST_VALUES:,} values"):
        decode(tools, ChatRequest)
