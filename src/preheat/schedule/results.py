"""Processing a step's result: tokens are written, full blocks are published, sequences end.

Lengths moved when the step was scheduled, and the slots may be one step ahead; everything here goes by what the
:class:`~preheat.core.Schedule` recorded. Only rows with draft tokens get their lengths here: how many drafts were
accepted is not known before. Rows whose sequence has ended or was cancelled in the meantime are dropped: their tokens
are neither written nor counted nor reported.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from preheat.core import Delta, Finish, Schedule, Stats, StepResult, TokenLogprobs
from preheat.errors import WireError
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.running import RunningSequences
from preheat.schedule.slots import NO_LOGPROBS, Slots


class _Tokens(NamedTuple):
    """Sampled tokens: each one's slot, position, request id, the token itself, and its place in the step's result."""

    slots: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    places: np.ndarray | None = None  # None: all of the result

    def logprobs(self, result: StepResult) -> dict[int, TokenLogprobs]:
        """The logprobs of these tokens, by their place among these."""
        if not result.logprobs or self.places is None:
            return result.logprobs
        places = enumerate(self.places.tolist())
        return {new: result.logprobs[old] for new, old in places if old in result.logprobs}


def process_results(
    running: RunningSequences, prefix: PrefixCache, schedule: Schedule, result: StepResult, totals: Stats
) -> Delta:
    """Write ``result`` into the slots and say what changed. Plain rows cost no Python loop, only special events do.

    Results are processed in the order in which the steps run. Raises ValueError, changing nothing, if the result does
    not have one token for each sampled position.
    """
    if result.tokens.shape != (schedule.total_sampled,):
        raise ValueError(f"{result.tokens.shape} tokens for {schedule.total_sampled} sampled positions")
    slots, live = running.slots, _live(running, schedule)
    kept, ends = _kept_tokens(slots, schedule, result, live, totals)
    _publish(running, prefix, schedule, ends, live)
    slots.tokens[kept.slots, kept.positions] = kept.tokens
    first_ones = kept.positions == slots.prompt_len.take(kept.slots)
    totals.generation_tokens += len(kept.slots)
    totals.prompt_tokens += int(kept.positions[first_ones].sum()) if first_ones.any() else 0
    ids, ended = kept.ids.tolist(), _ended(slots, kept)
    delta = Delta(
        ids=ids,
        tokens=kept.tokens.tolist(),
        finished={ids[j]: finish for j, finish in ended.items()},
        logprobs=kept.logprobs(result),
        prompt_logprobs=_prompt_logprobs(running, schedule, result, live),
        started=schedule.started,
    )
    if ended:
        running.stop(kept.slots[list(ended)].tolist())
    return delta


def fail(running: RunningSequences, schedule: Schedule, error: Exception) -> Delta:
    """The step failed: its sequences end with an error and give back what they hold."""
    live = _live(running, schedule)
    running.stop(schedule.slots[live].tolist())
    finish = Finish("error", error=WireError.of(error))
    return Delta(finished=dict.fromkeys(schedule.ids[live].tolist(), finish), started=schedule.started)


def lose_cache(running: RunningSequences, error: Exception) -> Delta:
    """All running sequences end with an error, and nothing that the cache holds is ever read again."""
    ids = running.ids[running.order].tolist()
    running.stop(running.order.tolist())
    running.pool.forget_contents()
    return Delta(finished=dict.fromkeys(ids, Finish("error", error=WireError.of(error))))


def _live(running: RunningSequences, schedule: Schedule) -> np.ndarray:
    """bool [rows]: whose sequence still runs. A slot that was freed, or given to another, has another id."""
    live: np.ndarray = running.ids.take(schedule.slots) == schedule.ids
    return live


def _kept_tokens(
    slots: Slots, schedule: Schedule, result: StepResult, live: np.ndarray, totals: Stats
) -> tuple[_Tokens, np.ndarray]:
    """The result's tokens that become part of their sequences; and where each row ends now, int [rows]: after the
    tokens whose keys and values in the cache are right.
    """
    if schedule.num_decode == schedule.rows and live.all():
        return _Tokens(schedule.slots, schedule.ends, schedule.ids, result.tokens), schedule.ends
    rows, positions = schedule.sampled()
    places = live[rows].nonzero()[0]
    taken = _take(schedule, result, rows, positions, places)
    if not schedule.has_drafts:
        return taken, schedule.ends
    last = _wrong_drafts(slots, taken) | _stops(slots, taken) | _at_max_len(slots, taken)
    places = places[_up_to_first(last, rows[places])]
    return _take(schedule, result, rows, positions, places), _roll_back(slots, schedule, live, rows[places], totals)


def _take(
    schedule: Schedule, result: StepResult, rows: np.ndarray, positions: np.ndarray, places: np.ndarray
) -> _Tokens:
    chosen = rows[places]
    return _Tokens(schedule.slots[chosen], positions[places], schedule.ids[chosen], result.tokens[places], places)


def _wrong_drafts(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """bool: where something else was drafted than was sampled. Meaningless for a row's last token: no draft is there,
    and nothing follows it.
    """
    wrong: np.ndarray = slots.tokens[sampled.slots, sampled.positions] != sampled.tokens
    return wrong


def _up_to_first(last: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """bool: the entries of each row up to and including its first that is ``last``; ``rows`` is sorted."""
    before = last.cumsum() - last  # in this row and all those before it
    kept: np.ndarray = before == before[np.searchsorted(rows, rows)]
    return kept


def _roll_back(slots: Slots, schedule: Schedule, live: np.ndarray, kept_rows: np.ndarray, totals: Stats) -> np.ndarray:
    """Set the lengths of the rows with drafts, now that it is known how many of their tokens are kept: where each row
    ends. Rejected drafts stay in the slot and the cache, beyond both lengths: they are overwritten before being read.
    """
    drafted = ((schedule.num_sampled > 1) & live).nonzero()[0]
    kept = np.bincount(kept_rows, minlength=schedule.rows)[drafted]
    ends = schedule.ends.copy()
    ends[drafted] = schedule.first[drafted] + kept
    slots.cached_len[schedule.slots[drafted]] = ends[drafted]
    slots.device_len[schedule.slots[drafted]] = ends[drafted] + 1
    totals.draft_tokens += int((schedule.num_sampled[drafted] - 1).sum())
    totals.accepted_tokens += int((kept - 1).sum())
    return ends


def _publish(
    running: RunningSequences, prefix: PrefixCache, schedule: Schedule, ends: np.ndarray, live: np.ndarray
) -> None:
    """Publish the blocks that the step filled. All their tokens are known: the last was sampled by an earlier step, or
    drafted and accepted.
    """
    slots, size = running.slots, running.slots.block_size
    first, last = schedule.first // size, ends // size
    for row in ((last > first) & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        tokens, table = slots.tokens[slot], slots.block_table[slot]
        prefix.publish(running.sequence(slot), tokens, table, int(first[row]), int(last[row]))


def _stops(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """bool: tokens that are stop ids of their sequence, which has its ``min_tokens``."""
    stop: np.ndarray = (slots.stop_ids.take(sampled.slots, axis=1) == sampled.tokens).any(0)
    if slots.many_stop_ids:
        for j in slots.has_many_stop_ids[sampled.slots].nonzero()[0].tolist():
            stop[j] |= int(sampled.tokens[j]) in slots.many_stop_ids[int(sampled.slots[j])]
    if stop.any():
        stop &= sampled.positions >= slots.min_len[sampled.slots]
    return stop


def _at_max_len(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """bool: tokens with which their sequence has its length."""
    at_end: np.ndarray = sampled.positions + 1 >= slots.max_len.take(sampled.slots)
    return at_end


def _ended(slots: Slots, kept: _Tokens) -> dict[int, Finish]:
    """The places among ``kept`` at which a sequence ends. A stop id has precedence over the length."""
    stop, ended = _stops(slots, kept), {}
    for j in (stop | _at_max_len(slots, kept)).nonzero()[0].tolist():
        ended[j] = Finish("stop", stop_id=int(kept.tokens[j])) if stop[j] else Finish("length")
    return ended


def _prompt_logprobs(
    running: RunningSequences, schedule: Schedule, result: StepResult, live: np.ndarray
) -> dict[int, list[TokenLogprobs | None]]:
    """Add each chunk's entries to its sequence; return the lists of those whose prompt is now computed."""
    slots, done = running.slots, {}
    owed = slots.prompt_logprobs.take(schedule.slots) != NO_LOGPROBS
    for row in (owed & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        sequence = running.sequence(slot)
        sequence.prompt_logprobs += result.prompt_logprobs.get(row, [])
        if schedule.ends[row] >= slots.prompt_len[slot]:
            done[sequence.request.id] = sequence.prompt_logprobs
            sequence.owes_prompt_logprobs = False
            slots.prompt_logprobs[slot] = NO_LOGPROBS
    return done
