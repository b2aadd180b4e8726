"""The functions that copy and add rows of tables of embeddings, as floats; see :mod:`preheat.ops.embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int64, c_void_p
from typing import cast

import torch
from llvmlite import ir
from torch import Tensor

from preheat.backends.cpu.llvm.emit import FLOAT, HALF, INT, LANES, LONG, POINTER, Function
from preheat.backends.cpu.llvm.kinds import Stored
from preheat.backends.cpu.llvm.machine import Code
from preheat.backends.cpu.llvm.narrow import numbers

TABLES: tuple[Stored, ...] = ("float32", "bfloat16", "float16")
"""Numbers of a table."""

EMBEDS = (*(f"embed_{stored}" for stored in TABLES), "add_rows", "sum_rows")
"""Names of the functions."""


def embeds(module: ir.Module) -> None:
    """Write ``embed_STORED(tokens, count, table, vocab, types, hidden, out)`` for each kind of table, and the sums.

    It copies the row of each token, an integer of 32 bits: id + type * vocab. Tokens outside the vocabulary, or of a
    type from ``types`` on, are left out, and their number is returned. ``hidden`` is a multiple of 16.
    """
    for stored in TABLES:
        e = Function(module, f"embed_{stored}", [POINTER, LONG, POINTER, LONG, LONG, LONG, POINTER], LONG)
        tokens, count, table, vocab, types, hidden, out = e.args
        kind, bad = FLOAT if stored == "float32" else HALF, e.variable(e.i(0))
        e.set(bad, e.i(0))
        with e.loop(0, count) as place:
            token = e.b.sext(e.load(tokens, place, INT), LONG)
            known = e.b.icmp_unsigned("<", token, e.mul(vocab, types))
            e.set(bad, e.add(e.get(bad), e.b.zext(e.b.not_(known), LONG)))
            with e.when(known), e.loop(0, hidden, LANES) as at:
                row = e.at(table, e.add(e.mul(e.rem(token, vocab), hidden), at), kind)
                e.put(numbers(e, row, stored), out, e.add(e.mul(place, hidden), at))
        e.close(e.get(bad))
    _adds(module)
    _sums(module)


def _adds(module: ir.Module) -> None:
    """Write ``add_rows(ids, count, table, size, hidden, out, divisor)`` for tables of float32.

    It adds the row of each id, an integer of 32 bits that is divided by ``divisor`` before, to the sums in ``out``. Ids
    outside the table are left out, and their number is returned. ``hidden`` is a multiple of 16.
    """
    e = Function(module, "add_rows", [POINTER, LONG, POINTER, LONG, LONG, POINTER, LONG], LONG)
    ids, count, table, size, hidden, out, divisor = e.args
    bad = e.variable(e.i(0))
    with e.loop(0, count) as place:
        row = e.div(e.b.sext(e.load(ids, place, INT), LONG), divisor)
        known = e.b.icmp_unsigned("<", row, size)
        e.set(bad, e.add(e.get(bad), e.b.zext(e.b.not_(known), LONG)))
        with e.when(known), e.loop(0, hidden, LANES) as at:
            there = e.add(e.mul(place, hidden), at)
            e.put(e.b.fadd(e.vector(out, there), e.vector(table, e.add(e.mul(row, hidden), at))), out, there)
    e.close(e.get(bad))


def _sums(module: ir.Module) -> None:
    """Write ``sum_rows(x, bounds, texts, hidden, out)`` for rows of float32; see :mod:`preheat.ops.pooling`."""
    e = Function(module, "sum_rows", [POINTER, POINTER, LONG, LONG, POINTER])
    x, bounds, texts, hidden, out = e.args
    with e.loop(0, texts) as text:
        total = e.at(out, e.mul(text, hidden))
        with e.loop(0, hidden, LANES) as at:
            e.put(e.v(0.0), total, at)
        first, end = (e.b.sext(e.load(bounds, e.add(text, more), INT), LONG) for more in (0, 1))
        with e.loop(first, end) as row, e.loop(0, hidden, LANES) as at:
            e.put(e.b.fadd(e.vector(total, at), e.vector(x, e.add(e.mul(row, hidden), at))), total, at)
    e.close()


Added = tuple[Tensor, Tensor, int]
"""A table [size, hidden], ids int32 [n], and a divisor of the ids: the row of each quotient joins a sum."""


class TableRows:
    """The compiled functions that embed tokens, in ``code``."""

    def __init__(self, code: Code) -> None:
        kind = CFUNCTYPE(c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)
        self._code = code  # as long as its functions may run
        self._functions = {getattr(torch, cast(str, name)): kind(code.address(f"embed_{name}")) for name in TABLES}
        self._taken: tuple[Tensor, Tensor] | None = None
        kind = CFUNCTYPE(c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64)
        self._add = kind(code.address("add_rows"))
        kind = CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        self._sum = kind(code.address("sum_rows"))

    def takes(self, table: Tensor, out: Tensor, added: Sequence[Added] = ()) -> bool:
        """Return whether there is a function for a table and the type of its copies.

        Sums are rounded to the type of the table, so tables of float32 alone are added.
        """
        if added:
            whole = all(more.dtype == torch.float32 and more.is_contiguous() for more, *_ in added)
            if not whole or table.dtype != torch.float32:
                return False
        if self._taken is not None and table is self._taken[0] and out is self._taken[1]:
            return True
        hidden = table.shape[1] % LANES == 0 and table.is_contiguous()
        if not hidden or table.dtype not in self._functions or out.dtype != torch.float32 or not out.is_contiguous():
            return False
        self._taken = table, out
        return True

    def __call__(
        self, tokens: Tensor, table: Tensor, out: Tensor, *, types: int = 1, added: Sequence[Added] = ()
    ) -> None:
        """Copy rows of ``table`` [vocab, hidden] for ``tokens`` int32 [n] to ``out`` float32 [n, hidden].

        A token is id + type * vocab, with a type below ``types``. The rows of ``added`` tables are added in their
        order. Raises IndexError for an id outside a table.
        """
        (vocab, hidden), count, place = table.shape, tokens.shape[0], out.data_ptr()
        run = self._functions[table.dtype]
        if bad := run(tokens.data_ptr(), count, table.data_ptr(), vocab, types, hidden, place):
            raise IndexError(f"{bad} of {count} tokens are outside of the table's {vocab} rows")
        for more, ids, divisor in added:
            size = more.shape[0]
            if bad := self._add(ids.data_ptr(), count, more.data_ptr(), size, hidden, place, divisor):
                raise IndexError(f"{bad} of {count} tokens are outside of the table's {size} rows")

    def sum_rows(self, x: Tensor, bounds: Tensor, out: Tensor) -> bool:
        """Do the same as :func:`preheat.ops.pooling.sum_rows`, or return False if there is no function for ``x``."""
        texts, hidden = out.shape
        if hidden % LANES or x.dtype != torch.float32 or not x.is_contiguous():
            return False
        self._sum(x.data_ptr(), bounds.data_ptr(), texts, hidden, out.data_ptr())
        return True
