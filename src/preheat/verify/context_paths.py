"""The paths that must give the same logits.

Each is a function, for the rows of :mod:`preheat.verify.boot`. Each takes a context, int32 tokens, and yields the
logits after its last token, fp32 [vocab], once for each way of computing them by the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from preheat.errors import CheckFailed
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.item import NothingToRun
from preheat.verify.check_runner import CheckRunner, Row
from preheat.warmup.dummy_batch import rows_of

Ways = Generator[Tensor, None, None]
"""Logits, each computed in its own way.

Slots are taken until the generator ends or is closed.
"""

ContextPath = Callable[[CheckRunner, np.ndarray], Ways]

RAGGED = (37, 1, 101, 5, 260)
"""The lengths of a context's chunks, repeated as needed."""

DECODED = 3
"""Tokens at the end of a context that are computed one by one."""

BESIDE = (Row(9, 1), Row(0, 17), Row(0, 3))
"""Other rows of a step: one decodes, two prefill."""


POISONED = Row(5, 1)
"""Another row of a step, with NaN as its cached keys and values."""


def alone(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute the whole context in one step of its own.

    All other paths are compared with it.
    """
    with runner.sequence(tokens) as slot:
        yield runner.step(slot)


def eager(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute the whole context alone, operation by operation."""
    before, runner.eager = runner.eager, True
    try:
        yield from alone(runner, tokens)
    finally:
        runner.eager = before


def beside(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in front of and behind other rows.

    They prefill and, where steps mix, decode.
    """
    mixes = runner.plan.policy.mixed_steps
    rows = [row for row in BESIDE if mixes or row.lacking > 1]
    while rows and not runner.bucket_of([Row(0, len(tokens)), *rows]):
        rows.pop()
    for first in (True, False) if rows else ():
        with runner.neighbours(rows) as others, runner.sequence(tokens) as slot:
            yield runner.step(slot, behind=others) if first else runner.step(slot, before=others)


def next_bucket(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute the context, then its last token, in the next bucket.

    There are just enough other rows to need the bucket.
    """
    for last in _lacking(runner, tokens):
        row = Row(len(tokens) - last, last)
        usual = runner.bucket_of([row])
        rows = next((rows for rows in _more_and_more(row, runner) if runner.bucket_of([row, *rows]) != usual), None)
        if rows is not None:
            with _all_but(runner, tokens, last) as slot, runner.neighbours(rows) as others:
                yield runner.step(slot, behind=others)


def _lacking(runner: CheckRunner, tokens: np.ndarray) -> tuple[int, ...]:
    """Return how many tokens a step computes: all of them, or the last one; an encoder computes all."""
    return (len(tokens),) if runner.encodes else (len(tokens), 1)


def _more_and_more(row: Row, runner: CheckRunner) -> Iterator[list[Row]]:
    """Yield more and more rows of the same phase as ``row``.

    They are twice as many or as long each time, while there is a bucket for them.
    """
    size = 1
    rows = [Row(5, 1)] if row.lacking == 1 else [Row(0, 2)]
    while runner.bucket_of([row, *rows]):
        yield rows
        size *= 2
        rows = [Row(5, 1)] * size if row.lacking == 1 else [Row(0, size + 1)]


def every_bucket(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in every bucket of the plan that holds it.

    The whole context is computed, and its last token alone.
    """
    for bucket in runner.plan.dispatcher.buckets:
        for last in _lacking(runner, tokens):
            row = Row(len(tokens) - last, last)
            rows = _filling(runner, bucket, row)
            if runner.bucket_of([row, *rows]) == bucket:
                with _all_but(runner, tokens, last) as slot, runner.neighbours(rows) as others:
                    yield runner.step(slot, behind=others)


def _filling(runner: CheckRunner, bucket: Bucket, row: Row) -> list[Row]:
    """Return the rows with which ``row`` needs ``bucket``, if any."""
    size = runner.plan.dispatcher.example(bucket)
    rows, tokens = size.rows - 1, size.tokens - row.lacking
    blocks = max(size.blocks - -(-sum(row) // runner.slots.block_size), 0)
    if not 0 < rows <= tokens:
        return []
    others = rows_of(StepSize(size.phase, rows, tokens, min(size.longest, tokens), blocks), runner.plan.limits)
    return [Row(other.cached, other.extend) for other in others if other.extend > 0]


def chunks(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in ragged chunks, and in two halves."""
    for sizes in (RAGGED, (-(-len(tokens) // 2),)):
        with runner.sequence(tokens) as slot:
            left, sizes_again = len(tokens), itertools.cycle(sizes)
            while left > (size := next(sizes_again)):
                runner.read(slot, size)
                left -= size
            yield runner.step(slot)


def prefix_hit(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Share the first block, then all full blocks, with another sequence."""
    size = runner.slots.block_size
    most = (len(tokens) - 1) // size * size
    if not most or runner.slots.num_free < 2:
        return
    with runner.sequence(tokens, ends=sorted({size, most})) as first:
        runner.step(first)
        for cached in sorted({size, most}):
            with runner.sequence(tokens, cached=cached, of=first) as slot:
                yield runner.step(slot)


def offloaded(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Bring all full blocks back from the host into blocks with other contents."""
    count = (len(tokens) - 1) // runner.slots.block_size
    if not count or runner.slots.num_free < 2:
        return
    with runner.sequence(tokens) as first:
        runner.step(first)
        with runner.sequence(tokens) as slot:
            runner.restore(slot, first, count)
            yield runner.step(slot)


def decode(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute the last tokens one by one, alone and beside other decoding rows."""
    rows = [Row(cached, 1) for cached in (5, 33, 0)]
    while rows and not runner.bucket_of([Row(len(tokens) - 1, 1), *rows]):
        rows.pop()
    for neighbours in [[], rows] if rows else [[]]:
        with _all_but(runner, tokens, DECODED) as slot:
            for known in range(int(runner.slots.cached_len[slot]) + 1, len(tokens) + 1):
                runner.lengthen(slot, known)
                with runner.neighbours(neighbours) as others:
                    logits = runner.step(slot, before=others)
            yield logits


def poisoned(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it on blocks that hold NaN.

    Another request may have left such numbers. It runs as a whole and with its last token alone; then its last token
    runs beside a row that reads NaN.
    """
    with runner.poisoned(tokens) as slot:
        yield runner.step(slot)
    if runner.encodes:
        return
    with runner.poisoned(tokens) as slot:
        if len(tokens) > 1:
            runner.lengthen(slot, len(tokens) - 1)
            runner.step(slot)
        runner.lengthen(slot, len(tokens))
        yield runner.step(slot)
    if runner.slots.num_free > 1 and runner.bucket_of([Row(len(tokens) - 1, 1), POISONED]):
        with (
            _all_but(runner, tokens, 1) as slot,
            runner.poisoned(tokens[:1].repeat(sum(POISONED)), POISONED.cached) as other,
        ):
            yield runner.step(slot, before=[other])
            runner.slots.cached_len[other] = POISONED.cached
            if runner.executor.decoder.spec.head is not None and runner.draw(other) >= 0:
                raise CheckFailed("poisoned: a row that reads NaN draws a token as if its logits were finite")


def resumed(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Preempt it after its last tokens were generated.

    All blocks are lost; prompt and output are computed again.
    """
    with runner.sequence(tokens, prompt=max(len(tokens) - DECODED, 1)) as slot:
        yield runner.step(slot)


def fp8_cache(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in two steps, with cuts at several positions.

    It is cut behind its first token, at a block's end, in the middle and before its last token. The second step reads
    the rounded keys and values of the first one from the cache. It must see its own keys and values rounded too.
    """
    length, block = len(tokens), runner.slots.block_size
    for cut in sorted({1, min(block, length - 1), length // 2, length - 1} - {0}):
        if runner.bucket_of([Row(0, cut)]) and runner.bucket_of([Row(cut, length - cut)]):
            yield from in_steps(runner, tokens, [cut])


def large_steps(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in as few steps as hold it.

    The long context is compared with this.
    """
    size = len(tokens)
    while size > 1 and not runner.bucket_of([Row(len(tokens) - size, size)]):
        size //= 2
    yield from in_steps(runner, tokens, [size] * (-(-len(tokens) // size) - 1))


def long_context(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in steps that end beside the thirds.

    Its last token has a step of its own. Steps see one, two and three KV splits.
    """
    third = len(tokens) // 3
    sizes = [third - 7, third, len(tokens) - 2 * third + 6]
    if not all(runner.bucket_of([Row(len(tokens) - size, size)]) for size in sizes):
        raise NothingToRun("no step holds a third of the context")
    yield from in_steps(runner, tokens, sizes)


def in_steps(runner: CheckRunner, tokens: np.ndarray, sizes: Sequence[int]) -> Ways:
    """Compute it in steps of ``sizes`` and one more for the rest."""
    with runner.sequence(tokens) as slot:
        for size in sizes:
            runner.read(slot, size)
        yield runner.step(slot)


def full_step(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it behind rows that prefill, in the largest step that they can fill.

    A linear layer may compute its rows in parts; this step has more rows than one part.
    """
    row = Row(0, len(tokens))
    buckets = [bucket for bucket in runner.plan.dispatcher.buckets if bucket.phase != "decode"]
    for bucket in sorted(buckets, key=lambda bucket: bucket.tokens, reverse=True):
        rows = _filling(runner, bucket, row)
        if runner.bucket_of([row, *rows]) == bucket:
            with runner.neighbours(rows) as others, runner.sequence(tokens) as slot:
                yield runner.step(slot, before=others)
            return


def compaction(runner: CheckRunner, tokens: np.ndarray, *, every: bool = False) -> Ways:
    """Compute the last token again after swaps of the blocks, one of each of :meth:`CheckRunner.swap_sizes`."""
    with _all_but(runner, tokens, 1) as slot:
        sizes = runner.swap_sizes(slot, every=every)
        for size in sizes if not runner.has_states else ():
            runner.move(slot, size)
            yield runner.step(slot)
            runner.slots.cached_len[slot] -= 1
    for size in sizes if runner.has_states else ():  # a state never goes back to an earlier token
        with _all_but(runner, tokens, 1) as slot:
            runner.move(slot, size)
            yield runner.step(slot)


def states(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute it in slots whose states are NaN, as a whole and in small chunks, beside another row.

    Another sequence may have left any state in a slot. The chunks end beside each place where a convolution's inputs
    come from its window.
    """
    for sizes in ((len(tokens),), (1, 2, 3, 64)):
        runner.fill_states(float("nan"))
        with runner.sequence(tokens) as slot, runner.neighbours([Row(0, 3)]) as others:
            left, again = len(tokens), itertools.cycle(sizes)
            while left > (size := next(again)):
                runner.read(slot, size)
                left -= size
            fits = runner.bucket_of([Row(len(tokens) - left, left), Row(0, 3)])
            yield runner.step(slot, behind=others if fits else ())
    runner.fill_states(0.0)


def drafts(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """Compute its last tokens as drafts.

    They are right drafts, alone and behind decoding rows, then wrong drafts that are computed over. Where every bucket
    is tried, the right drafts run in each bucket with drafts.
    """
    count = min(runner.most_drafts, len(tokens) - 1)
    rows = [Row(cached, 1) for cached in (5, 33, 0)]
    while rows and (runner.plan.most_drafts(1 + len(rows)) < count or len(rows) >= runner.slots.num_free):
        rows.pop()
    for neighbours in [[], rows] if rows else [[]]:
        with _all_but(runner, tokens, count + 1) as slot, runner.neighbours(neighbours) as others:
            yield runner.verify(slot, others)[-1]
    every = runner.plan.dispatcher.phases["verify"].buckets if "every bucket" in runner.plan.checks else ()
    for bucket in (each for each in every if each.longest <= min(len(tokens), 1 + runner.most_drafts)):
        beside_it = runner.neighbours([Row(5, 1)] * (bucket.rows - 1))
        with _all_but(runner, tokens, bucket.longest) as slot, beside_it as others:
            yield runner.verify(slot, others)[-1]
    last = len(tokens) - count
    with _all_but(runner, tokens, count + 1) as slot:
        runner.write(slot, last, (tokens[last:] + 1) % runner.vocab_size)
        runner.verify(slot)
        runner.write(slot, last, tokens[last:])
        yield runner.step(slot)


@contextmanager
def _all_but(runner: CheckRunner, tokens: np.ndarray, last: int) -> Iterator[int]:
    """Yield a sequence that lacks its ``last`` tokens."""
    with runner.sequence(tokens) as slot:
        if len(tokens) > last:
            runner.lengthen(slot, len(tokens) - last)
            runner.step(slot)
        runner.lengthen(slot, len(tokens))
        yield slot
