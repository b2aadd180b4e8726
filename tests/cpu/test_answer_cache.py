"""The answer cache: an equal request gets the live answer again, and no other request does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from preheat import LLM
from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import SettingsError
from preheat.figures import AnswerCacheFigures
from preheat.frontend import answer_cache
from preheat.frontend.answer_cache import OVERHEAD, AnswerCache, Kept
from preheat.frontend.answer_folder import AnswerFolder

OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "block_size": 16, "skip_warmup": True, "boot_check": "off",
           "on_cold": "off", "num_threads": 1, "execution_mode": "eager"}  # fmt: skip
PLAIN = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
KINDS = {
    "greedy": PLAIN,
    "seeded": replace(PLAIN, temperature=1.0, seed=2**64 - 9, n=3, logprobs=2),
    "stop": replace(
        PLAIN, temperature=1.0, seed=4, stop=["e", "a", "s"], min_tokens=2, include_stop_str_in_output=True
    ),
    "stop token": replace(PLAIN, logit_bias={7: 100.0}, stop_token_ids=[7], min_tokens=3),
    "grammar": replace(PLAIN, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{2,6}")),
    "receipt": replace(PLAIN, temperature=1.0, seed=11, receipt=True),
}


@pytest.fixture(scope="module")
def llm(shallow: str) -> LLM:
    return LLM(shallow, **OPTIONS, answer_cache_size=0.01, answer_cache_check_every=10**9)


@pytest.fixture
def cache(llm: LLM) -> Iterator[AnswerCache]:
    """Return the engine's answer cache, empty."""
    found = llm.frontend.answers = AnswerCache(10**7, 10**9, AnswerCacheFigures())
    yield found
    assert not found._pending


def ask(llm: LLM, params: SamplingParams, prompt: tuple[int, ...] = (5, 6, 7), **more: str) -> tuple[list[object], int]:
    """Return the choices, and the number of steps that the engine ran for them."""
    before = llm.loop.scheduler.stats().steps
    (output,) = llm.generate([{"prompt_token_ids": list(prompt), **more}], params, use_tqdm=False)
    said = [[c.text, list(c.token_ids), c.logprobs, c.finish_reason, c.stop_reason, c.receipt] for c in output.outputs]
    return said, llm.loop.scheduler.stats().steps - before


@pytest.mark.parametrize("kind", KINDS)
def test_an_equal_request_gets_the_live_answer_without_a_step(
    llm: LLM, cache: AnswerCache, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(answer_cache, "AT_ONCE", 4)
    live, steps = ask(llm, KINDS[kind])
    assert steps > 0
    assert ask(llm, KINDS[kind]) == (live, 0)
    assert (cache.figures.hits, cache.figures.misses) == (1, 1)
    assert cache.figures.bytes == sum(len(entry) + OVERHEAD for entry in cache._entries.values())


OTHERS = {
    "prompt": lambda llm, cache: ask(llm, KINDS["seeded"], (5, 6, 8)),
    "seed": lambda llm, cache: ask(llm, replace(KINDS["seeded"], seed=1)),
    "temperature": lambda llm, cache: ask(llm, replace(KINDS["seeded"], temperature=0.9)),
    "n": lambda llm, cache: ask(llm, replace(KINDS["seeded"], n=4)),
    "length": lambda llm, cache: ask(llm, replace(KINDS["seeded"], max_tokens=10)),
    "logprobs": lambda llm, cache: ask(llm, replace(KINDS["seeded"], logprobs=1)),
    "salt": lambda llm, cache: ask(llm, KINDS["seeded"], cache_salt="another client"),
    "prompt logprobs": lambda llm, cache: ask(llm, replace(KINDS["seeded"], prompt_logprobs=1)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_request_is_computed(llm: LLM, cache: AnswerCache, other: str) -> None:
    ask(llm, KINDS["seeded"])
    _, steps = OTHERS[other](llm, cache)
    assert steps > 0 and cache.figures.hits == 0


def test_other_weights_are_asked_again_and_a_draw_without_a_seed_is_never_kept(llm: LLM, cache: AnswerCache) -> None:
    drawn = replace(KINDS["seeded"], seed=None)
    assert ask(llm, drawn)[1] > 0 and ask(llm, drawn)[1] > 0 and not cache._entries
    ask(llm, PLAIN)
    before = llm.frontend.state.contract
    llm.frontend.state.contract = replace(llm.frontend.contract, weights="update 1")
    assert ask(llm, PLAIN)[1] > 0 and cache.figures.hits == 0
    llm.frontend.state.contract = before
    assert (
        ask(llm, replace(PLAIN, seed=3)) == ask(llm, PLAIN) and cache.figures.hits == 2
    )  # a greedy seed draws nothing


def test_one_hit_in_n_is_computed_again_and_a_changed_entry_is_found(
    llm: LLM, cache: AnswerCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache._check_every = 3
    live, _ = ask(llm, PLAIN)
    computed = [ask(llm, PLAIN)[1] > 0 for _ in range(9)]
    assert computed == [False, False, True] * 3
    assert (cache.figures.hits, cache.figures.checked, cache.figures.different) == (6, 3, 0)
    ((key, entry),) = cache._entries.items()
    wrong = msgspec.msgpack.decode(entry, type=Kept)
    wrong.tokens[2] ^= 1
    cache._entries[key] = msgspec.msgpack.encode(wrong)
    answers = [ask(llm, PLAIN)[0] == live for _ in range(4)]
    assert answers == [False, False, True, True]  # the check mends the entry
    assert cache.figures.different == 1 and "A kept answer differs from the live one" in caplog.text
    names = {each.name.removeprefix("preheat:"): each for each in llm.get_metrics()}
    assert names["answer_cache_different"].value == 0  # of the boot's own cache


def test_the_least_recent_answers_go_and_large_ones_are_not_kept(
    llm: LLM, cache: AnswerCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(llm, PLAIN)
    size = cache.figures.bytes
    cache._size = 3 * size
    for start in (10, 20):
        ask(llm, PLAIN, (start,))
    assert ask(llm, PLAIN)[1] == 0  # now the latest
    ask(llm, PLAIN, (30,))
    assert [ask(llm, PLAIN, prompt)[1] > 0 for prompt in ((5, 6, 7), (20,), (30,), (10,))] == [
        False,
        False,
        False,
        True,
    ]
    assert cache.figures.bytes <= cache._size
    cache._size = size - 1
    cache._entries.clear()
    cache.figures.bytes = 0
    assert all(ask(llm, PLAIN)[1] for _ in range(2)) and not cache._entries
    cache._size = 10 * size
    monkeypatch.setattr(answer_cache, "MOST_VALUES", 4 * 9 - 1)
    assert all(ask(llm, replace(PLAIN, logprobs=3))[1] for _ in range(2)) and not cache._entries
    monkeypatch.setattr(answer_cache, "MOST_VALUES", 4 * 9)
    assert [ask(llm, replace(PLAIN, logprobs=3))[1] > 0 for _ in range(2)] == [True, False]


def test_a_key_without_the_choice_is_found(llm: LLM, cache: AnswerCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: choices that share a key get one answer, and the comparison sees it."""
    right = answer_cache._key
    live, _ = ask(llm, KINDS["seeded"])
    monkeypatch.setattr(answer_cache, "_key", lambda request, contract: right(replace(request, choice=0), contract))
    ask(llm, KINDS["seeded"])
    assert ask(llm, KINDS["seeded"])[0] != live


def test_a_cancelled_answer_is_not_kept(llm: LLM, cache: AnswerCache) -> None:
    state = llm.frontend.prepare([5, 6, 7], PLAIN)
    llm.frontend.start([state])
    for _ in itertools.repeat(None, 2):
        llm.loop.take(0)
        llm.loop.step()
        llm._receive()
    llm.frontend.abort(state)
    llm.loop.finish()
    assert not cache._entries
    assert ask(llm, PLAIN)[1] > 0


def folder_of(path: Path, size: int = 10**6) -> AnswerFolder:
    return AnswerFolder(str(path), size)


def test_the_next_boot_has_the_answers_and_damaged_files_are_misses(llm: LLM, tmp_path: Path) -> None:
    def begin(check_every: int = 10**9) -> AnswerCache:
        llm.frontend.answers = AnswerCache(10**7, check_every, AnswerCacheFigures(), folder_of(tmp_path))
        return llm.frontend.answers

    cache, asked = begin(), KINDS["seeded"]
    live, steps = ask(llm, asked)
    assert steps
    cache._folder.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == asked.n
    cache = begin()
    assert ask(llm, asked) == (live, 0) and cache.figures.hits == 1
    assert ask(llm, asked) == (live, 0)
    cache = begin(check_every=1)  # computed again and compared
    assert ask(llm, asked)[0] == live and cache.figures.checked == 1 and not cache.figures.different
    cache._folder.close()
    whole = [each.read_bytes() for each in files]
    for number, file in enumerate(files):
        wrong = bytearray(whole[number])
        wrong[-1 - number] ^= 1
        file.write_bytes(wrong)
        cache = begin()
        said, steps = ask(llm, asked)
        assert said == live and steps and cache.figures.misses == 1
        cache._folder.close()
    assert sorted(tmp_path.iterdir()) == files and [each.read_bytes() for each in files] == whole


def test_only_regular_files_are_read_and_the_size_is_bounded(tmp_path: Path) -> None:
    keys = [bytes([number]) * 16 for number in range(8)]
    folder = folder_of(tmp_path / "a", 100)
    for key in keys:
        folder.put(key, b"x" * 30)
    folder.close()
    assert folder.bytes <= 100 and [folder.get(key) for key in keys] == [None] * 6 + [b"x" * 30] * 2
    right = tmp_path / "a" / f"{keys[7].hex()}.answer"
    other = tmp_path / "b"
    other.mkdir()
    (other / right.name).symlink_to(right)
    os.mkfifo(other / f"{keys[6].hex()}.answer")
    (other / f"{keys[5].hex()}.answer").mkdir()
    found = folder_of(other)
    assert not found.bytes and not any(map(found.get, keys))
    found._sizes[right.name] = 1  # put there after the boot
    assert found.get(keys[7]) is None
    found.close()
    with pytest.raises(SettingsError, match="answer_cache_dir"):
        folder_of(right)


def test_all_answers_may_be_forgotten(llm: LLM, tmp_path: Path) -> None:
    cache = llm.frontend.answers = AnswerCache(10**7, 10**9, AnswerCacheFigures(), folder_of(tmp_path))
    assert ask(llm, PLAIN)[1] > 0
    cache.forget()
    assert ask(llm, PLAIN)[1] > 0
    cache.forget()
    assert cache._folder is not None
    cache._folder.close()
    assert not [*tmp_path.iterdir()] and cache._folder.bytes == 0 and cache.figures.bytes == 0
