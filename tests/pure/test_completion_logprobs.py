"""The logprobs of a prompt and its continuation are the same JSON, whether encoded in one piece or joined."""

from __future__ import annotations

import msgspec
import pytest

from preheat.server.answers import CompletionLogprobs, PromptPart, encode


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
