"""A device on paper, and a harness that drives the scheduler with it.

Each place of the paper cache holds the identity of a whole prefix: a hash of the salt and of every token up to and
including that position. A row may only read places that hold exactly its own prefix, so wrong sharing, use after free,
stale hits and lost writes are all caught the moment they are read. The next token is a function of the last identity,
so a request's output is known without running anything.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from preheat.core import Delta, Finish, Request, SamplingParams, Schedule, StepResult, TokenLogprobs
from preheat.limits import Limits
from preheat.schedule.scheduler import Scheduler
from preheat.schedule.slots import NO_LOGPROBS

VOCAB = 7


class WrongCache(AssertionError):
    """A row read or wrote a place that is not its own."""


def limits(**changes) -> Limits:
    values = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_num_prefill_seqs": None,
        "block_size": 4,
        "num_blocks": 65,
    }
    return Limits(**{**values, **changes})


def request(number: int, prompt: list[int], max_tokens: int = 8, *, stop_ids=(), salt: str = "", **params) -> Request:
    return Request(
        id=number,
        prompt=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=0,
        max_tokens=max_tokens,
        stop_ids=list(stop_ids),
        cache_salt=salt,
    )


def identities(salt: str, tokens: list[int]) -> list[int]:
    found, last = [], zlib.crc32(salt.encode())
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def next_token(identity: int) -> int:
    return hash((identity, 1)) % VOCAB


def logprob(identity: int, successor: int) -> TokenLogprobs:
    return TokenLogprobs(successor, -(identity % 1000) / 100, 1 + identity % 5, [])


@dataclass
class Outcome:
    """Everything that the front door was told of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs | None]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finish: Finish | None = None


def reference(request: Request) -> Outcome:
    """The request run by itself, with no cache and no scheduler."""
    outcome, tokens = Outcome(), list(request.prompt)
    if request.params.prompt_logprobs is not None:
        ids = identities(request.cache_salt, tokens)
        entries = [logprob(ids[at], successor) for at, successor in enumerate(tokens[1:])]
        outcome.prompt_logprobs.append([None, *entries])
    while outcome.finish is None:
        identity = identities(request.cache_salt, tokens)[-1]
        token = next_token(identity)
        tokens.append(token)
        outcome.tokens.append(token)
        if request.params.logprobs is not None:
            outcome.logprobs.append(logprob(identity, token))
        if token in request.stop_ids and len(outcome.tokens) > request.params.min_tokens:
            outcome.finish = Finish("stop", stop_id=token)
        elif len(outcome.tokens) == request.max_tokens:
            outcome.finish = Finish("length")
    return outcome


class PaperDevice:
    """Executes schedules on the scheduler's own slots."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.slots = scheduler, scheduler.slots
        self.cache: dict[tuple[int, int], int] = {}

    def execute(self, schedule: Schedule) -> StepResult:
        rows = [self._row(int(slot), int(extend)) for slot, extend in zip(schedule.slots, schedule.extend, strict=True)]
        for places, ids, cached in rows:
            self._write(places[cached:], ids[cached:])
        for places, ids, _ in rows:
            if [self.cache.get(place) for place in places] != ids:
                raise WrongCache("a row reads what is not its own")
        result = StepResult(
            np.array(
                [next_token(ids[-1]) for (_, ids, _), s in zip(rows, schedule.samples, strict=True) if s], np.int32
            )
        )
        for row, (_, ids, cached) in enumerate(rows):
            self._report(result, row, int(schedule.slots[row]), ids, cached, bool(schedule.samples[row]))
        return result

    def _row(self, slot: int, extend: int):
        cached, size = int(self.slots.cached_len[slot]), self.slots.block_size
        end = cached + extend
        owner = self.slots.request[slot]
        assert owner is not None
        table = self.slots.block_table[slot].tolist()
        places = [(table[at // size], at % size) for at in range(end)]
        return places, identities(owner.cache_salt, self.slots.tokens[slot, :end].tolist()), cached

    def _write(self, places, ids) -> None:
        pool = self.scheduler.pool
        for place, identity in zip(places, ids, strict=True):
            block = place[0]
            if block == 0 or pool.refs[block] != 1 or pool._digest_of[block] is not None:
                raise WrongCache(f"a row writes to block {block}, which is not its alone")
            self.cache[place] = identity

    def _report(self, result, row, slot, ids, cached, samples) -> None:
        tokens, prompt_len = self.slots.tokens[slot], int(self.slots.prompt_len[slot])
        if self.slots.prompt_logprobs[slot] != NO_LOGPROBS:
            known = range(cached, min(len(ids), prompt_len - 1))
            result.prompt_logprobs[row] = [logprob(ids[at], int(tokens[at + 1])) for at in known]
        if samples and self.slots.logprobs[slot] != NO_LOGPROBS:
            result.logprobs[row] = logprob(ids[-1], next_token(ids[-1]))


class Harness:
    """A scheduler, its device and what the front door heard. Checks the scheduler's promises at every step."""

    def __init__(self, limits: Limits, **options) -> None:
        self.scheduler = Scheduler(limits, **options)
        self.device = PaperDevice(self.scheduler)
        self.requests: dict[int, Request] = {}
        self.outcomes: dict[int, Outcome] = defaultdict(Outcome)
        self.cancelled: set[int] = set()
        self.steps = 0

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
            self.requests[each.id] = each

    def cancel(self, number: int) -> bool:
        here = self.scheduler.cancel(number)
        if here:
            self.cancelled.add(number)
        return here

    def schedule(self) -> Schedule | None:
        idle = self.scheduler.idle
        schedule = self.scheduler.schedule()
        assert (schedule is None) == idle
        if schedule is not None:
            self._check(schedule)
        return schedule

    def step(self, fail: str | None = None) -> Schedule | None:
        schedule = self.schedule()
        if schedule is None:
            return None
        self.steps += 1
        if fail is None:
            self._hear(self.scheduler.settle(schedule, self.device.execute(schedule)))
        else:
            self._hear(self.scheduler.fail(schedule, fail))
        self.scheduler.check()
        return schedule

    def run(self, at_most: int = 10_000) -> None:
        while not self.scheduler.idle:
            assert self.steps < at_most, "somebody starves"
            self.step()
        assert self.scheduler.pool.num_used == 0
        self.scheduler.check()

    def verify(self) -> None:
        """Every request that ran to its end said exactly what the reference says, however it was batched."""
        for number, each in self.requests.items():
            got, want = self.outcomes[number], reference(each)
            if got.finish is not None and got.finish.reason == "error":
                assert got.tokens == want.tokens[: len(got.tokens)]
            elif number in self.cancelled:
                assert got.finish is None
                assert got.tokens == want.tokens[: len(got.tokens)]
            else:
                assert (got.tokens, got.finish) == (want.tokens, want.finish)
                assert (got.logprobs, got.prompt_logprobs) == (want.logprobs, want.prompt_logprobs)
                assert len(got.starts) == 1

    def _check(self, schedule: Schedule) -> None:
        scheduler, limits, order = self.scheduler, self.scheduler.limits, self.scheduler.running.order
        extend, slots = schedule.extend, scheduler.slots
        assert len(set(schedule.slots.tolist())) == schedule.rows
        assert scheduler.padded(schedule.rows, schedule.tokens, int(extend.max())) <= limits.max_num_batched_tokens
        assert (extend >= 1).all()
        reached = slots.cached_len[schedule.slots] + extend
        assert (reached <= slots.device_len[schedule.slots]).all()
        assert ((reached == slots.device_len[schedule.slots]) == schedule.samples).all()
        decode = slice(0, schedule.num_decode)
        assert (extend[decode] == 1).all()
        assert schedule.samples[decode].all()
        assert schedule.rows - schedule.num_decode <= (limits.max_num_prefill_seqs or limits.max_num_seqs)
        if scheduler.mixed_steps:
            assert order[0] in schedule.slots, "the earliest arrival must advance at every step"
        arrivals = scheduler.running.ids[order].tolist() + list(scheduler.waiting._sequences)
        assert arrivals == sorted(arrivals), "first come, first served"

    def _hear(self, delta: Delta) -> None:
        for number, cached in delta.started.items():
            self.outcomes[number].starts.append(cached)
        for number, token in zip(delta.ids, delta.tokens, strict=True):
            assert self.outcomes[number].finish is None, "a token after the end"
            self.outcomes[number].tokens.append(token)
        for number, entry in delta.logprobs.items():
            self.outcomes[number].logprobs.append(entry)
        for number, entries in delta.prompt_logprobs.items():
            self.outcomes[number].prompt_logprobs.append(entries)
        for number, finish in delta.finished.items():
            assert self.outcomes[number].finish is None
            self.outcomes[number].finish = finish
