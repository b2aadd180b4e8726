"""Drawing by a compiled function: rows that take their best token, or draw, also among filtered tokens."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64, c_void_p
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.best import best
from preheat.backends.cpu.llvm.digest import Digests, digest
from preheat.backends.cpu.llvm.draw import BLOCK, SETTINGS, draw, pick
from preheat.backends.cpu.llvm.machine import Code, compile_code
from preheat.backends.cpu.llvm.memory import zeros
from preheat.backends.cpu.llvm.targets import Target
from preheat.core import Level
from preheat.ops.digest import keys
from preheat.ops.philox import MAX_SPREAD
from preheat.ops.sampling import SamplingInput
from preheat.ops.top_k_top_p import WINDOW, Filter, SamplingMetadata, furthest, keep_ordered

_POSITION = 4
_ID = 0xFFFFFFFF
_ROWS_WITH_TABLE = 3
"""The fewest rows for which keys of digests are read."""


@cache
def source(target: Target) -> str:
    """Return the functions that draw, and the function of digests, in LLVM's language."""
    module = ir.Module("draw")
    module.triple = target.triple
    for write in (draw, pick, best, digest):
        write(module)
    return str(module)


class Draws:
    """The compiled function that draws for up to ``rows`` rows. Its machine code is kept in ``folder``.

    ``duplicates`` is as in :func:`preheat.ops.top_k_top_p.keep_ordered`. ``row_digests`` is compiled with it.
    """

    def __init__(self, rows: int, folder: Path | None, *, duplicates: bool = False) -> None:
        self._folder = folder
        self.row_digests = Digests(lambda: self.code)
        self._tokens = zeros(rows, np.int64)
        self._settings = zeros(rows * SETTINGS, np.uint32).reshape(rows, SETTINGS)
        self._tail = zeros(BLOCK, np.float32)
        self._digests = zeros(rows, np.int64)
        self._digested = False
        self._addresses = tuple(each.ctypes.data for each in (self._settings, self._tokens, self._tail))
        self._digests_at, self._keys = self._digests.ctypes.data, np.empty(0, np.uint64)
        self._duplicates = duplicates
        self._kept: np.ndarray | None = None
        self._logits: tuple[np.ndarray, int] | None = None  # the last ones, and their address
        self._filtered: list[tuple[int, Filter]] = []
        self._found, self._near = zeros(WINDOW, np.int64), zeros(WINDOW, np.float32)
        self._own = zeros(rows * SETTINGS, np.uint32).reshape(rows, SETTINGS)  # of filtered rows

    @cached_property
    def code(self) -> Code:
        """The machine code, compiled or read at its first use."""
        return Code(compile_code(source(targets.here()), self._folder)[0])

    @cached_property
    def _draw(self) -> Any:
        return CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64, *[c_void_p] * 5)(self.code.address("draw"))

    @cached_property
    def _pick(self) -> Any:
        return CFUNCTYPE(c_int64, c_void_p, c_void_p, c_int64, c_void_p)(self.code.address("pick"))

    @cached_property
    def _best(self) -> Any:
        return CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p)(self.code.address("best"))

    def build(self) -> None:
        """Compile or read the functions, unless they are there."""
        self.code  # noqa: B018 - a property with an effect

    def __call__(self, logits: np.ndarray, step: SamplingInput) -> np.ndarray | None:
        """Return a token for each of the step's rows of ``logits`` float32 [rows, vocab].

        None: a row has penalties, edits or a mask, or no finite maximum; the reference sampler draws.
        """
        self._digested = False
        if step.level is Level.FULL or not logits.flags.c_contiguous:
            return None
        count, vocab = step.size, logits.shape[1]
        if self._logits is None or logits is not self._logits[0]:
            self._logits = logits, logits.ctypes.data
        if step.random is not None:
            self._describe(step.random, vocab)
        elif self._kept is not None:
            self._settings[:, 0], self._kept, self._filtered = 0, None, []
        places = (self._digests_at, self._keys_of(vocab, count)) if step.digested else (None, None)
        if self._draw(self._logits[1], vocab, count, *self._addresses, *places):
            return None
        self._digested = step.digested
        for row, how in self._filtered:
            self._tokens[row] = self._among(logits, row, how)
        return self._tokens[:count]

    def digests(self, logits: Tensor) -> np.ndarray:
        """Return the digests of all rows of the ``logits`` of the last call, valid until the next one."""
        if self._digested:
            return self._digests
        found: np.ndarray = self.row_digests(logits if logits.dtype is torch.float32 else logits.float()).numpy()
        return found

    def _keys_of(self, vocab: int, rows: int) -> int | None:
        """Return the address of the keys of digests, None for so few rows that keys are better computed."""
        if rows < _ROWS_WITH_TABLE:
            return None
        if len(self._keys) != vocab:
            self._keys = keys(vocab)
            self._keys_at = self._keys.ctypes.data
        return self._keys_at

    def best_ids(self, line: np.ndarray, width: int) -> np.ndarray:
        """Return the ids of the best tokens of a ``line`` without NaN, as :func:`preheat.ops.order.best_ids` does."""
        keys = self._found[:width] if width <= WINDOW else np.empty(width, np.int64)
        self._best(line.ctypes.data, len(line), width, keys.ctypes.data)
        keys.sort()
        return keys & _ID

    def _among(self, logits: np.ndarray, row: int, how: Filter) -> int:
        """Return the token that a row with top_k or top_p draws."""
        line, own = logits[row], self._own[row].ctypes.data
        ids = self.best_ids(line, min(WINDOW, len(line)))
        values = line[ids]
        count = how.kept(line, values, duplicates=self._duplicates)
        if count is None:  # tokens beyond the window are kept, too
            kept = keep_ordered(line[None], values[:1], how.metadata, self._duplicates)
            ids = next(found.ids for _, found in kept)
            values, count = line[ids], len(ids)
        return int(self._pick(*self._padded(ids, values, count), count, own))

    def _padded(self, ids: np.ndarray, values: np.ndarray, count: int) -> tuple[int, int]:
        """Return the addresses of the first ``count`` tokens and their logits, in whole vectors."""
        if count <= WINDOW:
            self._found[:count], self._near[:count] = ids[:count], values[:count]
            return self._found.ctypes.data, self._near.ctypes.data
        room = -(-count // BLOCK) * BLOCK
        self._many = zeros(room, np.int64), zeros(room, np.float32)
        for whole, part in zip(self._many, (ids, values), strict=True):
            whole[:count] = part
        return self._many[0].ctypes.data, self._many[1].ctypes.data

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
            filtered = how.ordered(vocab).nonzero()[0]
            self._own[:] = settings
            settings[rows[filtered], 0] = 0  # the function that draws takes their best tokens
            self._kept = rows
            self._filtered = [(int(rows[at]), Filter.of(how, int(at), vocab)) for at in filtered]
        settings[rows, _POSITION] = how.position
        if self._filtered:
            self._own[rows, _POSITION] = how.position
