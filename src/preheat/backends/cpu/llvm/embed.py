"""The function that copies rows of a table of embeddings, as floats; see :mod:`preheat.ops.embedding`."""

from __future__ import annotations

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


def embeds(module: ir.Module) -> None:
    """Write ``embed_STORED(tokens, count, table, vocab, hidden, out)`` for each kind of table.

    It copies the row of each token, an integer of 32 bits. Tokens outside the vocabulary are left out, and their number
    is returned. ``hidden`` is a multiple of 16.
    """
    for stored in TABLES:
        e = Function(module, f"embed_{stored}", [POINTER, LONG, POINTER, LONG, LONG, POINTER], LONG)
        tokens, count, table, vocab, hidden, out = e.args
        kind, bad = FLOAT if stored == "float32" else HALF, e.variable(e.i(0))
        e.set(bad, e.i(0))
        with e.loop(0, count) as place:
            token = e.b.sext(e.load(tokens, place, INT), LONG)
            known = e.b.icmp_unsigned("<", token, vocab)
            e.set(bad, e.add(e.get(bad), e.b.zext(e.b.not_(known), LONG)))
            with e.when(known), e.loop(0, hidden, LANES) as at:
                row = e.at(table, e.add(e.mul(token, hidden), at), kind)
                e.put(numbers(e, row, stored), out, e.add(e.mul(place, hidden), at))
        e.close(e.get(bad))


class TableRows:
    """The compiled functions that embed tokens, in ``code``."""

    def __init__(self, code: Code) -> None:
        kind = CFUNCTYPE(c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)
        self._code = code  # as long as its functions may run
        self._functions = {getattr(torch, cast(str, name)): kind(code.address(f"embed_{name}")) for name in TABLES}

    def takes(self, table: Tensor, out: Tensor) -> bool:
        """Return whether there is a function for a table and the type of its copies."""
        hidden = table.shape[1] % LANES == 0 and table.is_contiguous()
        return hidden and table.dtype in self._functions and out.dtype == torch.float32 and out.is_contiguous()

    def __call__(self, tokens: Tensor, table: Tensor, out: Tensor) -> None:
        """Copy rows of ``table`` [vocab, hidden] for ``tokens`` int32 [n] to ``out`` float32 [n, hidden].

        Raises IndexError for an id outside the table.
        """
        (vocab, hidden), count = table.shape, tokens.shape[0]
        run = self._functions[table.dtype]
        if bad := run(tokens.data_ptr(), count, table.data_ptr(), vocab, hidden, out.data_ptr()):
            raise IndexError(f"{bad} of {count} tokens are outside of the table's {vocab} rows")
