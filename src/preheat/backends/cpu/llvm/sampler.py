"""Drawing by a compiled function: rows that take their best token, or draw, also among filtered tokens."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64, c_void_p
from pathlib import Path

import numpy as np
from llvmlite import ir

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.draw import BLOCK, SETTINGS, draw
from preheat.backends.cpu.llvm.machine import Code, compile_code
from preheat.backends.cpu.llvm.memory import zeros
from preheat.core import Level
from preheat.ops.order import finite_rows
from preheat.ops.philox import MAX_SPREAD
from preheat.ops.sampling import SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata, furthest, keep_ordered

_POSITION = 4


class Draws:
    """The compiled function that draws for up to ``rows`` rows. Its machine code is kept in ``folder``.

    ``duplicates`` is as in :func:`preheat.ops.top_k_top_p.keep_ordered`.
    """

    def __init__(self, rows: int, folder: Path | None, *, duplicates: bool = False) -> None:
        module = ir.Module("draw")
        module.triple = targets.here().triple
        draw(module)
        self.code = Code(compile_code(str(module), folder)[0])
        arguments = c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p
        self._draw = CFUNCTYPE(c_int64, *arguments)(self.code.address("draw"))
        self._tokens = zeros(rows, np.int64)
        self._settings = zeros(rows * SETTINGS, np.uint32).reshape(rows, SETTINGS)
        self._tail = zeros(BLOCK, np.float32)
        self._addresses = tuple(each.ctypes.data for each in (self._settings, self._tokens, self._tail))
        self._duplicates = duplicates
        self._kept: np.ndarray | None = None
        self._filtered: SamplingMetadata | None = None

    def __call__(self, logits: np.ndarray, step: SamplingInput) -> np.ndarray | None:
        """Return a token for each row of ``logits`` float32 [rows, vocab].

        None: a row has penalties, edits or a mask, or no finite maximum; the reference sampler draws.
        """
        if step.level is Level.FULL or not logits.flags.c_contiguous:
            return None
        count, vocab = logits.shape
        if step.random is not None:
            self._describe(step.random, vocab)
        elif self._kept is not None:
            self._settings[:, 0], self._kept, self._filtered = 0, None, None
        if self._filtered is not None:
            if not finite_rows(logits).all():
                return None
            logits = self._only_kept(logits, self._filtered)
        bad = self._draw(logits.ctypes.data, vocab, count, *self._addresses)
        return None if bad else self._tokens[:count]

    def _describe(self, how: SamplingMetadata, vocab: int) -> None:
        """Write the settings of rows; positions alone change from step to step of the same rows."""
        settings, rows = self._settings, how.rows
        if self._kept is not rows:
            settings[:, 0] = 0
            low, high = (how.seed & np.uint64(0xFFFFFFFF)), how.seed >> np.uint64(32)
            limit = np.minimum(furthest(how.min_p), np.float32(MAX_SPREAD))
            columns = how.temperature.view(np.uint32), limit.view(np.uint32), low, high, how.position, how.choice
            for at, column in enumerate(columns):
                settings[rows, at] = column
            filtered = np.flatnonzero(how.ordered(vocab))
            self._kept, self._filtered = rows, how.take(filtered) if len(filtered) else None
        settings[rows, _POSITION] = how.position

    def _only_kept(self, logits: np.ndarray, how: SamplingMetadata) -> np.ndarray:
        """Return ``logits`` with the kept tokens alone in the rows of ``how``; others are impossible there."""
        lines = logits[how.rows]
        found = logits.copy()
        found[how.rows] = -np.inf
        for which, kept in keep_ordered(lines, lines.max(axis=-1), how, self._duplicates):
            rows = which[kept.rows]
            found[how.rows[rows], kept.ids] = lines[rows, kept.ids]
        return found
