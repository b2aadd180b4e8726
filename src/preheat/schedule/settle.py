"""Booking a step's outcome: lengths move, tokens are appended, full blocks are published, sequences end."""

from __future__ import annotations

import numpy as np

from preheat.core import Delta, Finish, Schedule, Stats, StepResult, TokenLogprobs
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.running import Running
from preheat.schedule.slots import NO_LOGPROBS


def settle(running: Running, prefix: PrefixCache, schedule: Schedule, result: StepResult, totals: Stats) -> Delta:
    """Write ``result`` into the slots and say what changed. Loops only over rows to which something special happens.

    Raises ValueError, changing nothing, if the result does not have one token for each sampling row.
    """
    slots, rows = running.slots, schedule.slots
    sampled = rows[schedule.samples]
    if result.tokens.shape != sampled.shape:
        raise ValueError(f"{result.tokens.shape} tokens for {len(sampled)} sampling rows")
    before = slots.cached_len[rows]
    after = before + schedule.extend
    slots.cached_len[rows] = after
    _publish(running, prefix, rows, before, after)
    position = slots.device_len[sampled]
    slots.tokens[sampled, position] = result.tokens
    slots.device_len[sampled] = position + 1
    prompt_len = slots.prompt_len[sampled]
    totals.generation_tokens += len(sampled)
    totals.prompt_tokens += int(prompt_len[position == prompt_len].sum())
    delta = Delta(
        ids=running.ids[sampled].tolist(),
        tokens=result.tokens.tolist(),
        logprobs={int(running.ids[rows[row]]): entry for row, entry in result.logprobs.items()},
        prompt_logprobs=_prompt_logprobs(running, schedule, result),
        started=schedule.started,
    )
    ended = _ended(running, sampled, result.tokens)
    delta.finished = {int(running.ids[slot]): finish for slot, finish in ended.items()}
    running.stop(list(ended))
    return delta


def fail(running: Running, schedule: Schedule, message: str) -> Delta:
    """The step did not work out: its sequences end with an error and give back what they hold."""
    ids = running.ids[schedule.slots].tolist()
    running.stop(schedule.slots.tolist())
    return Delta(finished=dict.fromkeys(ids, Finish("error", message=message)), started=schedule.started)


def lose_cache(running: Running, message: str) -> Delta:
    """All running sequences end with an error, and nothing that the cache holds is ever read again."""
    ids = running.ids[running.order].tolist()
    running.stop(running.order.tolist())
    running.pool.forget_contents()
    return Delta(finished=dict.fromkeys(ids, Finish("error", message=message)))


def _publish(running: Running, prefix: PrefixCache, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    slots, size = running.slots, running.slots.block_size
    first, last = before // size, after // size
    for row in np.flatnonzero(last > first).tolist():
        slot = int(rows[row])
        tokens, table = slots.tokens[slot], slots.block_table[slot]
        prefix.publish(running.sequence(slot), tokens, table, int(first[row]), int(last[row]))


def _ended(running: Running, sampled: np.ndarray, tokens: np.ndarray) -> dict[int, Finish]:
    """The slots whose sequence ends with its new token. A stop id has precedence over the length."""
    slots = running.slots
    length = slots.device_len[sampled]
    stop = (slots.stop_ids[sampled] == tokens[:, None]).any(1)
    for j in np.flatnonzero(slots.has_many_stop_ids[sampled]).tolist():
        stop[j] |= int(tokens[j]) in slots.many_stop_ids[int(sampled[j])]
    stop &= length > slots.min_len[sampled]
    ended = {}
    for j in np.flatnonzero(stop | (length >= slots.max_len[sampled])).tolist():
        ended[int(sampled[j])] = Finish("stop", stop_id=int(tokens[j])) if stop[j] else Finish("length")
    return ended


def _prompt_logprobs(running: Running, schedule: Schedule, result: StepResult) -> dict[int, list[TokenLogprobs | None]]:
    """Add each chunk's entries to its sequence; the lists of those whose prompt is now computed are handed over."""
    slots, done = running.slots, {}
    rows = schedule.slots
    for row in np.flatnonzero(slots.prompt_logprobs[rows] != NO_LOGPROBS).tolist():
        slot = int(rows[row])
        sequence = running.sequence(slot)
        sequence.prompt_logprobs += result.prompt_logprobs.get(row, [])
        if slots.cached_len[slot] >= slots.prompt_len[slot]:
            done[sequence.request.id] = sequence.prompt_logprobs
            sequence.owes_prompt_logprobs = False
            slots.prompt_logprobs[slot] = NO_LOGPROBS
    return done
