"""Messages between a front and its pods: parts of steps, frames cut anywhere, and answers about other requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core import Delta, Finish, Request, SamplingParams, TokenLogprobs
from preheat.errors import InvalidRequest, NotReady, PreheatError, TooManyRequests, WireError
from preheat.frontend.journal import part
from preheat.frontend.relay import Relay, apart, check_relayed
from preheat.server.replicas.pod import _check_owned
from preheat.server.replicas.pod_http import parsed
from preheat.server.replicas.relay_wire import LOST, Frames, LostError, frame, framed


def request(id: int, **fields: object) -> Request:
    return Request(id, [1, 2], SamplingParams(), 0, 4, **fields)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    ids = draw(st.lists(st.integers(0, 4), max_size=6))
    some = st.lists(st.integers(0, 4), unique=True)
    places = draw(st.lists(st.integers(0, max(len(ids) - 1, 0)), unique=True)) if ids else []
    return Delta(
        ids=ids, tokens=[draw(st.integers(0, 99)) for _ in ids],
        logprobs={at: TokenLogprobs(1, -0.5, 1, ()) for at in places},
        digests=draw(st.sampled_from([b"", bytes(range(8 * len(ids)))])),
        finished={id: Finish("length") for id in draw(some)}, started=dict.fromkeys(draw(some), 3),
        adapters=dict.fromkeys(draw(some), "a"),
    )  # fmt: skip


@given(deltas(), st.sets(st.integers(0, 4)))
def test_the_parts_are_the_ones_of_the_journal_under_other_ids(delta: Delta, ids: set[int]) -> None:
    found = apart(delta, {id: Relay(request(id + 100)) for id in ids})
    for id in ids:
        own = part(delta, {id})
        expected = Delta(
            ids=[each + 100 for each in own.ids], tokens=own.tokens, logprobs=own.logprobs, digests=own.digests,
            **{name: {key + 100: value for key, value in getattr(own, name).items()}
               for name in ("finished", "started", "adapters")},
        )  # fmt: skip
        assert found.get(id, Delta()) == expected
    assert found.keys() <= ids


@given(st.lists(st.one_of(st.none(), deltas()), max_size=5), st.integers(1, 50))
def test_frames_may_be_cut_anywhere(told: list[Delta | None], size: int) -> None:
    data, frames, got = b"".join(map(frame, told)), Frames(), []
    for start in range(0, len(data), size):
        got += frames.feed(data[start : start + size])
    assert got == told


def test_a_request_given_up_and_a_frame_too_large_are_errors() -> None:
    with pytest.raises(LostError):
        list(Frames().feed(framed(LOST)))
    with pytest.raises(ValueError, match="at most"):
        list(Frames().feed(b"\xff" * 8))


def test_an_answer_about_another_request_is_an_error() -> None:
    _check_owned(Delta(ids=[5], tokens=[1], finished={5: Finish("length")}), 5)
    for delta in (Delta(ids=[6], tokens=[1]), Delta(started={6: 0}), Delta(finished={6: Finish("length")})):
        with pytest.raises(ValueError, match="another request"):
            _check_owned(delta, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 11}, "10 tokens fit"), ({"prompt": []}, "empty"), ({"seed": 2**64}, "out of range"),
        ({"choice": 1}, "out of range"), ({"stop_ids": [1] * 5000}, "stop_ids"), ({"bad_words": [[]]}, "bad_words"),
    ],
)  # fmt: skip
def test_a_request_out_of_bounds_is_refused(changes: dict, said: str) -> None:
    asked = request(1)
    check_relayed(asked, 10)
    for name, value in changes.items():
        setattr(asked, name, value)
    with pytest.raises(InvalidRequest, match=said):
        check_relayed(asked, 10)


def test_errors_of_a_pod_keep_their_class() -> None:
    assert isinstance(WireError.answered(429, "queue_full", "x", None).restore(), TooManyRequests)
    assert isinstance(WireError.answered(503, "not_ready", "x", None).restore(), NotReady)
    assert type(WireError.answered(418, None, "x", None).restore()) is PreheatError


def test_urls_of_pods() -> None:
    assert str(parsed("http://pod:8000")) == "http://pod:8000" and parsed("https://pod").port == 443
    for url in ("pod:8000", "http://", "ftp://x", "http://x/v1", "http://x:99999"):
        with pytest.raises(PreheatError, match="pods: "):
            parsed(url)
