"""The logprobs of a prompt and its continuation are the same JSON, whether encoded in one piece or joined."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from preheat.core import TokenLogprobs
from preheat.server.openai.answers import CompletionLogprobs, PromptPart, encode
from preheat.server.openai.params import TokenIds, completion_logprobs


def logprobs(count: int, offset: int = 0) -> CompletionLogprobs:
    texts = ['"', "}é", "a]", ""] * count
    numbers = [None, -0.5, -1e30, -0.0] * count
    return CompletionLogprobs(
        texts[:count], numbers[:count], [None if each is None else {'"x]': each} for each in numbers[:count]],
        [offset + place for place in range(count)],
    )  # fmt: skip


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_prompt_is_joined_with_its_continuation(count: int, more: int) -> None:
    prompt, after = logprobs(count), logprobs(more, count)
    whole = {name: getattr(prompt, name) + getattr(after, name) for name in prompt.__struct_fields__}
    part = PromptPart.of(prompt)
    assert bytes(part.followed_by(after)) == encode(whole)
    assert msgspec.json.decode(encode({"logprobs": part.followed_by(after)})) == {"logprobs": whole}
    assert part.characters == sum(map(len, prompt.tokens))


class Names(TokenIds):
    """Names that count how often a token is named."""

    def __init__(self) -> None:
        self.calls = Counter[int]()

    def token_text(self, id: int) -> str:
        self.calls[id] += 1
        return "ab"[id % 2]


def test_the_text_of_a_token_is_made_once() -> None:
    nan, inf = float("nan"), float("inf")
    tops = [((1, -3.0), (2, -0.5), (3, -1.0)), ((2, -inf), (4, -2e4)), ((1, nan), (3, -1.0)), ((3, -1.0), (1, nan))]
    entries = [None, *(TokenLogprobs(1, at, 1, top) for top in tops for at in (-0.5, -inf))]
    names, ids = Names(), [2, *[1] * 2 * len(tops)]
    found = completion_logprobs(names, ids, entries, 7)
    assert names.calls == Counter([1, 2, 3, 4])
    assert (found.tokens, found.text_offset) == (["a", *"b" * 8], [*range(7, 16)])
    assert found.token_logprobs == [None, *[-0.5, -9999.0] * len(tops)]
    assert msgspec.json.decode(encode(found.top_logprobs)) == [
        None, {"a": -0.5, "b": -0.5}, {"a": -0.5, "b": -1.0}, {"a": -9999.0, "b": -0.5}, {"a": -9999.0, "b": -9999.0},
        {"b": -0.5}, {"b": -1.0}, {"b": -0.5}, {"b": None},
    ]  # fmt: skip
