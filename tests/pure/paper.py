"""A device on paper, and a harness that drives the loop and its scheduler with it.

Each place of the paper cache holds the identity of a whole prefix: a hash of the salt and of every token up to and
including that position. A row may only read places that hold exactly its own prefix. So wrong sharing, use after free,
stale hits and lost writes are all caught at the moment of the read. The next token is a function of the last identity,
so a request's output is known without running anything. Each cache group has places of its own, which also hold the
number of the group. A group with a window reads the places in the window of the row's first token, and later ones. A
state slot holds the identity of the last token before it.

The device is as late as it may be: a step runs when the loop waits for it or for a later one, in the order of launches.
It knows only the data of a step at its launch, and the token that it drew last for each slot.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from preheat.core import (
    Delta,
    Finish,
    Image,
    ImageSpan,
    Request,
    ResetPrefixCache,
    SamplingParams,
    Schedule,
    StepResult,
    Swaps,
    TokenLogprobs,
    own_states,
)
from preheat.engine.loop import Loop
from preheat.limits import Limits
from preheat.schedule.drafting import Drafting
from preheat.schedule.scheduler import Scheduler
from preheat.schedule.slots import NO_LOGPROBS, UNSEEN, Slots
from preheat.transport import InlineTransport

VOCAB = 7
JUNK = 99  # drawn by a row without its step before; it must never reach the frontend


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


def with_images(request: Request, tokens: list[int]) -> list[Any]:
    """Return ``tokens`` with images in place of their positions: the image's hash, and the position within it."""
    found: list[Any] = list(tokens)
    for segment in request.segments:
        for at in range(segment.start, min(segment.end, len(found))):
            found[at] = (segment.image.hash, at - segment.start)
    return found


def identities(salt: str, tokens: list[Any]) -> list[int]:
    found, last = [], zlib.crc32(salt.encode())
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def held(group: int, ids: list[int]) -> list[int]:
    """Return the contents of a group's places for these identities."""
    return [hash((each, group)) for each in ids] if group else ids


def next_token(identity: int) -> int:
    return hash((identity, 1)) % VOCAB


def logprob(identity: int, successor: int) -> TokenLogprobs:
    return TokenLogprobs(successor, -(identity % 1000) / 100, 1 + identity % 5, ())


@dataclass
class Outcome:
    """Everything that the frontend was told of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs | None]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finish: Finish | None = None


def reference(request: Request) -> Outcome:
    """Return the outcome of the request by itself, with no cache and no scheduler."""
    outcome, tokens = Outcome(), list(request.prompt)
    if request.params.prompt_logprobs is not None:
        ids = identities(request.cache_salt, with_images(request, tokens))
        entries = [logprob(ids[at], successor) for at, successor in enumerate(tokens[1:])]
        outcome.prompt_logprobs.append([None, *entries])
    while outcome.finish is None:
        identity = identities(request.cache_salt, with_images(request, tokens))[-1]
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


@dataclass
class PaperRow:
    """A row as given to the device.

    ``tokens`` go up to the last that it computes, which may be UNSEEN.
    """

    slot: int
    owner: Request
    places: list[list[tuple[int, int]]]  # of each group
    reads_from: list[int]  # the first position that each group reads
    tokens: list[Any]
    first: int
    num_sampled: int
    logprobs: bool
    successors: list[int] | None  # of its prompt tokens, where their logprobs are wanted
    spans: list[ImageSpan]
    states: list[list[int]]  # tokens, and the state slots to read and to write, of each part


@dataclass
class PaperStep:
    """A step on the device."""

    device: PaperDevice
    rows: list[PaperRow]
    encode: list[tuple[int, Image]] = field(default_factory=list)
    bucket: str = "paper"
    fails: str = ""
    value: StepResult | None = None

    def result(self) -> StepResult:
        self.device.run_until(self)
        if self.fails:
            raise RuntimeError(self.fails)
        assert self.value is not None
        return self.value


class PaperDevice:
    """Packs and runs the steps of the scheduler's slots."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.slots = scheduler, scheduler.slots
        self.cache: dict[tuple[int, int], int] = {}
        self.states: dict[int, int | None] = {}
        self.queue: list[PaperStep] = []
        self.last_token: dict[int, int] = {}
        self.images: dict[int, bytes] = {}  # the image of the embeddings at each place
        self.encoded = 0
        self.lost: set[int] = set()  # requests with lost steps
        self.rows_run = 0

    def pack(self, schedule: Schedule) -> PaperStep:
        encode = schedule.images.encode if schedule.images else []
        return PaperStep(self, [self._row(schedule, row) for row in range(schedule.rows)], encode)

    def launch(self, step: PaperStep) -> PaperStep:
        self.queue.append(step)
        return step

    def run_until(self, last: PaperStep) -> None:
        while last in self.queue:
            step = self.queue.pop(0)
            if step.fails:
                self.lost |= {row.owner.id for row in step.rows}
            else:
                step.value = self._run(step)

    def swap(self, swaps: Swaps) -> None:
        """Swap both blocks of each pair, all at once, as far as they were ever written."""
        if self.queue:
            raise WrongCache("blocks move while a step is in flight")
        for one, other in {(int(one), int(other)) for one, other in swaps.pairs}:
            for at in range(self.slots.block_size):
                here, there = self.cache.pop((one, at), None), self.cache.pop((other, at), None)
                self.cache |= {place: value for place, value in (((one, at), there), ((other, at), here)) if value}

    def _row(self, schedule: Schedule, row: int) -> PaperRow:
        slot, first, end = int(schedule.slots[row]), int(schedule.first[row]), int(schedule.ends[row])
        slots, size = self.slots, self.slots.block_size
        owner = slots.request[slot]
        assert owner is not None
        tables, windows = slots.tables[slot].tolist(), [group.window for group in self.scheduler.limits.groups]
        places = [[(table[at // size], at % size) for at in range(end)] for table in tables]
        reads_from = [0 if window is None else max(first - window + 1, 0) for window in windows]
        for block in {block for own in places for block, _ in own[first:]}:
            if block == 0 or self.scheduler.pool.refs[block] != 1 or self.scheduler.pool._hash_of[block] is not None:
                raise WrongCache(f"a row writes to block {block}, which is not its alone")
        wanted = slots.prompt_logprobs[slot] != NO_LOGPROBS
        successors = slots.tokens[slot, first + 1 : min(end + 1, slots.prompt_len[slot])].tolist()
        known = [*with_images(owner, slots.tokens[slot, :first].tolist()), *slots.tokens[slot, first:end].tolist()]
        spans = [span for span in schedule.images.spans if span.row == row] if schedule.images else []
        states = schedule.states or own_states(schedule.slots, schedule.extend)
        parts = np.stack(states[1:], 1)[states.row == row].tolist() if self.scheduler.limits.states else []
        return PaperRow(
            slot, owner, places, reads_from, known, first, int(schedule.num_sampled[row]),
            slots.logprobs[slot] != NO_LOGPROBS, successors if wanted else None, spans, parts,
        )  # fmt: skip

    def _run(self, step: PaperStep) -> StepResult:
        known: dict[int, list[int]] = {}
        self.encoded += len(step.encode)
        self.images |= {place: image.hash for place, image in step.encode}
        for at, row in enumerate(step.rows):
            if row.owner.id in self.lost:
                continue
            for span in row.spans:
                for position in range(span.first, span.last):
                    place, within = divmod(span.source + position - span.first, self.scheduler.limits.image_tokens)
                    row.tokens[position] = (self.images.get(place), within)
            if row.tokens[-1] == UNSEEN:
                row.tokens[-1] = self.last_token[row.slot]
            known[at] = identities(row.owner.cache_salt, row.tokens)
            for group, places in enumerate(row.places):
                self.cache |= dict(zip(places[row.first :], held(group, known[at][row.first :]), strict=True))
        self._move_states(step.rows, known)
        result, tokens = StepResult(np.empty(0)), []
        for at, row in enumerate(step.rows):
            ids = known.get(at)
            for group, places in enumerate(row.places if ids is not None else ()):
                begin = row.reads_from[group]
                if [self.cache.get(place) for place in places[begin:]] != held(group, ids[begin:]):
                    raise WrongCache("a row reads what is not its own")
            self.rows_run += 1
            if ids is not None:
                self._report(result, at, row, ids, len(tokens))
            if row.num_sampled:
                last = [JUNK] * row.num_sampled if ids is None else [next_token(i) for i in ids[-row.num_sampled :]]
                tokens += last
                self.last_token[row.slot] = tokens[-1]
        result.tokens = np.array(tokens, np.int32)
        return result

    def _move_states(self, rows: list[PaperRow], known: dict[int, list[int]]) -> None:
        """Read and write the states of a step: rows read first, and no row sees a slot of another one."""
        reads = {row.states[0][1]: at for at, row in enumerate(rows) if row.states and row.first}
        writes = [(part[2], at) for at, row in enumerate(rows) for part in row.states]
        if len({slot for slot, _ in writes}) < len(writes) or any(reads.get(slot, at) != at for slot, at in writes):
            raise WrongCache("two rows meet in a state slot")
        for at, row in enumerate(rows):
            ids = known.get(at)
            if row.states and row.first and ids and self.states.get(row.states[0][1]) != ids[row.first - 1]:
                raise WrongCache("a row reads a state that is not its own")
        for at, row in enumerate(rows):
            ids, end, before = known.get(at), row.first, None
            for count, read, write in row.states:
                assert before in (None, read), "a part reads the state that the part before it wrote"
                end, before = end + count, write
                self.states[write] = ids[end - 1] if ids else None
            assert not row.states or end == len(row.tokens)

    def _report(self, result: StepResult, at: int, row: PaperRow, ids: list[int], place: int) -> None:
        if row.successors is not None:
            pairs = zip(ids[row.first :], row.successors, strict=False)
            result.prompt_logprobs[at] = [logprob(identity, successor) for identity, successor in pairs]
        if row.num_sampled and row.logprobs:
            for further, identity in enumerate(ids[-row.num_sampled :]):
                result.logprobs[place + further] = logprob(identity, next_token(identity))


class Parts:
    """The loop's packer, executor and listener, in front of the device.

    ``fails`` is the place where the next step is to fail, and its reason. The loop takes an error for an error of a
    step; so a broken promise is kept in ``wrong``, for the harness to raise.
    """

    def __init__(self, device: PaperDevice, check: Callable[[Schedule], None]) -> None:
        self.device, self._check = device, check
        self.launched: Schedule | None = None
        self.fails = ("", "")
        self.wrong: AssertionError | None = None

    def pack(self, schedule: Schedule) -> PaperStep:
        self.launched = schedule
        with self._kept():
            self._check(schedule)
            step = self.device.pack(schedule)
        self._fail_at("pack")
        return step

    def launch(self, step: PaperStep) -> Watched:
        self._fail_at("launch")
        if self.fails[0] == "result":
            step.fails = self.fails[1]
        return Watched(self, self.device.launch(step))

    def step(self, event: PaperStep | Swaps) -> None:
        self._fail_at("listener")

    def swap(self, swaps: Swaps) -> None:
        with self._kept():
            self.device.swap(swaps)

    def report(self) -> bytes:
        return b""

    def _fail_at(self, where: str) -> None:
        if self.fails[0] == where:
            raise RuntimeError(self.fails[1])

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.wrong = self.wrong or error
            raise


@dataclass
class Watched:
    """A launched step."""

    parts: Parts
    inner: PaperStep

    def result(self) -> StepResult:
        with self.parts._kept():
            return self.inner.result()


class Harness:
    """The loop with a scheduler and a device, and everything that the frontend heard.

    It checks all promises at every step.
    """

    def __init__(self, limits: Limits, *, overlap: bool = False, proposer=None, **options) -> None:
        self.scheduler = Scheduler(limits, drafting=None if proposer is None else Drafting(proposer), **options)
        self.device = PaperDevice(self.scheduler)
        self.transport = InlineTransport()
        parts = self.parts = Parts(self.device, self._check)
        self.loop = Loop(self.transport, self.scheduler, parts, parts, parts, overlap=overlap)  # type: ignore[arg-type]
        self.requests: dict[int, Request] = {}
        self.outcomes: dict[int, Outcome] = defaultdict(Outcome)
        self.cancelled: set[int] = set()
        self.promised: dict[bytes, list[int | None]] = {}
        self.filed: dict[bytes, int] = {}  # the state of each hash
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

    def compact(self) -> Swaps | None:
        self.rest()
        swaps = self.scheduler.compact()
        if swaps is not None:
            self.device.swap(swaps)
            self.scheduler.check()
        return swaps

    def schedule(self) -> Schedule | None:
        idle = self.scheduler.idle
        schedule = self.scheduler.schedule()
        assert (schedule is None) == idle
        if schedule is not None:
            self._check(schedule)
        return schedule

    def step(self, fail: str | None = None, at: str = "result") -> Schedule | None:
        """Run a beat of the loop, and return the schedule that it launched.

        A step that is to ``fail`` does so ``at`` pack, launch, listener or result.
        """
        self.parts.launched, self.parts.fails = None, (at, fail) if fail else ("", "")
        self.loop.step()
        self._heard()
        self.steps += self.parts.launched is not None
        return self.parts.launched

    def reset_prefix_cache(self) -> None:
        """Reset as the loop does: first it processes the results of steps in flight."""
        self.transport.send(ResetPrefixCache())
        self.loop.take(0)
        self._heard()

    def rest(self) -> None:
        """Process the results of steps in flight."""
        self.loop._process_results()
        self._heard()

    def run(self, at_most: int = 10_000) -> None:
        beats = 0
        while not self.scheduler.idle:
            assert beats < at_most, "somebody starves"
            self.step()
            beats += 1
        assert self.scheduler.pool.num_used == 0
        assert not self.device.queue
        self.scheduler.check()

    def _heard(self) -> None:
        if self.parts.wrong is not None:
            raise self.parts.wrong
        for delta in self.transport.receive():
            self._hear(delta)
        self.scheduler.check()
        self._check_published()
        if not self.scheduler._in_flight:
            slots = self.scheduler.slots
            for slot in self.scheduler.running.order:
                assert (slots.tokens[slot, : slots.device_len[slot]] != UNSEEN).all()

    def verify(self) -> None:
        """Assert that every finished request has the reference's output, however it was batched."""
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
        assert (
            scheduler.budget.padded(schedule.rows, schedule.tokens, int(extend.max())) <= limits.max_num_batched_tokens
        )
        assert (extend >= 1).all()
        drafted = schedule.num_sampled > 1
        known = slots.device_len[schedule.slots] - (schedule.num_sampled == 1)
        assert (schedule.ends == slots.cached_len[schedule.slots]).all()
        assert (schedule.ends <= known).all()
        assert ((schedule.ends == known) == schedule.samples).all()
        assert (extend[drafted] == schedule.num_sampled[drafted]).all()
        assert schedule.total_sampled == schedule.num_sampled.sum() == len(schedule.sampled()[0])
        assert (known < slots.max_len[schedule.slots]).all(), "length stops are known ahead"
        decode = slice(0, schedule.num_decode)
        assert (extend[decode] == 1).all()
        assert (schedule.num_sampled[decode] == 1).all()
        assert not drafted[: schedule.rows - int(drafted.sum())].any(), "rows with drafts come last"
        assert schedule.rows - schedule.num_decode <= (limits.max_num_prefill_seqs or limits.max_num_seqs)
        if scheduler.composer.mixed_steps:
            going = [slot for slot in order if slot in schedule.slots or self._can_run(slot)]
            assert going[0] in schedule.slots, "the earliest arrival must advance at every step"
        waiting = sorted(scheduler.waiting.values(), key=lambda each: each.rank)
        queue = [*map(scheduler.running.sequence, order.tolist()), *waiting]
        for yields in (False, True):
            arrivals = [sequence.request.id for sequence in queue if sequence.yields == yields]
            assert arrivals == sorted(arrivals), "first come, first served"

    def _can_run(self, slot: int) -> bool:
        """Return whether a row may run: not at full length.

        With drafts, a row whose newest token is still in flight may not run either.
        """
        slots = self.scheduler.slots
        known, cached = slots.device_len[slot], slots.cached_len[slot]
        waits = known == cached or slots.tokens[slot, known - 1] == UNSEEN
        drafting = self.scheduler.drafting is not None
        return known < slots.max_len[slot] and not (drafting and waits)

    def _check_published(self) -> None:
        """Check that every block that can be found was computed, and keeps its content."""
        pool, size = self.scheduler.pool, self.scheduler.slots.block_size
        content = {
            known: [self.device.cache.get((block, at)) for at in range(size)] for known, block in pool._block_of.items()
        }
        for known, ids in content.items():
            if None in ids or self.promised.get(known, ids) != ids:
                raise WrongCache("a block is published that does not hold what its hash says")
        self.promised = content
        for known, block in pool.states._block_of.items() if pool.states else ():
            state = self.device.states.get(self.scheduler.limits.max_num_seqs + block)
            if state is None or {state} != {self.filed.setdefault(known, state), content.get(known, [state])[-1]}:
                raise WrongCache("a state is filed under a hash that is not its own")

    def _hear(self, delta: Delta) -> None:
        for number, cached in delta.started.items():
            self.outcomes[number].starts.append(cached)
        for place, (number, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            assert self.outcomes[number].finish is None, "a token after the end"
            self.outcomes[number].tokens.append(token)
            if place in delta.logprobs:
                self.outcomes[number].logprobs.append(delta.logprobs[place])
        for number, entries in delta.prompt_logprobs.items():
            self.outcomes[number].prompt_logprobs.append(entries)
        for number, finish in delta.finished.items():
            assert self.outcomes[number].finish is None
            self.outcomes[number].finish = finish


class Scripted:
    """Drafter of up to ``most`` tokens a row, each right with a probability of ``right``."""

    writes_cache = False

    def __init__(self, most: int, right: float, seed: int = 0) -> None:
        self.num_speculative_tokens, self.right, self.rng = most, right, random.Random(seed)
        self.asked = 0

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        self.asked += len(rows)
        return [self._drafts(slots, slot) for slot in rows.tolist()]

    def ended(self, slots: Slots, stopped) -> None:
        """Keep nothing."""

    def _drafts(self, slots: Slots, slot: int) -> np.ndarray:
        known = slots.tokens[slot, : slots.device_len[slot]].tolist()
        owner = slots.request[slot]
        assert owner is not None
        assert UNSEEN not in known
        truth = reference(request(0, owner.prompt, 64, salt=owner.cache_salt)).tokens[len(known) - len(owner.prompt) :]
        count = self.rng.randrange(self.num_speculative_tokens + 2)  # now and then more than is allowed
        drafts = [t if self.rng.random() < self.right else self.rng.randrange(VOCAB) for t in truth[:count]]
        return np.array(drafts, np.int32)
