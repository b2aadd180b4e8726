"""The reference sampler, on the host: logits in, one token a row out.

Contract. The order is penalties, a grammar's mask, logit_bias, min_tokens, temperature, min_p, top_k, top_p, then
Gumbel-max: the token with the greatest ``noise - deficit`` wins, which draws it with its probability. A row without
temperature takes its best token. Ties go to the lowest id everywhere. NaN counts as impossible, +inf as the greatest
finite number, and a row in which nothing is possible yields its lowest id that is neither masked nor banned.

A row's token depends on its own logits, settings, history and key alone: rounding operations are element-wise, sums are
of integers (:mod:`preheat.ops.top_k_top_p`) and the noise is keyed (:mod:`preheat.ops.philox`). The arithmetic runs in
numpy, on one thread: its sort, partition and argmax are many times as fast as torch's on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from preheat.core import Level
from preheat.ops.order import mend, row_chunks
from preheat.ops.philox import MAX_SPREAD, gumbel_at, gumbel_rows
from preheat.ops.sampling import Edits, Penalties, SamplingInput, allowed
from preheat.ops.top_k_top_p import KeptTokens, SamplingMetadata, deficits, furthest, keep_ordered

_NO_MASKS = np.empty((0, 0), np.int32)
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
        """Bring the counts of these rows up to their known tokens: what is new is added, another owner's is replaced.
        Rows of one slot know the same tokens.
        """
        slots, once = np.unique(rows.slots, return_index=True)
        owner, lengths = rows.owner[once], rows.known[once]
        counted = self._length[slots]
        for place in np.flatnonzero((self._owner[slots] != owner) | (counted > lengths)):
            i = once[place]
            prompt, output = np.split(rows.tokens[i][: lengths[place]], [rows.prompt_len[i]])
            self.reset(int(slots[place]), prompt, output)
            counted[place] = lengths[place]
        tails = [rows.tokens[i][begin:end] for i, begin, end in zip(once, counted, lengths, strict=True)]
        self.add(np.repeat(slots, lengths - counted), np.concatenate(tails))
        self._owner[slots], self._length[slots] = owner, lengths

    def of_rows(self, rows: Penalties) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each row has seen, its drafts included: rows and token ids in order, int64 [n], and how often each token
        is in the output, int32 [n].
        """
        seen = self.seen[rows.slots]
        drafts = rows.drafts
        which = np.repeat(np.arange(len(drafts)), [len(each) for each in drafts])
        drafted = np.concatenate(drafts)
        seen[which, drafted] = True
        flat = np.flatnonzero(seen)
        row, ids = np.divmod(flat, seen.shape[1])
        count = self.output[rows.slots[row], ids]
        np.add.at(count, np.searchsorted(flat, which * seen.shape[1] + drafted), 1)
        return row, ids, count


class HostSampler:
    """Draws tokens for the sequences in ``num_slots`` slots. Its one state is the penalties' token counts."""

    def __init__(self, num_slots: int, vocab_size: int, handle_topk_duplicates: bool = False) -> None:
        self.counts = TokenCounts(num_slots, vocab_size)
        self.handle_topk_duplicates = handle_topk_duplicates

    def forget(self) -> None:
        """Be as new."""
        self.counts.forget()

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # of what is impossible or as good as
    def sample(self, logits: Tensor, batch: SamplingInput, masks: np.ndarray = _NO_MASKS) -> Tensor:
        """One token a row, int64 [rows], from ``logits`` float32 [rows, vocab] on the host, which are left alone.
        ``masks`` int32 [rows, words] are read for the rows ``batch.masked``.
        """
        if logits.dtype != torch.float32 or len(logits) != batch.size:
            raise ValueError(f"expected float32 logits of {batch.size} rows, got {logits.dtype} {tuple(logits.shape)}")
        values = logits.numpy()
        if batch.level is Level.FULL:
            values = values.copy()
        if batch.penalties:
            self._penalise(values, batch.penalties)
        if batch.masked is not None:
            for row in batch.masked:
                values[row, ~allowed(masks[row], values.shape[1])] = -np.inf
        if batch.edits:
            _edit(values, batch.edits)
        tokens = values.argmax(axis=-1)
        peak = values[np.arange(batch.size), tokens]
        if not np.isfinite(peak).all():
            values = values if batch.level is Level.FULL else values.copy()
            _repair(values, tokens, peak, batch, masks)
        if batch.random:
            tokens[batch.random.rows] = self._draw(values, peak, batch.random)
        return torch.from_numpy(tokens)

    def _penalise(self, logits: np.ndarray, rows: Penalties) -> None:
        """repetition_penalty on every token seen, then frequency and presence on those of the output."""
        self.counts.follow(rows)
        i, ids, count = self.counts.of_rows(rows)
        value, repetition = logits[rows.rows[i], ids], rows.repetition[i]
        value = np.where(value > 0, value / repetition, value * repetition)
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


def _repair(logits: np.ndarray, tokens: np.ndarray, peak: np.ndarray, batch: SamplingInput, masks: np.ndarray) -> None:
    """Give each row whose maximum is not finite a finite one, in ``logits``, ``tokens`` and ``peak``."""
    edits = batch.edits
    for row in np.flatnonzero(~np.isfinite(peak)):
        logits[row] = mend(logits[row])
        token = int(logits[row].argmax())
        if logits[row, token] == -np.inf:
            banned = set(edits.ids[(edits.rows == row) & (edits.change == -np.inf)].tolist()) if edits else set()
            free: Iterable[int] = range(logits.shape[1])
            if batch.masked is not None and row in batch.masked:
                free = allowed(masks[row], logits.shape[1]).nonzero()[0].tolist()
            token = next((token for token in free if token not in banned), 0)
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
