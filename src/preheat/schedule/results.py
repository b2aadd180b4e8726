"""Processing a step's result: tokens are written, full blocks are published, sequences end.

Lengths moved when the step was scheduled, and the slots may be one step ahead, so everything here follows the
:class:`~preheat.core.Schedule`. Only rows with drafts get their lengths here, once it is known how many were accepted.
Rows whose sequence has ended meanwhile are dropped: their tokens are neither written nor counted nor reported.
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
    """Sampled tokens: slot, position, request id, token, and place in the step's result of each."""

    slots: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    places: np.ndarray | None = None  # None: all of the result

    def logprobs(self, result: StepResult) -> dict[int, TokenLogprobs]:
        """The logprobs of these tokens, by their index in this tuple's arrays."""
        if not result.logprobs or self.places is None:
            return result.logprobs
        places = enumerate(self.places.tolist())
        return {new: result.logprobs[old] for new, old in places if old in result.logprobs}


def process_results(
    running: RunningSequences, prefix: PrefixCache, schedule: Schedule, result: StepResult, totals: Stats
) -> Delta:
    """Write ``result`` into the slots and report what changed. There is no Python loop over plain rows.

    Call it in the order in which the steps run. Raises ValueError, changing nothing, unless the result has one token
    for each sampled position.
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
    """The step failed: its sequences end with an error and free what they own."""
    live = _live(running, schedule)
    running.stop(schedule.slots[live].tolist())
    finish = Finish("error", error=WireError.of(error))
    return Delta(finished=dict.fromkeys(schedule.ids[live].tolist(), finish), started=schedule.started)


def lose_cache(running: RunningSequences, error: Exception) -> Delta:
    """All running sequences end with an error, and the prefix cache is emptied."""
    ids = running.ids[running.order].tolist()
    running.stop(running.order.tolist())
    running.pool.forget_contents()
    return Delta(finished=dict.fromkeys(ids, Finish("error", error=WireError.of(error))))


def _live(running: RunningSequences, schedule: Schedule) -> np.ndarray:
    """bool [rows]: whose sequence still runs. A slot that was freed or reused has another id."""
    live: np.ndarray = running.ids.take(schedule.slots) == schedule.ids
    return live


def _kept_tokens(
    slots: Slots, schedule: Schedule, result: StepResult, live: np.ndarray, totals: Stats
) -> tuple[_Tokens, np.ndarray]:
    """The tokens that become part of their sequences; and where each row ends now, int [rows]: behind the tokens whose
    keys and values in the cache are valid.
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
    """bool: where the draft differs from the sampled token. Meaningless for a row's last token, which has no draft."""
    wrong: np.ndarray = slots.tokens[sampled.slots, sampled.positions] != sampled.tokens
    return wrong


def _up_to_first(last: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """bool: the entries of each row up to and including its first that is ``last``; ``rows`` is sorted."""
    before = last.cumsum() - last  # in this row and all those before it
    kept: np.ndarray = before == before[np.searchsorted(rows, rows)]
    return kept


def _roll_back(slots: Slots, schedule: Schedule, live: np.ndarray, kept_rows: np.ndarray, totals: Stats) -> np.ndarray:
    """Set the lengths of the rows with drafts to the tokens that are kept; where each row ends. Rejected drafts stay in
    the slot and the cache, beyond both lengths: they are overwritten before being read.
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
    """Publish the blocks that the step filled, whose tokens are all known."""
    slots, size = running.slots, running.slots.block_size
    first, last = schedule.first // size, ends // size
    for row in ((last > first) & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        tokens, table = slots.tokens[slot], slots.block_table[slot]
        prefix.publish(running.sequence(slot), tokens, table, int(first[row]), int(last[row]))


def _stops(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """bool: tokens that are stop ids of their sequence, from ``min_tokens`` on."""
    stop: np.ndarray = (slots.stop_ids.take(sampled.slots, axis=1) == sampled.tokens).any(0)
    if slots.many_stop_ids:
        for j in slots.has_many_stop_ids[sampled.slots].nonzero()[0].tolist():
            stop[j] |= int(sampled.tokens[j]) in slots.many_stop_ids[int(sampled.slots[j])]
    if stop.any():
        stop &= sampled.positions >= slots.min_len[sampled.slots]
    return stop


def _at_max_len(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """bool: tokens with which their sequence reaches its maximum length."""
    at_end: np.ndarray = sampled.positions + 1 >= slots.max_len.take(sampled.slots)
    return at_end


def _ended(slots: Slots, kept: _Tokens) -> dict[int, Finish]:
    """The indices in ``kept`` at which a sequence ends. A stop id takes precedence over the length."""
    stop, ended = _stops(slots, kept), {}
    for j in (stop | _at_max_len(slots, kept)).nonzero()[0].tolist():
        ended[j] = Finish("stop", stop_id=int(kept.tokens[j])) if stop[j] else Finish("length")
    return ended


def _prompt_logprobs(
    running: RunningSequences, schedule: Schedule, result: StepResult, live: np.ndarray
) -> dict[int, list[TokenLogprobs | None]]:
    """Add each chunk's entries to its sequence; the lists of the prompts that are now computed, by request id."""
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
