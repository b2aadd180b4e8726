"""The paths by which the same logits can be come at: one function for each check of :mod:`preheat.verify.names`.

Each is given a lab and a context, int32 tokens, and yields the logits after its last token, fp32 [vocab], as often as
it has ways to come at them.
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
"""Logits, each come at in its own way. Between two of them rows hold slots, until all are there or it is closed."""

Path = Callable[[CheckRunner, np.ndarray], Ways]

RAGGED = (37, 1, 101, 5, 260)
"""Tokens of the chunks that a context is cut into, over and over."""

DECODED = 3
"""Tokens at the end of a context that are computed one by one."""

BESIDE = (Row(9, 1), Row(0, 17), Row(0, 3))
"""Neighbours: one decodes, two prefill."""


def alone(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context in one step of its own: what all other paths are compared with."""
    with lab.sequence(tokens) as slot:
        yield lab.step(slot)


def eager(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """The same, operation by operation."""
    before, lab.eager = lab.eager, True
    try:
        yield from alone(lab, tokens)
    finally:
        lab.eager = before


def beside(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """Before and behind others that prefill and, where steps mix, decode."""
    mixes = lab.plan.policy.mixed_steps
    rows = [row for row in BESIDE if mixes or row.lacking > 1]
    while rows and not lab.shape_of([Row(0, len(tokens)), *rows]):
        rows.pop()
    for first in (True, False) if rows else ():
        with lab.neighbours(rows) as others, lab.sequence(tokens) as slot:
            yield lab.step(slot, behind=others) if first else lab.step(slot, before=others)


def next_bucket(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context, then its last token, in the next shape, which neighbours just make necessary."""
    for last in (len(tokens), 1):
        row = Row(len(tokens) - last, last)
        usual = lab.shape_of([row])
        rows = next((rows for rows in _more_and_more(row, lab) if lab.shape_of([row, *rows]) != usual), None)
        if rows is not None:
            with _all_but(lab, tokens, last) as slot, lab.neighbours(rows) as others:
                yield lab.step(slot, behind=others)


def _more_and_more(row: Row, lab: CheckRunner) -> Iterator[list[Row]]:
    """Neighbours of the same phase as ``row``, twice as many or as long each time, while there are shapes for them."""
    size = 1
    rows = [Row(5, 1)] if row.lacking == 1 else [Row(0, 2)]
    while lab.shape_of([row, *rows]):
        yield rows
        size *= 2
        rows = [Row(5, 1)] * size if row.lacking == 1 else [Row(0, size + 1)]


def every_bucket(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """The whole context, and its last token, in every shape of the plan that can hold them."""
    for shape in lab.plan.dispatcher.buckets:
        for last in (len(tokens), 1):
            row = Row(len(tokens) - last, last)
            rows = _filling(lab, shape, row)
            if lab.shape_of([row, *rows]) == shape:
                with _all_but(lab, tokens, last) as slot, lab.neighbours(rows) as others:
                    yield lab.step(slot, behind=others)


def _filling(lab: CheckRunner, shape: Bucket, row: Row) -> list[Row]:
    """Neighbours that make a step with ``row`` need ``shape``, where there are any."""
    need = lab.plan.dispatcher.example(shape)
    rows, tokens = need.rows - 1, need.tokens - row.lacking
    blocks = max(need.blocks - -(-sum(row) // lab.slots.block_size), 0)
    if not 0 < rows <= tokens:
        return []
    others = rows_of(StepSize(need.phase, rows, tokens, min(need.longest, tokens), blocks), lab.plan.limits)
    return [Row(cached, extend) for cached, extend, _ in others if extend > 0]


def chunks(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """In ragged chunks, and in two halves."""
    for sizes in (RAGGED, (-(-len(tokens) // 2),)):
        with lab.sequence(tokens) as slot:
            left, sizes_again = len(tokens), itertools.cycle(sizes)
            while left > (size := next(sizes_again)):
                lab.read(slot, size)
                left -= size
            yield lab.step(slot)


def prefix_hit(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """With its first block, and with all of its full blocks, from another sequence."""
    size = lab.slots.block_size
    most = (len(tokens) - 1) // size * size
    if not most or lab.slots.num_free < 2:
        return
    with lab.sequence(tokens) as first:
        lab.step(first)
        for cached in sorted({size, most}):
            with lab.sequence(tokens, cached=cached, of=first) as slot:
                yield lab.step(slot)


def decode(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """Its last tokens one by one, alone and beside others that decode."""
    rows = [Row(cached, 1) for cached in (5, 33, 0)]
    while rows and not lab.shape_of([Row(len(tokens) - 1, 1), *rows]):
        rows.pop()
    for neighbours in [[], rows] if rows else [[]]:
        with _all_but(lab, tokens, DECODED) as slot:
            for known in range(int(lab.slots.cached_len[slot]) + 1, len(tokens) + 1):
                lab.lengthen(slot, known)
                with lab.neighbours(neighbours) as others:
                    logits = lab.step(slot, before=others)
            yield logits


def compaction(lab: CheckRunner, tokens: np.ndarray) -> Ways:
    """Its last token, after its blocks changed places with others."""
    with _all_but(lab, tokens, 1) as slot:
        lab.move(slot)
        yield lab.step(slot)


@contextmanager
def _all_but(lab: CheckRunner, tokens: np.ndarray, last: int) -> Iterator[int]:
    """A sequence that lacks its ``last`` tokens."""
    with lab.sequence(tokens) as slot:
        if len(tokens) > last:
            lab.lengthen(slot, len(tokens) - last)
            lab.step(slot)
        lab.lengthen(slot, len(tokens))
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
