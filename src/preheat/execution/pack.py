"""Packing: a Schedule and the slots' arrays become one Batch of tensors, padded to the shape that the plan names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cpu.attention import PagedAttention, max_keys, widest_tile
from preheat.backends.cpu.linear import MIN_ROWS
from preheat.backends.cpu.tiles import Rows, plan_tiles
from preheat.core import Schedule
from preheat.execution.sampling import SamplingBatch
from preheat.execution.step_size import step_size_of
from preheat.model.specs import ModelSpec
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.schedule.slots import NO_LOGPROBS, Slots


@dataclass(slots=True)
class PromptRow:
    """A row whose prompt logprobs are wanted: ``alternatives`` of them for each token of the prompt after another.

    A part holds such tokens, int32 [n], and the step's tokens that each of them follows, int64 [at least n], padded
    with the last to a size that logits are computed at.
    """

    row: int
    alternatives: int
    parts: list[tuple[Tensor, np.ndarray]]


@dataclass(slots=True)
class Batch:
    """One step's input, padded to ``shape``. T tokens, of which the first belong to rows in row order and the rest pad:
    they are token 0 at position 0, and their keys and values go to the pad block. In a step of decoding rows they are
    rows of their own, else no query of theirs attends.

    ``attention[window]`` holds the groups of tiles for layers with that sliding window. ``sampled`` [sampling size]
    are the tokens whose logits are wanted (padded with the first), ``sampling`` says what to do with them and
    ``logprobs`` how many alternatives each of them reports (-1: none).
    """

    shape: Bucket
    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    kv_rows: Tensor  # int64 [T * 2 * kv heads], where keys and values go
    attention: dict[int | None, list[PagedAttention]]
    sampled: Tensor  # int64 [sampling_size]
    sampling: SamplingBatch
    sampled_rows: np.ndarray  # int [sampling rows], the schedule's row of each
    sampling_size: int  # rows that the logits are padded to
    logprobs: np.ndarray  # int32 [sampling rows]
    prompt_rows: list[PromptRow]

    @property
    def padded_tokens(self) -> int:
        """What the step computes, padding included."""
        return len(self.tokens)


class Packer:
    """Builds batches for a model. Host work is a few numpy gathers, whatever the number of rows.

    With ``contiguous`` reads, decoding rows read the cache in place, see :func:`preheat.backends.cpu.tiles.plan_tiles`.
    """

    def __init__(self, slots: Slots, spec: ModelSpec, dtype: torch.dtype, plan: Plan, contiguous: bool = False) -> None:
        self.slots, self.spec, self.dtype, self.plan, self.contiguous = slots, spec, dtype, plan, contiguous
        self.max_keys = max_keys(spec.num_kv_heads, spec.head_dim, dtype)
        self.widest = widest_tile(spec.num_heads // spec.num_kv_heads, spec.head_dim, dtype)
        self.windows = sorted(set(spec.layer_windows), key=lambda window: window or 0)

    def pack(self, schedule: Schedule) -> Batch:
        """Every row's next ``extend`` tokens, at their positions, with the blocks that hold their sequence."""
        slots, rows = self.slots, schedule.slots
        shape = self.plan.fit(step_size_of(schedule, slots, self.plan.policy))
        ends = np.cumsum(schedule.extend)
        starts = ends - schedule.extend
        row = np.repeat(np.arange(len(rows)), schedule.extend)
        first = schedule.first.astype(np.int64)
        size = max(shape.tokens, MIN_ROWS)
        tokens, positions, blocks = np.zeros((3, size), np.int64)
        count = int(ends[-1])
        pad = size - count if schedule.num_decode == len(rows) else 0
        position = positions[:count]
        position[:] = first[row] + np.arange(count) - starts[row]
        slot = rows[row]
        tokens[:count] = slots.tokens[slot, position]
        blocks[:count] = slots.block_table[slot, position // slots.block_size]
        sampled_rows = np.flatnonzero(schedule.samples)
        sampling_size = self.plan.sampler_rows(len(sampled_rows))
        sampled = np.zeros(sampling_size, np.int64)
        sampled[: len(sampled_rows)] = ends[sampled_rows] - 1
        return Batch(
            shape=shape,
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            kv_rows=torch.from_numpy(self._kv_rows(blocks, positions % slots.block_size)),
            attention={window: self._attention(schedule, starts, first, pad, window) for window in self.windows},
            sampled=torch.from_numpy(sampled),
            sampling=SamplingBatch.build(slots, rows[sampled_rows], schedule.ends[sampled_rows]),
            sampled_rows=sampled_rows,
            sampling_size=sampling_size,
            logprobs=slots.logprobs[rows[sampled_rows]],
            prompt_rows=self._prompt_rows(schedule, starts),
        )

    def _attention(
        self, schedule: Schedule, starts: np.ndarray, first: np.ndarray, pad: int, window: int | None
    ) -> list[PagedAttention]:
        """The groups of tiles: decoding rows, with ``pad`` rows that read the pad block, and rows of several tokens."""
        slots, spec, decode = self.slots, self.spec, schedule.num_decode
        groups = []
        for part, more in ((slice(0, decode), pad), (slice(decode, None), 0)):
            rows = schedule.slots[part]
            if not len(rows) + more:
                continue
            extend, begin = schedule.extend[part], first[part]
            blocks = -(-int((begin + extend).max(initial=1)) // slots.block_size)
            cut = Rows(starts[part], begin, extend, slots.block_table[rows, :blocks])
            if more:
                cut = _padded(cut, more)
            tiles = plan_tiles(
                cut, slots.block_size, window, self.max_keys, widest=self.widest, contiguous=self.contiguous
            )
            groups.append(PagedAttention(tiles, spec.num_heads, spec.num_kv_heads, spec.head_dim, self.dtype))
        return groups

    def _kv_rows(self, block: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Each token's rows of the cache: for every head its key, then for every head its value."""
        heads = np.arange(2 * self.spec.num_kv_heads)
        rows: np.ndarray = (block[:, None] * len(heads) + heads) * self.slots.block_size + offset[:, None]
        return rows.reshape(-1)

    def _prompt_rows(self, schedule: Schedule, starts: np.ndarray) -> list[PromptRow]:
        """The prefilling rows that want prompt logprobs; a token that ends the prompt has no successor."""
        slots, found = self.slots, []
        wanted = slots.prompt_logprobs[schedule.slots[schedule.num_decode :]] != NO_LOGPROBS
        for row in np.flatnonzero(wanted) + schedule.num_decode:
            slot = schedule.slots[row]
            first = schedule.first[row] + 1
            last = min(first + schedule.extend[row], slots.prompt_len[slot])
            successors = slots.tokens[slot, first:last].copy()
            if len(successors):
                parts = self._logit_parts(int(starts[row]), successors)
                found.append(PromptRow(int(row), int(slots.prompt_logprobs[slot]), parts))
        return found

    def _logit_parts(self, start: int, successors: np.ndarray) -> list[tuple[Tensor, np.ndarray]]:
        """``successors`` of the step's tokens from ``start`` on, in parts of the most rows that are sampled at once."""
        parts, most = [], self.plan.sampler_sizes[-1]
        for at in range(0, len(successors), most):
            part = successors[at : at + most]
            before = np.minimum(np.arange(self.plan.sampler_rows(len(part))), len(part) - 1) + start + at
            parts.append((torch.from_numpy(before), part))
        return parts


def _padded(rows: Rows, count: int) -> Rows:
    """``count`` more rows of one token each, which are the next tokens of the step and read the pad block."""
    zeros = np.zeros(count, np.int64)
    return Rows(
        np.concatenate((rows.first_query, len(rows.first_query) + np.arange(count))),
        np.concatenate((rows.first_position, zeros)),
        np.concatenate((rows.extend, zeros + 1)),
        np.pad(rows.block_tables, ((0, count), (0, 0))),
    )
