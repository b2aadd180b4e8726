"""Token counts follow their sequence through steps, hand-overs of the slot, preemption and resumption."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from preheat.core import Request, SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops.sampler import HostSampler, TokenCounts
from preheat.ops.sampling import Penalties
from preheat.schedule.slots import Slots
from preheat.utils.memory import give_back_large_blocks

VOCAB = 12
PARAMS = SamplingParams(temperature=0.9, presence_penalty=0.4, frequency_penalty=0.9, repetition_penalty=1.4)
OTHER = SamplingParams(temperature=0.0, frequency_penalty=2.0)


def logits_of(request: Request, position: int) -> torch.Tensor:
    """Return logits that depend only on the request and the position."""
    values = np.random.default_rng([request.id, position]).standard_normal((1, VOCAB))
    return torch.from_numpy(values.astype(np.float32))


def a_request(number: int, params: SamplingParams) -> Request:
    return Request(number, prompt=[number % VOCAB, 2, 2], params=params, seed=number, max_tokens=60)


def step(slots: Slots, sampler: HostSampler, chosen: list[int]) -> None:
    """Run one decode step of the sequences in ``chosen``, as the engine does it."""
    logits = [logits_of(request, int(slots.device_len[s])) for s in chosen if (request := slots.request[s])]
    tokens = sampler.sample(torch.cat(logits), sampling_input(slots, np.array(chosen)))
    slots.tokens[chosen, slots.device_len[chosen]] = tokens.numpy()
    slots.device_len[chosen] += 1


def known(slots: Slots, slot: int) -> np.ndarray:
    return slots.tokens[slot, : slots.device_len[slot]].copy()


def straight() -> list[int]:
    """Return the tokens of request 5 from start to end, alone."""
    slots, sampler = Slots(1, 64, 16), HostSampler(1, VOCAB)
    slots.take(a_request(5, PARAMS), np.array(a_request(5, PARAMS).prompt))
    for _ in range(40):
        step(slots, sampler, [0])
    return known(slots, 0).tolist()


def preempted() -> list[int]:
    """Return the tokens of request 5 beside others, preempted and resumed.

    Its slot is taken over. It resumes in another slot, and then in its first one.
    """
    slots, sampler = Slots(3, 64, 16), HostSampler(3, VOCAB)
    five, other, third = a_request(5, PARAMS), a_request(6, OTHER), a_request(7, PARAMS)
    assert slots.take(five, np.array(five.prompt)) == 0
    assert slots.take(other, np.array(other.prompt)) == 1
    for _ in range(10):
        step(slots, sampler, [1, 0])
    tokens = known(slots, 0)
    slots.give_back(0)
    assert slots.take(third, np.array(third.prompt)) == 0
    for _ in range(5):
        step(slots, sampler, [0, 1])
    assert slots.take(five, tokens) == 2
    for _ in range(10):
        step(slots, sampler, [2, 0, 1])
    tokens = known(slots, 2)
    slots.give_back(2)
    slots.give_back(0)
    assert slots.take(five, tokens) == 0
    for _ in range(20):
        step(slots, sampler, [0])
    return known(slots, 0).tolist()


def test_preemption_changes_no_token() -> None:
    assert preempted() == straight()


def test_counts_that_are_not_rebuilt_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a slot that keeps its former owner's counts gives other tokens."""
    right = straight()
    monkeypatch.setattr(TokenCounts, "reset", lambda self, slot, prompt, output: None)
    assert preempted() != right


def recount(tokens: list[int], prompt_len: int) -> tuple[list[int], list[bool]]:
    return [tokens[prompt_len:].count(t) for t in range(VOCAB)], [t in tokens for t in range(VOCAB)]


def test_follow() -> None:
    """Counts equal a plain recount after any growth, a shrunk sequence, another owner and no change at all."""
    counts = TokenCounts(4, VOCAB)
    for owner, length in ((1, 3), (1, 4), (1, 9), (1, 9), (1, 5), (2, 5), (2, 30)):
        histories = [np.random.default_rng([owner, row]).integers(0, VOCAB, length).astype(np.int32) for row in (0, 1)]
        slots, nothing = np.array([3, 1]), np.zeros(2, np.float32)
        owners = np.array([owner, owner + 100])
        counts.follow(Penalties(np.arange(2), slots, owners, np.array([3, 2]), histories, nothing, nothing, nothing))
        for slot, history, prompt_len in zip((3, 1), histories, (3, 2), strict=True):
            output, seen = recount(history.tolist(), prompt_len)
            assert counts.output[slot].tolist() == output
            assert counts.seen[slot].tolist() == seen
    assert not counts.output[[0, 2]].any()
    assert not counts.seen[[0, 2]].any()


def test_add_counts_repeats() -> None:
    counts = TokenCounts(2, VOCAB)
    counts.reset(1, np.array([4]), np.array([5, 5]))
    counts.add(np.array([1, 1, 0]), np.array([5, 6, 5]))
    assert counts.output[1, [4, 5, 6]].tolist() == [0, 3, 1]
    assert counts.seen[1, [4, 5, 6]].all()
    assert counts.output[0, 5] == 1


def test_penalties_by_hand() -> None:
    """Penalties equal numbers computed by hand.

    Repetition goes by sign, over prompt and output. Frequency goes by count and presence counts once, over only the
    output.
    """
    params = SamplingParams(temperature=0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    slots, sampler = Slots(1, 16, 16), HostSampler(1, 5)
    slots.take(Request(1, [0, 1], params, 0, 9), np.array([0, 1, 1, 2, 2]))
    logits, penalties = torch.tensor([[4.0, -4.0, 6.0, 1.0, -1.0]]), sampling_input(slots, np.array([0])).penalties
    assert penalties is not None
    sampler._penalise(logits.numpy(), penalties)
    assert logits.tolist() == [[2.0, -8.75, 1.75, 1.0, -1.0]]


def resident(array: np.ndarray) -> int:
    """Return the bytes of ``array`` that are in memory; other threads of the process do not count."""
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - first
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_memory_is_untouched_until_needed() -> None:
    """A host's counts for 256 slots of a large vocabulary do not take their whole size at start."""
    give_back_large_blocks()  # as an engine does at its start
    counts = TokenCounts(256, 128_256)
    assert counts.output.nbytes > 100 << 20
    assert resident(counts.output) < 8 << 20
    counts.output[:] = 1  # the control: memory that is written is seen
    assert resident(counts.output) > 100 << 20


@pytest.mark.parametrize("length", [1_025, 5_000])
def test_a_long_prompt_is_seen_from_its_first_token(length):
    counts = TokenCounts(1, 32)
    counts.reset(0, np.concatenate(([7], np.full(length, 3))), np.array([5]))
    assert set(np.flatnonzero(counts.seen[0]).tolist()) == {3, 5, 7}
