"""Processing a step's result: tokens are written, full blocks are published, sequences end.

Lengths moved when the step was scheduled, and the slots may be one step ahead, so everything here follows the
:class:`~preheat.core.Schedule`. Only rows with drafts get their lengths here, once the number of accepted drafts is
known. Rows of a sequence that has ended meanwhile are dropped: their tokens are neither written nor counted nor
reported. Rows with numbers that are not finite are dropped too, and their sequences end with an error.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np

from preheat.core import NO_PERSISTENT_BATCH, Delta, Finish, Schedule, Stats, StepResult, TokenLogprobs
from preheat.errors import GrammarFailed, NotFinite, WireError
from preheat.schedule.drafting import Drafting
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.running import RunningSequences
from preheat.schedule.slots import NO_LOGPROBS, Slots

Entry = TypeVar("Entry")

_NO_ROWS = np.empty(0, np.int64)


class _Tokens(NamedTuple):
    """Sampled tokens with their places.

    Each has a slot, position, request id, token, and index in the step's result. A token below zero was drawn from
    logits that are not finite, see :func:`preheat.core.marked`.
    """

    slots: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    places: np.ndarray | None = None  # None: all of the result

    def of(self, entries: dict[int, Entry]) -> dict[int, Entry]:
        """Return the entries of these tokens, by their index in this tuple's arrays."""
        if not entries or self.places is None:
            return entries
        return {new: entries[old] for new, old in enumerate(self.places.tolist()) if old in entries}


def process_results(
    running: RunningSequences,
    prefix: PrefixCache,
    schedule: Schedule,
    result: StepResult,
    *,
    totals: Stats,
    drafting: Drafting | None = None,
) -> Delta:
    """Write ``result`` into the slots and report the changes.

    There is no Python loop over plain rows. ``drafting`` learns how many drafts were accepted and which sequences
    ended. Call this in the order in which the steps run. Raises ValueError, changing nothing, unless the result has one
    token for each sampled position.
    """
    if result.tokens.shape != (schedule.total_sampled,):
        raise ValueError(f"{result.tokens.shape} tokens for {schedule.total_sampled} sampled positions")
    if (delta := _plain(running, schedule, result)) is not None:
        totals.generation_tokens += len(delta.tokens)
        return delta
    slots, live = running.slots, _live(running, schedule)
    kept, ends = _kept_tokens(slots, schedule, result, live)
    corrupted: dict[int, Finish] = {}
    if len(rows := _corrupted(schedule, result, live, kept)):
        corrupted = _end_corrupted(running, schedule, rows)
        totals.corrupted_requests += len(corrupted)
        live = _live(running, schedule)
        kept, ends = _kept_tokens(slots, schedule, result, live)
    if schedule.has_drafts:
        _roll_back(slots, schedule, live, ends)
        _count_drafts(schedule, live, ends, totals, drafting)
    _publish(running, prefix, schedule, ends, live)
    if running.states is not None:
        running.states.settle(schedule, running, prefix, live, ends)
    if running.windowed:
        running.give_back(schedule.slots[live], ends[live])
    slots.tokens[kept.slots, kept.positions] = kept.tokens
    totals.generation_tokens += len(kept.slots) if result.hidden is None else 0
    begins = schedule.persistent_batch == NO_PERSISTENT_BATCH or schedule.persistent_batch != running.begun
    if begins:
        first_ones = kept.positions == slots.prompt_len.take(kept.slots)
        totals.prompt_tokens += int(kept.positions[first_ones].sum()) if first_ones.any() else 0
        running.begun = schedule.persistent_batch
    ids, ended = kept.ids.tolist(), _ended(slots, kept)
    if (held := slots.has_grammar.take(kept.slots)).any():
        ended |= _refused(slots, kept, held, ended)
    delta = Delta(
        ids=ids,
        tokens=kept.tokens.tolist(),
        finished={ids[j]: finish for j, finish in ended.items()} | corrupted,
        logprobs=kept.of(result.logprobs),
        digests=_digests(result, kept.places),
        prompt_logprobs=_prompt_logprobs(running, schedule, result, live) if begins and result.hidden is None else {},
        started=schedule.started,
    )
    if result.hidden is not None:  # nothing was drawn
        delta.ids, delta.tokens, delta.pooled = [], [], _pooled(running, schedule, result, live)
    if ended and drafting is not None:
        drafting.ended(slots, kept.slots[list(ended)].tolist())
    if ended:
        running.stop(kept.slots[list(ended)].tolist())
    return delta


def _plain(running: RunningSequences, schedule: Schedule, result: StepResult) -> Delta | None:
    """Write a token of each row, and return the outcome of a step that changed nothing else.

    None, with nothing written: more may have changed.
    """
    plain = schedule.plain
    if plain is None or plain.changes != running.changes or schedule.persistent_batch != running.begun:
        return None
    tokens = result.tokens.tolist()
    if min(tokens) < 0 or not plain.stop_ids.isdisjoint(tokens):
        return None
    running.slots.tokens[schedule.slots, schedule.ends] = result.tokens
    return Delta(
        ids=schedule.ids.tolist(),
        tokens=tokens,
        logprobs=result.logprobs,
        digests=_digests(result),
        started=schedule.started,
    )


def _digests(result: StepResult, places: np.ndarray | None = None) -> bytes:
    """Return the digests of the tokens at ``places``, None: of all tokens."""
    if result.digests is None:
        return b""
    digests = result.digests if places is None else result.digests[places]
    return digests.astype("<i8", copy=False).tobytes()


def _corrupted(schedule: Schedule, result: StepResult, live: np.ndarray, kept: _Tokens) -> np.ndarray:
    """Return the running rows [n] with numbers that are not finite.

    The number is the logits of a kept token, a prompt's log-probability, or a hidden state.
    """
    bad = [row for row, states in (result.hidden or {}).items() if not np.isfinite(states).all()]
    if not result.prompt_logprobs and not bad and kept.tokens.min(initial=0) >= 0:
        return _NO_ROWS
    ended = set(kept.ids[kept.tokens < 0].tolist())
    found = np.array([id in ended for id in schedule.ids.tolist()], bool)
    for row, entries in result.prompt_logprobs.items():
        found[row] |= any(math.isnan(entry.logprob) for entry in entries)
    found[bad] = True
    rows: np.ndarray = (found & live).nonzero()[0]
    return rows


def _end_corrupted(running: RunningSequences, schedule: Schedule, rows: np.ndarray) -> dict[int, Finish]:
    """End the sequences of ``rows`` and free their slots and blocks.

    The error names their adapter.
    """
    finished = {}
    for row in rows.tolist():
        slot = int(schedule.slots[row])
        request = running.sequence(slot).request
        blamed = f"the adapter {request.lora_name!r}" if request.lora_name else "the model, without an adapter,"
        error = NotFinite(
            f"{blamed} gives numbers that are not finite for this request: some of its values are beyond the range of "
            "its dtype"
        )
        finished[request.id] = Finish("error", error=WireError.of(error))
        running.stop([slot])
    return finished


def fail(running: RunningSequences, schedule: Schedule, error: Exception, rows: np.ndarray | None = None) -> Delta:
    """End the sequences of a failed step, or of its ``rows``.

    They end with an error and free their slots and blocks.
    """
    live = _live(running, schedule)
    if rows is not None:
        live &= np.isin(np.arange(schedule.rows), rows)
    running.stop(schedule.slots[live].tolist())
    finish = Finish("error", error=WireError.of(error))
    return Delta(finished=dict.fromkeys(schedule.ids[live].tolist(), finish), started=schedule.started)


def lose_cache(running: RunningSequences, error: Exception) -> Delta:
    """End all running sequences with an error, and empty the prefix cache."""
    ids = running.ids[running.order].tolist()
    running.stop(running.order.tolist())
    running.pool.forget_contents()
    return Delta(finished=dict.fromkeys(ids, Finish("error", error=WireError.of(error))))


def _live(running: RunningSequences, schedule: Schedule) -> np.ndarray:
    """Return whether each row's sequence still runs, bool [rows].

    A freed or reused slot has another id.
    """
    live: np.ndarray = running.ids.take(schedule.slots) == schedule.ids
    return live


def _kept_tokens(slots: Slots, schedule: Schedule, result: StepResult, live: np.ndarray) -> tuple[_Tokens, np.ndarray]:
    """Return the kept tokens, and the end of each row.

    Kept tokens become part of their sequences. Ends are int [rows]. A row's end lies behind its tokens with valid keys
    and values in the cache.
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
    kept, ends = np.bincount(rows[places], minlength=schedule.rows), schedule.ends.copy()
    drafted = (schedule.num_sampled > 1) & live
    ends[drafted] = (schedule.first + kept)[drafted]
    return _take(schedule, result, rows, positions, places), ends


def _take(
    schedule: Schedule, result: StepResult, rows: np.ndarray, positions: np.ndarray, places: np.ndarray
) -> _Tokens:
    chosen = rows[places]
    return _Tokens(schedule.slots[chosen], positions[places], schedule.ids[chosen], result.tokens[places], places)


def _wrong_drafts(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """Return where the draft differs from the sampled token, bool.

    Meaningless at a row's last token, without draft.
    """
    wrong: np.ndarray = slots.tokens[sampled.slots, sampled.positions] != sampled.tokens
    return wrong


def _up_to_first(last: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the entries of each row up to its first ``last`` one.

    The result is bool and includes the first one; ``rows`` is sorted.
    """
    before = last.cumsum() - last  # in this row and all rows before it
    kept: np.ndarray = before == before[np.searchsorted(rows, rows)]
    return kept


def _roll_back(slots: Slots, schedule: Schedule, live: np.ndarray, ends: np.ndarray) -> None:
    """Set the lengths of the rows with drafts to their ``ends``.

    Ends lie behind the tokens that are kept. Rejected drafts stay in the slot and the cache, beyond both lengths: they
    are overwritten before being read.
    """
    drafted = ((schedule.num_sampled > 1) & live).nonzero()[0]
    slots.cached_len[schedule.slots[drafted]] = ends[drafted]
    slots.device_len[schedule.slots[drafted]] = ends[drafted] + 1


def _count_drafts(
    schedule: Schedule, live: np.ndarray, ends: np.ndarray, totals: Stats, drafting: Drafting | None
) -> None:
    """Count the drafts and the accepted drafts of rows that still run."""
    rows = ((schedule.num_sampled > 1) & live).nonzero()[0]
    drafted, accepted = schedule.num_sampled[rows] - 1, (ends - schedule.first)[rows] - 1
    totals.drafts += len(rows)
    totals.draft_tokens += int(drafted.sum())
    totals.accepted_tokens += int(accepted.sum())
    counts = totals.accepted_per_pos
    counts += [0] * (int(drafted.max(initial=0)) - len(counts))
    for place in range(int(accepted.max(initial=0))):
        counts[place] += int((accepted > place).sum())
    if drafting is not None:
        drafting.learn(drafted, accepted)


def _publish(
    running: RunningSequences, prefix: PrefixCache, schedule: Schedule, ends: np.ndarray, live: np.ndarray
) -> None:
    """Publish the blocks that the step filled with known tokens."""
    slots, size = running.slots, running.slots.block_size
    if schedule.num_decode == schedule.rows and (ends % size).all():
        return
    first, last = schedule.first // size, ends // size
    for row in ((last > first) & live).nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        tokens, tables = slots.tokens[slot], slots.tables[slot]
        prefix.publish(running.sequence(slot), tokens, tables, int(first[row]), int(last[row]))


def _stops(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """Return which tokens are stop ids of their sequence, from ``min_tokens`` on, bool."""
    stop: np.ndarray = (slots.stop_ids.take(sampled.slots, axis=1) == sampled.tokens).any(0)
    if slots.many_stop_ids:
        for j in slots.has_many_stop_ids[sampled.slots].nonzero()[0].tolist():
            stop[j] |= int(sampled.tokens[j]) in slots.many_stop_ids[int(sampled.slots[j])]
    if stop.any():
        stop &= sampled.positions >= slots.min_len[sampled.slots]
    return stop


def _at_max_len(slots: Slots, sampled: _Tokens) -> np.ndarray:
    """Return where a token brings its sequence to its maximum length, bool."""
    at_end: np.ndarray = sampled.positions + 1 >= slots.max_len.take(sampled.slots)
    return at_end


def _ended(slots: Slots, kept: _Tokens) -> dict[int, Finish]:
    """Return the indices in ``kept`` at which a sequence ends.

    A stop id takes precedence over the length.
    """
    stop, ended = _stops(slots, kept), {}
    for j in (stop | _at_max_len(slots, kept)).nonzero()[0].tolist():
        ended[j] = Finish("stop", stop_id=int(kept.tokens[j])) if stop[j] else Finish("length")
    return ended


def _refused(slots: Slots, kept: _Tokens, held: np.ndarray, ended: dict[int, Finish]) -> dict[int, Finish]:
    """Advance the grammars of the rows ``held`` to one by their tokens.

    Returns the indices of refused tokens. A stop token is no text and does not advance its grammar.
    """
    found = {}
    for j in held.nonzero()[0].tolist():
        grammar, wrong = slots.grammars.get(int(kept.slots[j])), "the state of its grammar was lost"
        if grammar is not None and j in ended and ended[j].reason == "stop":
            continue
        if grammar is not None:
            wrong = grammar.accept(int(kept.tokens[j]))
        if wrong:
            found[j] = Finish("error", error=WireError.of(GrammarFailed(wrong, param="structured_outputs")))
    return found


def _pooled(running: RunningSequences, schedule: Schedule, result: StepResult, live: np.ndarray) -> dict[int, bytes]:
    """Add each row's hidden states to its sequence's pool.

    Returns the results of ended sequences, by request id.
    """
    done, summed = {}, result.summed or {}
    for row, states in (result.hidden or {}).items():
        if not live[row]:
            continue
        sequence = running.sequence(int(schedule.slots[row]))
        pooled = sequence.pool(states, summed.get(row))
        if schedule.num_sampled[row]:
            done[sequence.request.id] = pooled.result()
    return done


def _prompt_logprobs(
    running: RunningSequences, schedule: Schedule, result: StepResult, live: np.ndarray
) -> dict[int, list[TokenLogprobs | None]]:
    """Add each chunk's entries to its sequence.

    Returns the lists of fully computed prompts, by request id.
    """
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
