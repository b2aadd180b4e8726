"""Booking a step's outcome: tokens are written, full blocks are published, sequences end.

Lengths have moved already, when the step was scheduled, and the slots may be a step ahead: everything here goes by what
the :class:`~preheat.core.Schedule` says of its own time. A row whose sequence ended meanwhile, or was cancelled, is
dropped: its token is neither written nor counted nor told to anybody.
"""

from __future__ import annotations

import numpy as np

from preheat.core import Delta, Finish, Schedule, Stats, StepResult, TokenLogprobs
from preheat.errors import WireError
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.running import Running
from preheat.schedule.slots import NO_LOGPROBS


def settle(running: Running, prefix: PrefixCache, schedule: Schedule, result: StepResult, totals: Stats) -> Delta:
    """Write ``result`` into the slots and say what changed. Loops only over rows to which something special happens.

    Steps are settled in the order in which they run. Raises ValueError, changing nothing, if the result does not have
    one token for each sampling row.
    """
    sampling = np.count_nonzero(schedule.samples)
    if result.tokens.shape != (sampling,):
        raise ValueError(f"{result.tokens.shape} tokens for {sampling} sampling rows")
    slots, live = running.slots, _live(running, schedule)
    _publish(running, prefix, schedule, live)
    slot, position, owners, tokens = schedule.slots, schedule.ends, schedule.ids, result.tokens
    told = schedule.samples & live
    if not told.all():
        slot, position, owners, tokens = slot[told], position[told], owners[told], tokens[live[schedule.samples]]
    ids = owners.tolist()
    slots.tokens[slot, position] = tokens
    first_ones = position == slots.prompt_len.take(slot)
    totals.generation_tokens += len(slot)
    totals.prompt_tokens += int(position[first_ones].sum()) if first_ones.any() else 0
    ended = _ended(running, slot, position + 1, tokens)
    delta = Delta(
        ids=ids,
        tokens=tokens.tolist(),
        finished={ids[j]: finish for j, finish in ended.items()},
        logprobs={int(schedule.ids[row]): entry for row, entry in result.logprobs.items() if live[row]},
        prompt_logprobs=_prompt_logprobs(running, schedule, result, live),
        started=schedule.started,
    )
    if ended:
        running.stop(slot[list(ended)].tolist())
    return delta


def fail(running: Running, schedule: Schedule, error: Exception) -> Delta:
    """The step did not work out: its sequences end with an error and give back what they hold."""
    live = _live(running, schedule)
    running.stop(schedule.slots[live].tolist())
    finish = Finish("error", error=WireError.of(error))
    return Delta(finished=dict.fromkeys(schedule.ids[live].tolist(), finish), started=schedule.started)


def lose_cache(running: Running, error: Exception) -> Delta:
    """All running sequences end with an error, and nothing that the cache holds is ever read again."""
    ids = running.ids[running.order].tolist()
    running.stop(running.order.tolist())
    running.pool.forget_contents()
    return Delta(finished=dict.fromkeys(ids, Finish("error", error=WireError.of(error))))


def _live(running: Running, schedule: Schedule) -> np.ndarray:
    """bool [rows]: whose sequence still runs. A slot that was freed, or given to another, has another id."""
    live: np.ndarray = running.ids.take(schedule.slots) == schedule.ids
    return live


def _publish(running: Running, prefix: PrefixCache, schedule: Schedule, live: np.ndarray) -> None:
    """Blocks that the step filled. Their tokens are all settled: the last of them was drawn by an earlier step."""
    slots, size = running.slots, running.slots.block_size
    first, last = schedule.first // size, schedule.ends // size
    for row in ((last > first) & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        tokens, table = slots.tokens[slot], slots.block_table[slot]
        prefix.publish(running.sequence(slot), tokens, table, int(first[row]), int(last[row]))


def _ended(running: Running, slot: np.ndarray, length: np.ndarray, tokens: np.ndarray) -> dict[int, Finish]:
    """The places j at which the sequence in ``slot[j]`` ends with ``tokens[j]``, its ``length[j]``-th token.

    A stop id has precedence over the length.
    """
    slots = running.slots
    stop = (slots.stop_ids.take(slot, axis=1) == tokens).any(0)
    if slots.many_stop_ids:
        for j in slots.has_many_stop_ids[slot].nonzero()[0].tolist():
            stop[j] |= int(tokens[j]) in slots.many_stop_ids[int(slot[j])]
    if stop.any():
        stop &= length > slots.min_len[slot]
    ended = {}
    for j in (stop | (length >= slots.max_len.take(slot))).nonzero()[0].tolist():
        ended[j] = Finish("stop", stop_id=int(tokens[j])) if stop[j] else Finish("length")
    return ended


def _prompt_logprobs(
    running: Running, schedule: Schedule, result: StepResult, live: np.ndarray
) -> dict[int, list[TokenLogprobs | None]]:
    """Add each chunk's entries to its sequence; the lists of those whose prompt is now computed are handed over."""
    slots, done = running.slots, {}
    owed = slots.prompt_logprobs.take(schedule.slots) != NO_LOGPROBS
    for row in (owed & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        sequence = running.sequence(slot)
        sequence.prompt_logprobs += result.prompt_logprobs.get(row, [])
        if schedule.first[row] + schedule.extend[row] >= slots.prompt_len[slot]:
            done[sequence.request.id] = sequence.prompt_logprobs
            sequence.owes_prompt_logprobs = False
            slots.prompt_logprobs[slot] = NO_LOGPROBS
    return done
