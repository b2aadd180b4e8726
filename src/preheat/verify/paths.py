"""The paths that must give the same logits: one function for each check of :mod:`preheat.verify.names`.

Each takes a context, int32 tokens, and yields the logits after its last token, fp32 [vocab], once for each way in which
the path can compute them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
from torch import Tensor

from preheat.plan.buckets import Bucket, StepSize
from preheat.verify.check_runner import CheckRunner, Row
from preheat.warmup.dummy_batch import rows_of

Ways = Generator[Tensor, None, None]
"""Logits, each computed in its own way. Slots are taken until the generator ends or is closed."""

Path = Callable[[CheckRunner, np.ndarray], Ways]

RAGGED = (37, 1, 101, 5, 260)
"""The lengths of the chunks that a context is cut into, repeated as needed."""

DECODED = 3
"""Tokens at the end of a context that are computed one by one."""

BESIDE = (Row(9, 1), Row(0, 17), Row(0, 3))
"""Neighbours in a step: one decodes, two prefill."""


def alone(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context in one step of its own; all other paths are compared with it."""
    with runner.sequence(tokens) as slot:
        yield runner.step(slot)


def eager(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The same, operation by operation."""
    before, runner.eager = runner.eager, True
    try:
        yield from alone(runner, tokens)
    finally:
        runner.eager = before


def beside(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """In front of and behind neighbours that prefill and, where steps mix, decode."""
    mixes = runner.plan.policy.mixed_steps
    rows = [row for row in BESIDE if mixes or row.lacking > 1]
    while rows and not runner.bucket_of([Row(0, len(tokens)), *rows]):
        rows.pop()
    for first in (True, False) if rows else ():
        with runner.neighbours(rows) as others, runner.sequence(tokens) as slot:
            yield runner.step(slot, behind=others) if first else runner.step(slot, before=others)


def next_bucket(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context, then its last token, in the next bucket, with just enough neighbours to need it."""
    for last in (len(tokens), 1):
        row = Row(len(tokens) - last, last)
        usual = runner.bucket_of([row])
        rows = next((rows for rows in _more_and_more(row, runner) if runner.bucket_of([row, *rows]) != usual), None)
        if rows is not None:
            with _all_but(runner, tokens, last) as slot, runner.neighbours(rows) as others:
                yield runner.step(slot, behind=others)


def _more_and_more(row: Row, runner: CheckRunner) -> Iterator[list[Row]]:
    """Neighbours of the same phase as ``row``, twice as many or as long each time, while there is a bucket for them."""
    size = 1
    rows = [Row(5, 1)] if row.lacking == 1 else [Row(0, 2)]
    while runner.bucket_of([row, *rows]):
        yield rows
        size *= 2
        rows = [Row(5, 1)] * size if row.lacking == 1 else [Row(0, size + 1)]


def every_bucket(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context, and its last token, in every bucket of the plan that can hold them."""
    for bucket in runner.plan.dispatcher.buckets:
        for last in (len(tokens), 1):
            row = Row(len(tokens) - last, last)
            rows = _filling(runner, bucket, row)
            if runner.bucket_of([row, *rows]) == bucket:
                with _all_but(runner, tokens, last) as slot, runner.neighbours(rows) as others:
                    yield runner.step(slot, behind=others)


def _filling(runner: CheckRunner, bucket: Bucket, row: Row) -> list[Row]:
    """Neighbours with which a step with ``row`` needs ``bucket``, if there are any."""
    size = runner.plan.dispatcher.example(bucket)
    rows, tokens = size.rows - 1, size.tokens - row.lacking
    blocks = max(size.blocks - -(-sum(row) // runner.slots.block_size), 0)
    if not 0 < rows <= tokens:
        return []
    others = rows_of(StepSize(size.phase, rows, tokens, min(size.longest, tokens), blocks), runner.plan.limits)
    return [Row(cached, extend) for cached, extend, _ in others if extend > 0]


def chunks(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """In ragged chunks, and in two halves."""
    for sizes in (RAGGED, (-(-len(tokens) // 2),)):
        with runner.sequence(tokens) as slot:
            left, sizes_again = len(tokens), itertools.cycle(sizes)
            while left > (size := next(sizes_again)):
                runner.read(slot, size)
                left -= size
            yield runner.step(slot)


def prefix_hit(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """With the first block, then all full blocks, shared with another sequence."""
    size = runner.slots.block_size
    most = (len(tokens) - 1) // size * size
    if not most or runner.slots.num_free < 2:
        return
    with runner.sequence(tokens) as first:
        runner.step(first)
        for cached in sorted({size, most}):
            with runner.sequence(tokens, cached=cached, of=first) as slot:
                yield runner.step(slot)


def decode(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The last tokens one by one, alone and beside others that decode."""
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


def compaction(runner: CheckRunner, tokens: np.ndarray) -> Ways:
    """The last token, after the blocks were swapped with others."""
    with _all_but(runner, tokens, 1) as slot:
        runner.move(slot)
        yield runner.step(slot)


@contextmanager
def _all_but(runner: CheckRunner, tokens: np.ndarray, last: int) -> Iterator[int]:
    """A sequence that lacks its ``last`` tokens."""
    with runner.sequence(tokens) as slot:
        if len(tokens) > last:
            runner.lengthen(slot, len(tokens) - last)
            runner.step(slot)
        runner.lengthen(slot, len(tokens))
        yield slot


PATHS: Mapping[str, Path] = MappingProxyType(
    {
        "later run": alone,
        "co-batched": beside,
        "next bucket": next_bucket,
        "every bucket": every_bucket,
        "chunked": chunks,
        "prefix hit": prefix_hit,
        "decode": decode,
        "compaction": compaction,
        "eager": eager,
    }
)
