"""Recurrences on CUDA: three launches a layer, for all rows of a step.

The rows of a step lie in one table on the device, at one place for all programs. So a captured graph serves every step
of its bucket. Programs of the grid beyond the last row end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.attention import StepInputs, StepRows
from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.backends.cuda.device.launch import INTERPRETED, options
from preheat.backends.cuda.recurrence import kernels
from preheat.backends.cuda.recurrence.finish import WARP, finish_heads
from preheat.backends.cuda.recurrence.norm import finish_together
from preheat.backends.cuda.recurrence.prepare import prepare_heads, serves, value_unit
from preheat.backends.cuda.recurrence.prompts import recur_prompts
from preheat.backends.cuda.recurrence.rows import recur_rows, settle_rows
from preheat.core import StepStates
from preheat.limits import Limits
from preheat.ops.delta import DeltaStates, DeltaWeights
from preheat.ops.values import Recurrence


class Config(NamedTuple):
    """The columns of a program of the recurrence, its warps, and the most rows with programs of their own.

    A program takes further rows in turn. ``chunk``: numbers of as many tokens come through shared memory at once; with
    0, each thread asks for its numbers one token ahead. ``registers``: the most of a thread; None: the compiler's
    choice. ``ahead``: for rows of one token, the states of so many further rows of a program are on their way. None of
    these changes a bit.
    """

    columns: int
    warps: int
    chunk: int
    rows: int
    registers: int | None = None
    ahead: int = 0


PLACE_BYTES = 1 << 12
"""The most bytes of a row's state in a program's shared memory, for each warp; 16 warps share a multiprocessor."""

ALL = 1 << 16
"""Each row has programs of its own."""

ONE, PROMPTS, DECODING = Config(16, 4, 16, 1), Config(32, 4, 16, 32, registers=128), Config(16, 4, 0, ALL)
TOKENS = Config(32, 4, 0, 4, ahead=1)
"""For a step of one row with a prompt, for other steps with prompts, for steps of decoding rows only, and for those
whose rows have one token each.

The rows of a step with prompts are on the device alone, so both kernels are launched, and one of them ends at once.
A row alone has few programs: more of them, of fewer columns each, keep all multiprocessors busy. Many rows have enough
programs, and four of them share a multiprocessor: so a thread has at most 128 registers.

Measured on an H200, a layer of Qwen3.5-35B-A3B: one prompt of 2,048 tokens takes 0.64 ms with ``ONE`` and 0.70 ms with
``PROMPTS``; four such prompts take 1.66 ms and 1.29 ms. On an H100 the former takes 2.88 ms where each thread asks one
token ahead. 256 rows of one token take 197 us with ``TOKENS``; if each step wrote the states, they would take 299, and
a copy of their bytes takes 263.
"""

FINISH_HEADS, FINISH_WARPS = 8, 4
"""The most value heads of a program of the gated norm, and its warps. Neither changes a bit."""


class Tile(NamedTuple):
    """The neighboring tokens of a program of :func:`prepare_heads`, and its most warps; neither changes a bit."""

    tokens: int
    warps: int


PREPARE_DECODING: Tile | None = Tile(1, 2)
PREPARE_PROMPTS: Tile | None = Tile(4, 4)
"""For steps of decoding rows only, whose tokens share nothing, and for other steps; None: one token, head by head."""

TOGETHER, TOGETHER_WARPS = 16, 4
"""Heads of a norm that :func:`preheat.backends.cuda.recurrence.norm.finish_together` takes at once, and its warps."""

WINDOW_UNITS = 64
"""Programs that keep the windows of a row behind its prompt."""


@dataclass(frozen=True)
class Table:
    """The rows of steps within ``limits``, int32 on the device and in pinned memory.

    First come each row's first token, its slot to read, its first part, and the part behind its last one. The last row
    of the step comes first: prompts lie behind rows that decode, and take longest. Rows beyond the step's have zeros.
    Then each part's end and its slot to write. Then the first token of each token's row, counted from 1, and the row's
    slot to read; padding has zeros.
    """

    rows: int
    parts: int
    tokens: int

    @classmethod
    def of(cls, limits: Limits) -> Table:
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        return cls(limits.max_num_seqs, limits.state_slots, tokens)

    @property
    def parts_at(self) -> int:
        """The first word of the parts."""
        return 4 * self.rows

    @property
    def owners_at(self) -> int:
        """The first word of the tokens."""
        return self.parts_at + 2 * self.parts

    @property
    def words(self) -> int:
        return self.owners_at + 2 * self.tokens

    def of_step(self, states: StepStates, tokens: int) -> np.ndarray:
        """Return the words of a step of ``tokens`` tokens, padding included."""
        words = np.zeros(self.owners_at + 2 * tokens, np.int32)
        begins = (np.diff(states.row, prepend=-1) > 0).nonzero()[0]  # the first part of each row
        ends, behind = states.extend.cumsum(), np.append(begins, len(states.row))[1:]
        first = ends[begins] - states.extend[begins]
        words[: 4 * len(begins)] = np.stack((first, states.read[begins], begins, behind), 1)[::-1].ravel()
        parts = np.stack((ends, states.write), 1).ravel()
        words[self.parts_at : self.parts_at + len(parts)] = parts
        of_rows = np.stack((first + 1, states.read[begins]), 1).repeat(ends[behind - 1] - first, 0)
        words[self.owners_at : self.owners_at + of_rows.size] = of_rows.ravel()
        return words


@dataclass(frozen=True)
class TapedStates(DeltaStates):
    """States that lack tokens on tapes, see :mod:`preheat.backends.cuda.recurrence.rows`.

    ``tape`` has what :meth:`CudaRecurrences.prepare` makes of tokens, by slot and place. ``begun`` is int32 [slots].
    """

    tape: tuple[Tensor, ...]
    begun: Tensor

    @property
    def tapes(self) -> int:
        """Sequences with a tape."""
        return len(self.tape[0]) // int(kernels.TAPE.value)


def _taped(states: DeltaStates) -> TapedStates | None:
    return states if isinstance(states, TapedStates) else None


def _tape(inputs: StepInputs, states: DeltaStates) -> TapedStates | None:
    """Return the ``states`` if tokens of the step go onto their tapes."""
    return _taped(states) if inputs.width == 1 else None


def tape_bytes(value: Recurrence) -> int:
    """Return the bytes of a sequence's tape in a layer of ``value``; 0 where each step writes states."""
    if not _ahead(TOKENS, value):
        return 0
    return int(kernels.TAPE.value) * 4 * sum(heads * size for heads, size in _number_shapes(value))


def _number_shapes(value: Recurrence) -> list[tuple[int, int]]:
    """Return the heads, and the numbers of a head, of each tensor that :meth:`CudaRecurrences.prepare` fills."""
    scalars = int(kernels.SCALARS.value)
    return [(value.key_heads, 2 * value.key_dim), (value.value_heads, value.value_dim), (value.value_heads, scalars)]


class CudaRecurrences:
    """The recurrences of all layers, see :class:`preheat.backends.base.attention.Recurrences`."""

    def __init__(self, limits: Limits, backend: Backend) -> None:
        self._table, self._device, self._sequences = Table.of(limits), backend.device, limits.max_num_seqs
        self.words = torch.zeros(self._table.words, dtype=torch.int32, device=backend.device)
        self._host = [backend.host_copy(self.words) for _ in range(HOST_COPIES)]
        self._sent: np.ndarray | None = None

    def states(self, value: Recurrence, slots: int, dtype: torch.dtype) -> DeltaStates:
        """Return zero states; the matrix of a head is [value dim, key dim] in the order of the kernels."""
        kernels.places(value.key_dim, self._device)  # a capture of launches cannot make it
        made = DeltaStates.of(value, slots, dtype, self._device)
        matrix = made.matrix.view(slots, value.value_heads, value.value_dim, value.key_dim)
        if not _ahead(TOKENS, value):
            return DeltaStates(made.window, matrix)
        tape = self._numbers(value, min(slots, self._sequences + 1) * kernels.TAPE.value)
        return TapedStates(made.window, matrix, tuple(tape), torch.zeros(slots, dtype=torch.int32, device=self._device))

    def _numbers(self, value: Recurrence, tokens: int) -> list[Tensor]:
        """Return room for what :meth:`prepare` makes of ``tokens`` tokens."""
        room = partial(torch.empty, dtype=torch.float32, device=self._device)
        return [room(tokens, heads, size) for heads, size in _number_shapes(value)]

    def plan(self, step: StepRows, states: StepStates) -> np.ndarray:
        return self._table.of_step(states, step.tokens)

    def send(self, turn: int, rows: Any) -> None:
        """Copy the table to the device, unless it is there."""
        if rows is self._sent:
            return
        host = self._host[turn][: len(rows)]
        host.numpy()[:] = rows
        self.words[: len(rows)].copy_(host, non_blocking=True)
        self._sent = rows

    def clear(self) -> None:
        self.words.zero_()
        self._sent = None

    def run(self, inputs: StepInputs, x: Tensor, weights: DeltaWeights, states: DeltaStates, out: Tensor) -> Tensor:
        value = weights.value
        tape = _tape(inputs, states)
        made = self._numbers(value, len(x)) if tape is None else list(tape.tape)
        answers = torch.empty(len(x), value.value_heads, value.value_dim, dtype=torch.float32, device=x.device)
        self.prepare(inputs, x, weights, states, made)
        self.recur(inputs, x, value, states, [*made, answers])
        self.finish(x, answers, weights, out)
        return out

    def prepare(
        self, inputs: StepInputs, x: Tensor, weights: DeltaWeights, states: DeltaStates, made: list[Tensor]
    ) -> None:
        """Fill ``made`` with keys beside queries, with values, and with the numbers of each value head."""
        value, tile = weights.value, PREPARE_DECODING if inputs.width else PREPARE_PROMPTS
        sizes = {
            "KEY_HEADS": value.key_heads, "SHARE": value.value_heads // value.key_heads, "KEY": value.key_dim,
            "VALUE": value.value_dim, "TAPS": value.taps, "OWNERS": self._table.owners_at, "RULE": value.rule,
            "TAPES": 0 if (tape := _tape(inputs, states)) is None else tape.tapes,
            "enable_fp_fusion": False,
        }  # fmt: skip
        given = (
            x, inputs.positions, inputs.slots, self.words, states.window, weights.taps, weights.rate, weights.bias,
            weights.conv_bias, weights.skip,
        )  # fmt: skip
        factor = value.key_dim**-0.5
        if INTERPRETED or tile is None or not serves(value):
            kernels.prepare[(len(x), value.key_heads)](
                *given, kernels.places(value.key_dim, x.device), *made, x.stride(0), factor, **sizes,
                **options(num_warps=1, num_stages=1),
            )  # fmt: skip
            return
        warps = math.gcd(value.key_heads, tile.warps)
        units = value.key_heads // warps + value.value_size // value_unit(value.value_size, warps) + 1
        prepare_heads[(-(-len(x) // tile.tokens), units)](
            *given, *made, len(x), x.stride(0), factor, TOKENS=tile.tokens, **sizes,
            **options(num_warps=warps, num_stages=1),
        )  # fmt: skip

    def finish(self, x: Tensor, answers: Tensor, weights: DeltaWeights, out: Tensor) -> None:
        """Fill ``out`` with the gated norm of ``answers`` [tokens, value heads, value dim]."""
        value, rule, norm = weights.value, weights.value.rule, weights.norm
        share = 1.0 / (rule.normed * value.value_dim)
        given = x, self.words, answers, norm, out, x.stride(0), share, weights.eps
        sizes = {
            "CHANNELS": value.channels, "HEADS": value.value_heads, "VALUE": value.value_dim,
            "OWNERS": self._table.owners_at, "enable_fp_fusion": False,
        }  # fmt: skip
        heads = math.gcd(value.value_heads, FINISH_HEADS)
        single = norm.dim() == 1 and rule.normed == 1 and not rule.gate_first
        if single and not INTERPRETED and value.value_dim >= WARP.value and heads >= FINISH_WARPS:
            finish_heads[(len(x), value.value_heads // heads)](
                *given, **sizes, ROWS=heads, **options(num_warps=FINISH_WARPS, num_stages=1)
            )
            return
        if rule.normed == 1:
            kernels.finish[len(x), value.value_heads](
                *given, **sizes, EACH=norm.dim() > 1, RULE=rule, **options(num_warps=1, num_stages=1)
            )
            return
        sums = answers.new_empty(len(x), value.value_heads)
        finish_together[len(x), value.value_heads // rule.normed](
            x, self.words, answers, norm, sums, out, x.stride(0), share, weights.eps, **sizes,
            EACH=norm.dim() > 1, RULE=rule, ROWS=min(TOGETHER, kernels.next_power(rule.normed)),
            **options(num_warps=TOGETHER_WARPS, num_stages=1),
        )  # fmt: skip

    def recur(self, inputs: StepInputs, x: Tensor, value: Recurrence, states: DeltaStates, made: list[Tensor]) -> None:
        """Fill the last of ``made`` with the answers, and move the states on."""
        if (tape := _tape(inputs, states)) is not None:
            self._recur_rows(inputs, x, value, tape, made)
            return
        begun = None
        if (taped := _taped(states)) is not None:
            self.settle(inputs, value, taped)
            begun = taped.begun
        columns, warps, chunk, rows, *_ = DECODING if inputs.width else PROMPTS
        columns = min(columns, value.value_dim)
        chunked = chunk and not INTERPRETED and value.key_dim % 32 == 0 and columns % (4 * warps) == 0
        if chunked:
            self._recur_prompts(inputs, x, value, states, begun, made)
            return
        kernels.recur[(value.value_dim // columns, value.value_heads, min(rows, inputs.rows))](
            x, inputs.positions, self.words, states.window, states.matrix, begun, *made, x.stride(0), TAPS=value.taps,
            **self._sizes(value, columns), enable_fp_fusion=False, **options(num_warps=warps, num_stages=1),
        )  # fmt: skip

    def _recur_rows(
        self, inputs: StepInputs, x: Tensor, value: Recurrence, states: TapedStates, made: list[Tensor]
    ) -> None:
        """Do as :meth:`recur` for rows of one token, with states from shared memory."""
        config, columns = TOKENS, _columns(TOKENS, value)
        recur_rows[(value.value_dim // columns, value.value_heads, min(config.rows, inputs.rows))](
            x, inputs.positions, inputs.slots, self.words, states.window, states.matrix, states.begun, *made,
            x.stride(0), TAPS=value.taps, TAPES=states.tapes, PLACES=config.ahead + 1, **self._sizes(value, columns),
            enable_fp_fusion=False, **options(num_warps=config.warps, num_stages=1),
        )  # fmt: skip

    def settle(self, inputs: StepInputs, value: Recurrence, states: TapedStates) -> None:
        """Bring the states that the rows read up to their first tokens."""
        config, columns = TOKENS, _columns(TOKENS, value)
        settle_rows[(value.value_dim // columns, value.value_heads, min(config.rows, inputs.rows))](
            inputs.positions, inputs.slots, self.words, states.matrix, states.begun, *states.tape, TAPES=states.tapes,
            **self._sizes(value, columns), enable_fp_fusion=False, **options(num_warps=config.warps, num_stages=1),
        )  # fmt: skip

    def _recur_prompts(
        self, inputs: StepInputs, x: Tensor, value: Recurrence, states: DeltaStates, begun: Tensor | None,
        made: list[Tensor],
    ) -> None:  # fmt: skip
        """Do as :meth:`recur` with tokens from shared memory."""
        for config, one in ((ONE, True), (PROMPTS, False)):
            columns = min(config.columns, value.value_dim)
            grid = value.value_dim // columns, value.value_heads, min(config.rows, inputs.rows)
            # A prompt has about as many programs as the device has multiprocessors, and each should have one to itself.
            recur_prompts[grid](
                inputs.positions, self.words, states.matrix, begun, *made, ONE=one, CHUNK=config.chunk,
                **self._sizes(value, columns), enable_fp_fusion=False, maxnreg=config.registers,
                **options(num_warps=config.warps, num_stages=1, alone=True),
            )  # fmt: skip
        kernels.keep_windows[(WINDOW_UNITS, min(PROMPTS.rows, inputs.rows))](
            x, inputs.positions, self.words, states.window, x.stride(0), PARTS=self._table.parts_at,
            CHANNELS=value.channels, TAPS=value.taps, UNITS=WINDOW_UNITS, **options(num_warps=1, num_stages=1),
        )  # fmt: skip

    def _sizes(self, value: Recurrence, columns: int) -> dict[str, Any]:
        """Return the sizes that a kernel of the recurrence with ``columns`` a program is compiled for."""
        lanes, run = kernels.split_of(value.key_dim)
        return {
            "KEY_HEADS": value.key_heads, "SHARE": value.value_heads // value.key_heads, "KEY": value.key_dim,
            "VALUE": value.value_dim, "PARTS": self._table.parts_at, "COLUMNS": columns, "RUN": run, "LANES": lanes,
            "RULE": value.rule,
        }  # fmt: skip


def _columns(config: Config, value: Recurrence) -> int:
    """Return the columns of a program by ``config`` whose states of a row take at most ``PLACE_BYTES`` a warp."""
    return min(config.columns, value.value_dim, config.warps * PLACE_BYTES // (4 * value.key_dim))


def _ahead(config: Config, value: Recurrence) -> bool:
    """Whether states of ``value`` come through shared memory, see :func:`recur_rows`: whole pieces for each lane."""
    columns = _columns(config, value)
    whole = value.key_dim % 32 == 0 and columns % (4 * config.warps) == 0 and value.value_dim % columns == 0
    return config.ahead > 0 and whole and not INTERPRETED
