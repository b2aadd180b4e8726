"""The reference sampler, on the host: logits in, one token a row out.

Contract. The order is penalties, logit_bias, min_tokens, temperature, min_p, top_k, top_p, then Gumbel-max: the token
with the greatest ``noise - deficit`` wins, which draws it with its probability. A row without temperature takes its
best token. Ties go to the lowest id everywhere. NaN counts as impossible, +inf as the greatest finite number, and a row
in which nothing is possible yields its lowest id that is not banned.

A row's token depends on its own logits, settings, history and key alone: rounding operations are element-wise, sums are
of integers (:mod:`preheat.ops.top_k_top_p`) and the noise is keyed (:mod:`preheat.ops.philox`). The arithmetic runs in
numpy, on one thread: its sort, partition and argmax are many times as fast as torch's on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from preheat.core import Level
from preheat.ops.order import mend, row_chunks
from preheat.ops.philox import MAX_SPREAD, gumbel_at, gumbel_rows
from preheat.ops.sampling import Edits, Penalties, SamplingInput
from preheat.ops.top_k_top_p import KeptTokens, SamplingMetadata, deficits, furthest, keep_ordered

_NO_OWNER = -1
_GROUP = 4  # tokens whose noise comes from one Philox block


class TokenCounts:
    """How often each token occurs in the output of each slot's sequence, and which occur in it at all.

    Only slots with penalties are kept; memory is zero until touched. Counts follow the sequence's tokens, so that a
    preempted and resumed one, or one that takes over a slot, ends with what its tokens say.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.output = np.zeros((num_slots, vocab_size), np.int32)
        self.seen = np.zeros((num_slots, vocab_size), bool)  # in prompt or output
        self._owner = np.full(num_slots, _NO_OWNER, np.int64)
        self._length = np.zeros(num_slots, np.int64)

    def reset(self, slot: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Forget ``slot`` and count this prompt and output instead."""
        self.output[slot] = 0
        self.seen[slot] = False
        self.seen[slot, prompt_ids] = True
        self.add(np.full(len(output_ids), slot), output_ids)

    def add(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Count output token ``tokens[i]`` of slot ``slots[i]``; both [n], repeats allowed."""
        np.add.at(self.output, (slots, tokens), 1)
        self.seen[slots, tokens] = True

    def forget(self) -> None:
        """Be as new."""
        slots = self._owner != _NO_OWNER
        self.output[slots] = self.seen[slots] = 0
        self._owner[slots], self._length[slots] = _NO_OWNER, 0

    def follow(self, rows: Penalties) -> None:
        """Bring the counts of these rows up to their tokens: what is new is added, another owner's is replaced."""
        lengths = np.array([len(tokens) for tokens in rows.tokens], np.int64)
        known = (self._owner[rows.slots] == rows.owner) & (self._length[rows.slots] <= lengths)
        for i in np.flatnonzero(~known):
            prompt, output = np.split(rows.tokens[i], [rows.prompt_len[i]])
            self.reset(int(rows.slots[i]), prompt, output)
        fresh = np.where(known, lengths - self._length[rows.slots], 0)
        tails = [tokens[len(tokens) - count :] for tokens, count in zip(rows.tokens, fresh.tolist(), strict=True)]
        self.add(np.repeat(rows.slots, fresh), np.concatenate(tails))
        self._owner[rows.slots], self._length[rows.slots] = rows.owner, lengths


class HostSampler:
    """Draws tokens for the sequences in ``num_slots`` slots. Its one state is the penalties' token counts."""

    def __init__(self, num_slots: int, vocab_size: int, handle_topk_duplicates: bool = False) -> None:
        self.counts = TokenCounts(num_slots, vocab_size)
        self.handle_topk_duplicates = handle_topk_duplicates

    def forget(self) -> None:
        """Be as new."""
        self.counts.forget()

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # of what is impossible or as good as
    def sample(self, logits: Tensor, batch: SamplingInput) -> Tensor:
        """One token a row, int64 [rows], from ``logits`` float32 [rows, vocab] on the host, which are left alone."""
        if logits.dtype != torch.float32 or len(logits) != batch.size:
            raise ValueError(f"expected float32 logits of {batch.size} rows, got {logits.dtype} {tuple(logits.shape)}")
        values = logits.numpy()
        if batch.level is Level.FULL:
            values = values.copy()
        if batch.penalties:
            self._penalise(values, batch.penalties)
        if batch.edits:
            _edit(values, batch.edits)
        tokens = values.argmax(axis=-1)
        peak = values[np.arange(batch.size), tokens]
        if not np.isfinite(peak).all():
            values = values if batch.level is Level.FULL else values.copy()
            _repair(values, tokens, peak, batch.edits)
        if batch.random:
            tokens[batch.random.rows] = self._draw(values, peak, batch.random)
        return torch.from_numpy(tokens)

    def _penalise(self, logits: np.ndarray, rows: Penalties) -> None:
        """repetition_penalty on every token seen, then frequency and presence on those of the output."""
        counts = self.counts
        counts.follow(rows)
        seen = np.flatnonzero(counts.seen[rows.slots])
        i, ids = np.divmod(seen, logits.shape[1])
        value, repetition = logits[rows.rows[i], ids], rows.repetition[i]
        value = np.where(value > 0, value / repetition, value * repetition)
        count = counts.output[rows.slots[i], ids]
        value -= rows.frequency[i] * count.astype(np.float32)
        value -= rows.presence[i] * (count > 0)
        logits[rows.rows[i], ids] = value

    def _draw(self, logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata) -> np.ndarray:
        """Tokens of the rows that draw at random, in ``how``'s order; ``peak`` [rows] are the maxima of all rows."""
        vocab = logits.shape[1]
        tokens = np.empty(len(how), np.int64)
        ordered = how.ordered(vocab)
        for places in (np.flatnonzero(ordered), np.flatnonzero(~ordered)):
            for part in row_chunks(len(places), vocab):
                some = how.take(places[part])
                lines, tops = logits[some.rows], peak[some.rows]
                if ordered[places[0]]:
                    for which, found in keep_ordered(lines, tops, some, self.handle_topk_duplicates):
                        tokens[places[part][which]] = _race(found, some.take(which), vocab)
                else:
                    tokens[places[part]] = _race_by_value(lines, tops, some)
        return tokens


def _edit(logits: np.ndarray, edits: Edits) -> None:
    """Apply the edits whose id is inside the vocabulary; a checkpoint's end-of-sequence id may lie outside."""
    inside = (edits.ids >= 0) & (edits.ids < logits.shape[1])
    logits[edits.rows[inside], edits.ids[inside]] += edits.change[inside]


def _repair(logits: np.ndarray, tokens: np.ndarray, peak: np.ndarray, edits: Edits | None) -> None:
    """Give each row whose maximum is not finite a finite one, in ``logits``, ``tokens`` and ``peak``."""
    for row in np.flatnonzero(~np.isfinite(peak)):
        logits[row] = mend(logits[row])
        token = int(logits[row].argmax())
        if logits[row, token] == -np.inf:
            banned = set(edits.ids[(edits.rows == row) & (edits.change == -np.inf)].tolist()) if edits else set()
            token = next((token for token in range(logits.shape[1]) if token not in banned), 0)
            logits[row, token] = 0.0
        tokens[row], peak[row] = token, logits[row, token]


def _race_by_value(logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata) -> np.ndarray:
    """Tokens int64 [rows] of rows that need no order: min_p at most. The noise of a few tokens is drawn alone."""
    deficit = deficits(logits, peak, how.temperature)
    near = deficit <= np.minimum(furthest(how.min_p), MAX_SPREAD)[:, None]
    if np.count_nonzero(near) * _GROUP < near.size:
        flat = np.flatnonzero(near)
        rows, ids = np.divmod(flat, near.shape[1])
        return _race(KeptTokens(rows, ids, deficit.ravel()[flat]), how, near.shape[1])
    score = gumbel_rows(how.seed, how.position, how.choice, logits.shape[1])
    score -= deficit
    score[~near] = -np.inf
    tokens: np.ndarray = score.argmax(axis=-1)
    return tokens


def _race(found: KeptTokens, how: SamplingMetadata, vocab: int) -> np.ndarray:
    """Tokens int64 [rows]: among each row's survivors the greatest noise minus deficit, ties to the lowest id."""
    rows, ids = found.rows, found.ids
    if len(ids) * _GROUP < len(how) * vocab:
        score = gumbel_at(how.seed[rows], how.position[rows], how.choice[rows], ids)
    else:
        score = gumbel_rows(how.seed, how.position, how.choice, vocab)[rows, ids]
    score -= found.deficit
    starts = np.searchsorted(rows, np.arange(len(how)))
    first = np.maximum.reduceat(score, starts)
    lowest = np.where(score == first[rows], ids, np.iinfo(np.int64).max)
    tokens: np.ndarray = np.minimum.reduceat(lowest, starts)
    return tokens
