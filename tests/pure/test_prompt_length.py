"""A prompt that cannot fit is refused before it is encoded.

A prompt that may fit never is.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from preheat.core import Ready, SamplingParams
from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend import encoding
from preheat.frontend.encoding import TextBound
from preheat.frontend.input_processor import InputProcessor
from preheat.frontend.prompt_length import check_prompt_length, room_for_images
from preheat.frontend.token_length import chars_per_token
from preheat.frontend.tokenizer import Tokenizer
from tests.tokenizers import byte_level, sentencepiece


def composed() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    return backend


KEEPING = {"byte_level": byte_level(), "sentencepiece": sentencepiece(), "composed": composed()}


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="aehth ▁\u0301\u0323ᾂö😀한글\u1112\u1161\u11ab\n", max_size=60))
@pytest.mark.parametrize("name", KEEPING)
def test_no_text_has_fewer_tokens_than_its_characters_say(name: str, text: str) -> None:
    backend = KEEPING[name]
    most = chars_per_token(backend)
    assert most is not None
    count = len(backend.encode(text, add_special_tokens=False).ids)
    assert len(text) <= count * most


def dropping() -> dict[str, Backend]:
    """Return tokenizers for which a text of any length may be few tokens."""
    stripped, split, absorbing = byte_level(), byte_level(), byte_level()
    stripped.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), split.pre_tokenizer])
    absorbing.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    fused = Backend(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    unknown = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    words = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    collapsed = byte_level()
    collapsed.normalizer = normalizers.Replace("  ", " ")
    return {
        "strip": stripped, "split": split, "rstrip": absorbing, "fuse": fused, "unknown": unknown, "words": words,
        "replace": collapsed,
    }  # fmt: skip


@pytest.mark.parametrize("name", dropping())
def test_no_bound_where_text_may_be_dropped(name: str) -> None:
    backend = dropping()[name]
    assert chars_per_token(backend) is None
    text = {"rstrip": "<|end|>" + " " * 500, "fuse": "z" * 500, "unknown": "z" * 500, "words": "z" * 500}
    shortest = backend.encode(text.get(name, " " * 500), add_special_tokens=False).ids
    assert len(shortest) < 500 / 2 or name == "replace"  # a bound by the longest token would not allow it


class Counting(Tokenizer):
    encoded = longest = 0

    def encode(self, text, *args, **kwargs):
        self.encoded += 1
        self.longest = max(self.longest, len(text))
        return super().encode(text, *args, **kwargs)

    def count(self, text):
        self.longest = max(self.longest, len(text))
        return super().count(text)


@pytest.fixture
def processor(tmp_path: Path) -> InputProcessor:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return InputProcessor(Counting(tmp_path), lambda: Ready(64, 10, 16, 0.0), recommended={})


def test_a_prompt_too_long_is_refused_before_it_is_encoded(processor: InputProcessor) -> None:
    tokenizer = processor.tokenizer
    assert isinstance(tokenizer, Counting) and tokenizer.chars_per_token is not None
    with pytest.raises(ContextTooLong, match=r"maximum context length is 64 tokens.*100000 characters"):
        processor.prepare("x" * 100_000, SamplingParams())
    assert tokenizer.encoded == 0
    with pytest.raises(ContextTooLong, match=r"your prompt has \d+ tokens"):
        processor.prepare("xy" * 64, SamplingParams())  # it might have fitted: the control
    assert tokenizer.encoded == 1


def refuse(size: str) -> None:
    raise ContextTooLong(size)


@pytest.fixture(scope="module", params=["byte_level", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counting:
    """Write a tokenizer with a bound on the characters of a token, and one without."""
    folder = tmp_path_factory.mktemp(request.param)
    backend = byte_level() if request.param == "byte_level" else dropping()["strip"]
    backend.save(str(folder / "tokenizer.json"))
    return Counting(folder)


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", "thethe", "  ", "a", "😀", "x" * 40, "\n"]), max_size=60),
    most=st.integers(1, 80),
)
def test_a_text_is_encoded_whole_or_has_too_many_tokens(tokenizer: Counting, words: list[str], most: int) -> None:
    text = " ".join(words)
    right = Tokenizer.encode(tokenizer, text, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_PIECE", 32)  # so that short texts are measured in pieces
        try:
            found = TextBound(most, refuse).encode(tokenizer, text, False)
        except ContextTooLong:
            assert len(right) > most
        else:
            assert found == right and len(right) <= most


def test_a_long_text_is_measured_before_it_is_encoded(tokenizer: Counting) -> None:
    tokenizer.longest, text = 0, "ax z" * 500_000
    with pytest.raises(ContextTooLong, match="2000000 characters"):
        TextBound(5_000, refuse).encode(tokenizer, text, True)
    assert tokenizer.longest <= 1 << 16
    with pytest.raises(ContextTooLong, match=r"^\d+ tokens"):  # the control: one that may fit is encoded as it is
        TextBound(5_000, refuse).encode(tokenizer, text[:40_000], True)
    assert tokenizer.longest <= 1 << 16


@pytest.mark.parametrize("cut", [-1, 3])
def test_a_prompt_to_be_truncated_is_bounded_too(
    processor: InputProcessor, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = processor.tokenizer
    assert isinstance(tokenizer, Counting)
    params = SamplingParams(truncate_prompt_tokens=cut, max_tokens=1)
    state = processor.prepare("xyz" * 1000, params)
    assert len(state.prompt_ids) == (3 if cut == 3 else 63)
    monkeypatch.setattr(encoding, "MOST_COUNTED", 500)
    tokenizer.longest = 0
    for call in (
        lambda: processor.prepare("xyz" * 100_000, params),
        lambda: processor.encode_to_count("xyz" * 100_000, True),
    ):
        with pytest.raises(ContextTooLong, match="at most 500 tokens are counted or cut"):
            call()
    assert tokenizer.longest <= 1 << 16


def test_parameters_are_worked_on_once_for_all_prompts(processor: InputProcessor) -> None:
    tokenizer = processor.tokenizer
    assert isinstance(tokenizer, Counting)
    checked = processor.checker.checked(SamplingParams(bad_words=["x", "y", "x"], stop=["z"]))
    encoded = tokenizer.encoded
    requests = [request for _ in range(3) for request in processor.fan_out(processor.prepare([5, 6], checked))]
    assert tokenizer.encoded == encoded
    assert len(requests) == 3 and all(request.bad_words is checked.bad_words for request in requests)
    with pytest.raises(InvalidRequest, match="1024 texts of 65536 characters"):
        processor.checker.checked(SamplingParams(bad_words=["x" * 65_537]))
    with pytest.raises(InvalidRequest, match="name each once"):
        processor.checker.checked(SamplingParams(allowed_token_ids=[1] * (tokenizer.vocab_size + 1)))


def test_too_many_token_ids_are_not_looked_at(processor: InputProcessor) -> None:
    class Ids(list):
        def __iter__(self):
            raise AssertionError("looked at")

    with pytest.raises(ContextTooLong, match="100 tokens"):
        processor.prepare(Ids([1] * 100), SamplingParams())


def test_other_threads_run_while_a_text_is_encoded(tmp_path: Path) -> None:
    """Other threads run while a text is encoded.

    Their longest pause is a small part of the time that a long text takes.
    """
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = " ".join(f"word{number * 7919}" for number in range(150_000))

    assert any(longest_pause(tokenizer, text) < 0.5 for _ in range(5))  # a busy machine makes pauses of its own


def longest_pause(tokenizer: Tokenizer, text: str) -> float:
    """Return the longest pause of another thread while ``text`` is encoded, as a share of the whole time."""
    pauses, done = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    with pytest.raises(ContextTooLong):
        tokenizer.encode(text, check_length=lambda _: (_ for _ in ()).throw(ContextTooLong("too long")))
    took = time.perf_counter() - started
    done.set()
    watcher.join()
    return max(pauses) / took


@pytest.mark.parametrize("more", [{}, {"spare": 1}, {"max_prompt_len": 40}, {"max_prompt_len": 200, "spare": 1}])
def test_images_have_as_much_room_as_a_prompt(more: dict[str, int]) -> None:
    limits = Ready(max_model_len=100, num_blocks=9, block_size=16, seconds=0, **more)
    room = room_for_images(limits)
    most = room.left_for("an image")
    check_prompt_length(most, limits)
    with pytest.raises(ContextTooLong):
        check_prompt_length(most + 1, limits)
    assert f"images that take {most + 1} tokens" in room.lacking("an image", most + 1).message
