"""The reference sampler, on the host: one token per row of logits.

Contract. The stages run in this order: penalties, a grammar's mask, logit_bias, min_tokens, temperature, min_p, top_k,
top_p, then Gumbel-max. The token with the greatest ``noise - deficit`` wins, so each token wins with its probability. A
row without temperature takes its best token. Ties always go to the lowest id. NaN counts as impossible, +inf as the
greatest finite number. A row without a possible token yields its lowest id that is neither masked nor banned. A
backend's sampler marks the token if the model's logits have no finite maximum; the request then ends with an error
(:mod:`preheat.schedule.results`).

A row's token depends only on its own logits, settings, history and key. Operations that round are element-wise, sums
are of integers (:mod:`preheat.ops.top_k_top_p`) and the noise is keyed (:mod:`preheat.ops.philox`). The arithmetic runs
in numpy, on one thread: its sort, partition and argmax are many times as fast as torch's on the host.
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
_GROUP = 4  # tokens that share one Philox block of noise


class TokenCounts:
    """Counts of tokens in the sequences of slots.

    ``output`` counts a token in the slot's output; ``seen`` says whether prompt or output have it at all. Only slots
    with penalties are kept; memory stays zero until touched. Counts follow the tokens of the slot's sequence. So the
    counts are right after preemption and resumption, and after another sequence has taken the slot.
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
        """Forget the counts of all slots."""
        slots = self._owner != _NO_OWNER
        self.output[slots] = self.seen[slots] = 0
        self._owner[slots], self._length[slots] = _NO_OWNER, 0

    def follow(self, rows: Penalties) -> None:
        """Bring the counts of these rows up to date.

        New tokens are added; counts of another owner are replaced. All rows of one slot must know the same tokens.
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
        """Return each row's seen tokens, drafts included: rows, ids and counts.

        Rows and token ids are int64 [n], in order; counts int32 [n] say how often the output has the token.
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
    """A sampler for the sequences in ``num_slots`` slots.

    Its only state is the token counts of penalties.
    """

    def __init__(self, num_slots: int, vocab_size: int, handle_topk_duplicates: bool = False) -> None:
        self.counts = TokenCounts(num_slots, vocab_size)
        self.handle_topk_duplicates = handle_topk_duplicates

    def forget(self) -> None:
        """Forget the token counts of all slots."""
        self.counts.forget()

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # impossible tokens give inf - inf and the like
    def sample(self, logits: Tensor, batch: SamplingInput, masks: np.ndarray = _NO_MASKS) -> Tensor:
        """Draw one token per row: int64 [rows] from ``logits`` float32 [rows, vocab] on the host.

        ``logits`` stay unchanged. ``masks`` int32 [rows, words] are read for the rows in ``batch.masked``. Raises
        ValueError for another dtype or another number of rows.
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
        """Apply the repetition, frequency and presence penalties.

        Repetition applies to every seen token, frequency and presence to output tokens.
        """
        self.counts.follow(rows)
        i, ids, count = self.counts.of_rows(rows)
        value, repetition = logits[rows.rows[i], ids], rows.repetition[i]
        value = np.where(value > 0, value / repetition, value * repetition)
        value -= rows.frequency[i] * count.astype(np.float32)
        value -= rows.presence[i] * (count > 0)
        logits[rows.rows[i], ids] = value

    def _draw(self, logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata) -> np.ndarray:
        """Return the tokens of the random rows, in the order of ``how``.

        ``peak`` [rows] are the maxima of all rows.
        """
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
    """Apply the edits with an id inside the vocabulary.

    A checkpoint's end-of-sequence id may lie outside.
    """
    inside = (edits.ids >= 0) & (edits.ids < logits.shape[1])
    logits[edits.rows[inside], edits.ids[inside]] += edits.change[inside]


def _repair(logits: np.ndarray, tokens: np.ndarray, peak: np.ndarray, batch: SamplingInput, masks: np.ndarray) -> None:
    """Make each row's maximum finite, in ``logits``, ``tokens`` and ``peak``."""
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
    """Return tokens int64 [rows] of rows without top_k and top_p.

    Noise is drawn for the near tokens alone where they are few.
    """
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
    """Return each row's winning token, int64 [rows].

    It is the kept token of greatest noise minus deficit; ties go to the lowest id.
    """
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
