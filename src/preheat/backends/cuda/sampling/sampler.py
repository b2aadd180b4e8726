"""The sampler on the device: the semantics of :mod:`preheat.ops.sampler`, in capturable kernels.

A step runs one of three programs, the highest level needed by any row. A row's token is the same at each level. All
memory is static and all changing sizes are read from the device, so that a program can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.backends.base.sampling import SampledRows
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.pointwise.digest import MANY, add_digests
from preheat.backends.cuda.sampling.best import peaks, pick
from preheat.backends.cuda.sampling.draw import settle, weigh
from preheat.backends.cuda.sampling.edit import PART, edit, penalise, recount
from preheat.backends.cuda.sampling.gumbel import LAPPED, enter
from preheat.backends.cuda.sampling.layout import SamplerLayout
from preheat.backends.cuda.sampling.logprobs import report, report_told, tally
from preheat.backends.cuda.sampling.shared import FINITE, MAX_VOCAB, sampling
from preheat.core import MAX_LOGPROB_IDS, Level, TokenLogprobs, unmarked
from preheat.ops.logprobs import prompt_entries
from preheat.ops.sampling import Penalties, SamplingInput, words_of

_NO_OWNER = -1
_COUNTED = 4096  # tokens of a sequence counted by one program
_TOGETHER = 64  # programs of one launch
_STAGED = _TOGETHER * (_COUNTED + PART)
_ALIGNED = 4  # words: the kernel was compiled for pointers of this alignment
_EDIT_PROGRAMS, _EDITS = 64, 128


@dataclass(frozen=True, slots=True)
class Cut:
    """Cutting of a row into chunks (a program each) of groups. Changes no bits."""

    chunk: int = 4096
    group: int = 64


class DeviceCounts:
    """The device's counts of each slot's tokens, and the sequence that owns each slot.

    A step counts the final tokens drawn for rows with penalties. The host counts a sequence that takes a slot from its
    beginning, and counts the accepted drafts.
    """

    def __init__(self, num_slots: int, vocab_size: int, backend: Backend) -> None:
        self.history = torch.zeros(num_slots + 1, vocab_size, dtype=torch.int32, device=backend.device)
        self._owner = np.full(num_slots, _NO_OWNER, np.int64)
        self._length = np.zeros(num_slots, np.int64)
        self._sequence = torch.zeros(_STAGED, dtype=torch.int32, device=backend.device)
        self._staged = backend.host_copy(self._sequence)
        self._used = 0
        self._copied = backend.event()

    def follow(self, rows: Penalties) -> None:
        """Count known tokens that the device has not counted, before a step of level full.

        For a sequence new in its slot, these are all tokens, else the tokens after accepted drafts. The step's own
        tokens are counted when they are drawn, if they are final. Raises ValueError if a token to be counted is not
        known to the host.
        """
        slots, once = np.unique(rows.slots, return_index=True)
        owner, lengths = rows.owner[once], rows.known[once]
        counted = np.where(self._owner[slots] == owner, self._length[slots], 0)
        counted[counted > lengths] = 0
        if (lacking := counted < lengths).any():
            self._count_tails(rows, once[lacking], counted[lacking])
        self._owner[slots], self._length[slots] = owner, lengths + rows.final[once]

    def forget(self) -> None:
        """Set all counts to zero, and forget the owners of slots."""
        self.history.zero_()
        self._owner[:], self._length[:] = _NO_OWNER, 0

    def _count_tails(self, rows: Penalties, which: np.ndarray, counted: np.ndarray) -> None:
        """Count the tokens of the sequences at indices ``which`` behind the first ``counted`` ones.

        One launch does it unless sequences are many or long. Sequences without counted tokens begin anew.
        """
        parts = list[tuple[int, int, np.ndarray]]()
        for i, begin in zip(which.tolist(), counted.tolist(), strict=True):
            slot, tokens, prompt_len = int(rows.slots[i]), rows.tokens[i][: rows.known[i]], int(rows.prompt_len[i])
            if (tokens[begin:] < 0).any():
                raise ValueError(f"the sequence in slot {slot} cannot be counted while a token of it is being drawn")
            starts = range(begin, len(tokens), _COUNTED)
            parts += [(slot, prompt_len - first, tokens[first : first + _COUNTED]) for first in starts]
        slots = np.sort(rows.slots[which[counted == 0]])
        for run in np.split(slots, (np.diff(slots) != 1).nonzero()[0] + 1) if len(slots) else ():
            self.history[run[0] : run[-1] + 1].zero_()
        for first in range(0, len(parts), _TOGETHER):
            self._count(parts[first : first + _TOGETHER])

    def _count(self, parts: list[tuple[int, int, np.ndarray]]) -> None:
        """Count ``parts`` of sequences: the slot, the number of prompt tokens, and the tokens."""
        begin, table = PART * len(parts), list[tuple[int, int, int, int]]()
        for slot, prompt, tokens in parts:
            table.append((slot, begin, len(tokens), prompt))
            begin += len(tokens)
        words = np.concatenate((np.array(table, np.int32).reshape(-1), *(tokens for *_, tokens in parts)))
        self.launch(self._stage(words), len(parts))

    def launch(self, words: Tensor, parts: int) -> None:
        """Count ``parts`` stretches of sequences; ``words`` int32 holds their table, then their tokens."""
        recount[parts,](self.history, words, self.history.shape[1], _COUNTED, num_warps=4)

    def _stage(self, words: np.ndarray) -> Tensor:
        """Copy ``words`` to the device.

        The host waits for the device only after all of the staging memory has been used.
        """
        if self._used + len(words) > _STAGED:
            self._used = 0
            self._copied.wait()
        part = slice(self._used, self._used + len(words))
        self._staged.numpy()[part] = words
        self._sequence[part].copy_(self._staged[part], non_blocking=True)
        self._copied.record()
        self._used += -(-len(words) // _ALIGNED) * _ALIGNED
        return self._sequence[part]


class Answer:
    """A step's answers on the host.

    ``arrays`` holds tokens, report ids, report values, values of told tokens, and digests of rows.
    """

    def __init__(self, answers: Sequence[Tensor], backend: Backend) -> None:
        self._from = answers
        self._to = [backend.host_copy(each) for each in answers]
        self.arrays = [each.numpy() for each in self._to]
        self._there = backend.event()

    def fetch(self, tokens: bool, reports: bool, told: bool, digests: Tensor | None) -> None:
        """Fetch the wanted arrays of all rows, and ``digests`` if there are some; return before they have arrived."""
        for wanted, source, target in zip((tokens, reports, reports, told), self._from, self._to, strict=False):
            if wanted:
                target.copy_(source, non_blocking=True)
        if digests is not None:
            self._to[-1].copy_(digests, non_blocking=True)
        self._there.record()

    def wait(self) -> None:
        """Wait until the latest fetch, and all launches before it, have finished."""
        self._there.wait()


class CudaSampler:
    """Draws tokens for the sequences of a step.

    ``layout`` is the host's description of a step; ``settings`` int32 [layout.words] is the description on the device.
    ``masked``: rows may have masks. ``tokens`` int32 [max rows] holds the answers in row order, marked as by
    :func:`preheat.core.marked`. ``last_token`` int32 [slots + 1] is each slot's latest token; the last slot is for
    padding rows. Log-probabilities are reported with the ``max_logprobs`` most likely tokens.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        backend: Backend,
        max_rows: int,
        handle_topk_duplicates: bool = False,
        *,
        max_logprobs: int = 20,
        cut: Cut = Cut(),
        masked: bool = False,
    ) -> None:
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"the sampler takes up to {MAX_VOCAB} tokens, the model has {vocab_size}")
        device = backend.device
        self.vocab_size, self.max_logprobs = vocab_size, min(max_logprobs, vocab_size)
        self.handle_topk_duplicates = handle_topk_duplicates
        self.layout = SamplerLayout(max_rows, vocab_size, pad_slot=num_slots)
        self.counts = DeviceCounts(num_slots, vocab_size, backend)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.settings = zeros(self.layout.words)
        self._masks = zeros(max_rows, words_of(vocab_size)) if masked else None
        self._host_masks = [] if self._masks is None else [backend.host_copy(self._masks) for _ in range(HOST_COPIES)]
        self.tokens, self.last_token = zeros(max_rows), zeros(num_slots + 1)
        self.report_ids = zeros(max_rows, 1 + self.max_logprobs)
        self.report_values = zeros(max_rows, 1 + self.max_logprobs, dtype=torch.float32)
        self._told_ids = zeros(max_rows, MAX_LOGPROB_IDS)
        self._told_values = zeros(max_rows, MAX_LOGPROB_IDS, dtype=torch.float32)
        self._host_told = [backend.host_copy(self._told_ids) for _ in range(HOST_COPIES)]
        self._told: list[dict[int, list[int]] | None] = [None] * HOST_COPIES  # of each host copy
        self._telling: dict[int, list[int]] | None = None  # the content of ``_told_ids``
        self._chunks = chunks = -(-vocab_size // cut.chunk)
        groups = chunks * (cut.chunk // cut.group)
        self._cut = {"VOCAB": vocab_size, "CHUNK": cut.chunk}
        self._chunked = self._cut | {"CHUNKS": next_power_of_2(chunks)}
        self._grouped = self._chunked | {"GROUP": cut.group, "GROUPS": next_power_of_2(groups)}
        self._tops = torch.full((max_rows, next_power_of_2(groups)), -torch.inf, device=device)
        self._groups, self._listed = zeros(max_rows, next_power_of_2(groups)), zeros(max_rows, cut.chunk)
        self._kinds = zeros(max_rows, chunks)
        self._nearest, self._befores = zeros(max_rows, chunks, LAPPED.value), zeros(max_rows, chunks)
        self._leads, self._masses, self._aheads = (zeros(max_rows, chunks, dtype=torch.int64) for _ in range(3))
        self._live, self._successors = zeros(1), zeros(max_rows)
        self._host = [backend.host_copy(self.settings) for _ in range(HOST_COPIES)]
        self._arrays = [host.numpy() for host in self._host]
        self._packed: list[tuple[SamplingInput | None, int]] = [(None, 0)] * HOST_COPIES  # step and words of each copy
        self._described: SamplingInput | None = None  # the content of ``settings``
        self._digests = [*zeros(2, max_rows, dtype=torch.int64)]  # of this step, and zeros for the next one with some
        self._digested = False
        answers = self.tokens, self.report_ids, self.report_values, self._told_values, self._digests[0]
        self._answers = [Answer(answers, backend) for _ in range(HOST_COPIES)]

    def forget(self) -> None:
        self.counts.forget()

    def clear(self) -> None:
        self.settings.zero_()
        self._described = self._telling = None

    def masks(self, turn: int) -> np.ndarray:
        return self._host_masks[turn].numpy()

    def describe(self, turn: int, step: SamplingInput, slots: np.ndarray) -> None:
        """Describe a step to the device; unchanged descriptions are neither written nor sent again."""
        if step.penalties:
            self.counts.follow(step.penalties)
        host, (before, used) = self._arrays[turn], self._packed[turn]
        if before is not step:
            if before is not None and step.random is not None and step.continues(before):
                self.layout.advance(host, step.random)
            else:
                used = self.layout.pack(host, step, slots)
            self._packed[turn] = step, used
        if self._described is not step:
            self.settings[:used].copy_(self._host[turn][:used], non_blocking=True)
            self._described = step
        if step.masked is not None and self._masks is not None:
            rows = slice(int(step.masked[0]), int(step.masked[-1]) + 1)
            self._masks[rows].copy_(self._host_masks[turn][rows], non_blocking=True)
        self._told[turn] = step.logprob_ids
        if step.logprob_ids is not self._telling:
            self._send_told(turn, step.logprob_ids or {})
            self._telling = step.logprob_ids

    def _send_told(self, turn: int, told: dict[int, list[int]]) -> None:
        """Send the tokens with wanted log-probabilities, by row."""
        rows = max(told, default=-1) + 1
        host = self._host_told[turn]
        host[:rows].fill_(-1)
        for row, ids in told.items():
            host[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._told_ids[:rows].copy_(host[:rows], non_blocking=True)

    def report(self, logits: Tensor) -> None:
        self._launch_logprobs(self.settings, logits, self.tokens)
        if self._telling:
            self._launch_told(self.settings, logits)

    def digest(self, turn: int, logits: Tensor) -> None:
        self._digests.reverse()
        self._digested = True
        add_digests(logits, *self._digests)

    def digests(self, turn: int, rows: int) -> np.ndarray:
        return self._answers[turn].arrays[-1][:rows].copy()

    def fetch(self, turn: int, *, tokens: bool, reports: bool) -> None:
        digests = self._digests[0] if self._digested else None
        self._digested = False
        self._answers[turn].fetch(tokens, reports, bool(reports and self._told[turn]), digests)

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        answer = self._answers[turn]
        answer.wait()
        tokens, ids, values, told_values, _ = answer.arrays
        found = tokens[:rows].copy()
        if not len(reporting):
            return found, []
        reports = read_report(ids[reporting], values[reporting], unmarked(found[reporting]), alternatives)
        for row, entry in zip(reporting.tolist(), reports, strict=True):
            if told := (self._told[turn] or {}).get(row):
                entry.top = tuple(zip(told, told_values[row, : len(told)].tolist(), strict=True))
        return found, reports

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        count = len(tokens)
        self._successors[:count].copy_(torch.from_numpy(tokens))
        self._live.fill_(count)
        self._launch_logprobs(self._live, logits, self._successors)
        ids, values = (x[:count].cpu().numpy() for x in (self.report_ids, self.report_values))
        finite = (self._kinds[:count].amax(1) == FINITE.value).cpu().numpy()
        return prompt_entries(read_report(ids, values, tokens, np.full(count, alternatives)), finite)

    def compile(self, logits: Tensor) -> None:
        """Compile reports of log-probabilities, digests, and the count of a whole sequence."""
        self._launch_logprobs(self.settings, logits[:1], self.tokens)
        self._launch_told(self.settings, logits[:1])
        for rows in (1, MANY):
            self._digests.reverse()
            add_digests(logits[:rows], *self._digests)
        self._digests[0].zero_()
        self.counts.launch(self.settings, 1)

    def sample(self, level: Level, logits: Tensor) -> None:
        """Sample rows of ``logits``, bf16 or fp32; the logits stay unchanged.

        ``tokens`` and ``last_token`` get the answers. Rows beyond the described rows are padding and get token 0.
        """
        rows = len(logits)
        raw = level is not Level.FULL
        if not raw:
            logits = self._edit(logits, rows)
        self._peaks(logits, rows, raw)
        if level is Level.GREEDY:
            pick[rows,](
                self.settings, self._leads, self._kinds, self.tokens, self.last_token, self._chunks,
                self.vocab_size, self._chunked["CHUNKS"], **sampling(num_warps=1),
            )  # fmt: skip
            return
        grid, row = (self._chunks, rows), logits.stride(0)
        races = self._leads, self._nearest
        weights = self._masses, self._aheads
        enter[grid](self.settings, logits, row, *races, **self._chunked, raw=raw, **sampling(num_warps=4))
        weigh[grid](self.settings, logits, row, *races, *weights, **self._chunked, raw=raw, **sampling(num_warps=4))
        settle[rows,](
            self.settings, logits, row, self._tops, self._leads, self._kinds, self._nearest, *weights, self._groups,
            self._listed, self.tokens, self.last_token, None if raw else self.counts.history, self._chunks,
            **self._grouped, duplicates=self.handle_topk_duplicates, raw=raw, **sampling(num_warps=8),
        )  # fmt: skip

    def _launch_logprobs(self, live: Tensor, logits: Tensor, chosen: Tensor) -> None:
        """Compute log-probabilities of ``chosen`` int32 [rows] and the most likely tokens.

        ``logits`` [rows, vocab] are raw. ``live`` int32 [at least 1] holds the number of real rows, the rest are
        padding; for the rows of a step it is ``settings``. ``report_ids`` and ``report_values`` [max rows, 1 +
        max_logprobs] get the answers, see :func:`read_report`.
        """
        rows = len(logits)
        self._peaks(logits, rows, raw=True, live=live)
        row, partial = logits.stride(0), (self._masses, self._befores)
        tally[self._chunks, rows](
            live, logits, row, self._leads, chosen, *partial, **self._chunked, **sampling(num_warps=4)
        )
        report[rows,](
            live, logits, row, self._tops, self._leads, chosen, *partial, self._groups, self._listed,
            self.report_ids, self.report_values, self.max_logprobs, self._chunks, **self._grouped,
            **sampling(num_warps=8),
        )  # fmt: skip

    def _launch_told(self, live: Tensor, logits: Tensor) -> None:
        """Compute log-probabilities of told tokens, after :meth:`_launch_logprobs` of the same rows."""
        report_told[len(logits),](
            live, logits, logits.stride(0), self._leads, self._masses, self._told_ids, self._told_values, self._chunks,
            self.vocab_size, self._chunked["CHUNKS"], MAX_LOGPROB_IDS, **sampling(num_warps=4),
        )  # fmt: skip

    def _peaks(self, logits: Tensor, rows: int, raw: bool, live: Tensor | None = None) -> None:
        """Find the greatest logit of every group, and the best token of every chunk."""
        counted = self.settings if live is None else live
        peaks[self._chunks, rows](
            counted, logits, logits.stride(0), self._tops, self._leads, self._kinds,
            **self._cut, GROUP=self._grouped["GROUP"], GROUPS=self._grouped["GROUPS"], raw=raw, **sampling(num_warps=4),
        )  # fmt: skip

    def _edit(self, logits: Tensor, rows: int) -> Tensor:
        """Return a float32 copy [rows, vocab] after penalties, masks, logit_bias and bans."""
        edited = torch.empty(rows, self.vocab_size, dtype=torch.float32, device=logits.device)
        penalise[self._chunks, rows](
            self.settings, logits, logits.stride(0), self.counts.history, self._masks, edited, self._kinds,
            **self._cut, WORDS=words_of(self.vocab_size), **sampling(num_warps=8),
        )  # fmt: skip
        edit[_EDIT_PROGRAMS,](
            self.settings, edited, self.layout.max_rows, self.vocab_size, _EDITS, **sampling(num_warps=4)
        )
        return edited


def read_report(
    ids: np.ndarray, values: np.ndarray, tokens: np.ndarray, alternatives: np.ndarray
) -> list[TokenLogprobs]:
    """Return log-probabilities from the arrays written by :meth:`CudaSampler.report`.

    Row i has the token ``tokens[i]``, and the first ``alternatives[i]`` most likely tokens are returned. All arrays are
    [n] or [n, 1 + most], on the host.
    """
    rows = zip(tokens.tolist(), ids.tolist(), values.tolist(), alternatives.tolist(), strict=True)
    return [
        TokenLogprobs(token, own, rank, tuple(each for each in zip(top[:n], likely[:n], strict=True) if each[0] >= 0))
        for token, (rank, *top), (own, *likely), n in rows
    ]
