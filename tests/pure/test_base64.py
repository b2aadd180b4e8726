"""Base64 of clients: Python's strict decoder in pieces, so that other threads run meanwhile."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.utils import base64 as ours
from preheat.utils.base64 import decode_base64


def decoded(decode: Callable[[str], bytes], text: str) -> bytes | None:
    """Return the bytes in ``text``, or None if it is refused."""
    try:
        return decode(text)
    except ValueError:
        return None


def strict(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


WHOLE = st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode())
BROKEN = st.text("Aa9+/=é \n-", max_size=30)


@given(st.one_of(WHOLE, BROKEN, st.tuples(WHOLE, BROKEN, WHOLE).map("".join)))
def test_any_text_has_the_bytes_of_one_call(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "_PIECE", 8)
        assert decoded(decode_base64, text) == decoded(strict, text)


def test_the_text_may_begin_later() -> None:
    assert decode_base64("data:,aGVsbG8=", 6) == b"hello"


@pytest.mark.parametrize("text", ["AAAAAA==", "AAAAAAA="])
def test_padding_at_the_end_of_a_piece_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded alone, the first piece is right."""
    monkeypatch.setattr(ours, "_PIECE", 8)
    assert len(decode_base64(text)) in (4, 5)
    with pytest.raises(ValueError, match="padding before the end"):
        decode_base64(text + "AAAA")


def longest_block(decode: Callable[[str], bytes], text: str) -> float:
    """Return the longest time that another thread cannot run during ``decode``, as a share of its whole time."""
    times, ready, done = [0.0], threading.Event(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            ready.set()
            times.append(time.perf_counter())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ready.wait()
    started = time.perf_counter()
    decode(text)
    ended = time.perf_counter()
    done.set()
    watcher.join()
    seen = [started, *(at for at in times if started < at < ended), ended]
    return max(later - earlier for earlier, later in pairwise(seen)) / (ended - started)


def test_other_threads_run_while_a_long_text_is_decoded() -> None:
    """Control: during one call for the whole text no other thread runs."""
    text = base64.b64encode(random.Random(0).randbytes(24 * 2**20)).decode()
    assert min(longest_block(decode_base64, text) for _ in range(5)) < 0.5
    assert min(longest_block(strict, text) for _ in range(3)) > 0.5
