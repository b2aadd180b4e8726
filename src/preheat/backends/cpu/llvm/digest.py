"""A compiled function of the digests of logits, by the definition of :mod:`preheat.ops.digest`.

Contract. A row's digest is the sum of its 32-bit words, each times its key, mod 2**64. A sum of integers has no order,
so lanes add up for themselves, and the lanes are added in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p
from functools import partial

import torch
from llvmlite import ir
from torch import Tensor

from preheat.backends.cpu.llvm.emit import INT, LANES, LONG, POINTER, WORD, WORDS, Function, Value, constant
from preheat.backends.cpu.llvm.machine import Code
from preheat.ops.digest import FIRST, GOLDEN, SECOND, check_logits, keys

_WIDE = ir.VectorType(LONG, LANES)
_NOTHING = (0,) * LANES


def digest(module: ir.Module) -> None:
    """Write ``digest(logits, vocab, rows, stride, keys, found)``: a digest of 64 bits for each row of logits.

    A row begins ``stride`` words behind the row before it.
    """
    e = Function(module, "digest", [POINTER, LONG, LONG, LONG, POINTER, POINTER])
    logits, vocab, rows, stride, table, found = e.args
    row_digest = RowDigest(e, vocab, table)
    with e.loop(0, rows) as row:
        e.store(row_digest(e.at(logits, e.mul(row, stride))), found, row, LONG, 8)
    e.close()


class RowDigest:
    """The digest of a row inside the function ``e``: a row has ``vocab`` words, ``table`` points to their keys.

    Without a table, keys are computed. That takes less time than reading them once, and more than reading them again.
    """

    def __init__(self, e: Function, vocab: Value, table: Value | None = None) -> None:
        self._e, self._vocab, self._table = e, vocab, table
        self._whole = e.mul(e.div(vocab, LANES), LANES)
        self._some, self._rest = e.variable(constant(_WIDE, _NOTHING)), e.variable(e.i(0))

    def __call__(self, line: Value) -> Value:
        """Return the digest of a ``line``."""
        e, some, rest = self._e, self._some, self._rest
        e.set(some, constant(_WIDE, _NOTHING))
        e.set(rest, e.i(0))
        with e.loop(0, self._whole, LANES) as at:
            e.set(some, e.b.add(e.get(some), self._terms(line, at, WORDS, _WIDE)))
        with e.loop(self._whole, self._vocab) as at:
            e.set(rest, e.add(e.get(rest), self._terms(line, at, WORD, LONG)))
        return e.add(self._total(e.get(some)), e.get(rest))

    def _terms(self, line: Value, at: Value, words: ir.Type, wide: ir.Type) -> Value:
        """Return the words of a ``line`` from ``at`` on, each times its key."""
        b = self._e.b
        word = b.load(self._e.at(line, at), typ=words, align=4)
        if self._table is None:
            key = self._key(at, wide)
        else:
            key = b.load(self._e.at(self._table, at, LONG), typ=wide, align=8)
        return b.mul(b.zext(word, wide), key)

    def _key(self, at: Value, wide: ir.Type) -> Value:
        """Return the keys of words from ``at`` on."""
        e, b = self._e, self._e.b

        def all_(number: int) -> Value:
            return constant(wide, (number,) * LANES if wide is _WIDE else number)

        state = e.mul(e.add(at, 1), GOLDEN)
        if wide is _WIDE:
            steps = constant(wide, tuple(lane * GOLDEN % 2**64 for lane in range(LANES)))
            state = b.add(e.splat(state, wide), steps)
        for shift, factor in ((30, FIRST), (27, SECOND)):
            state = b.mul(b.xor(state, b.lshr(state, all_(shift))), all_(factor))
        return b.or_(b.xor(state, b.lshr(state, all_(31))), all_(1))

    def _total(self, lanes: Value) -> Value:
        """Return the sum of all lanes."""
        b, half = self._e.b, LANES // 2
        while half:
            mask = constant(WORDS, tuple((lane + half) % LANES for lane in range(LANES)))
            lanes, half = b.add(lanes, b.shuffle_vector(lanes, lanes, mask)), half // 2
        return b.extract_element(lanes, constant(INT, 0))


class Digests:
    """The compiled function, as :func:`preheat.ops.digest.row_digests`. ``code`` returns its machine code.

    Logits of steps are static. So their place and form are looked up once, and the same digests are overwritten.
    """

    def __init__(self, code: Callable[[], Code]) -> None:
        self._code = code
        self._given: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the digests int64 [rows] of ``logits``, fp32 [rows, vocab], valid until the next call."""
        if logits is not self._given:
            self._take(logits)
        self._run()
        return self._found

    def _take(self, logits: Tensor) -> None:
        """Prepare calls for ``logits``."""
        check_logits(logits)
        rows, vocab = logits.shape
        self._keys, self._found = keys(vocab), torch.empty(rows, dtype=torch.int64)
        places = [logits.data_ptr(), vocab, rows, logits.stride(0), self._keys.ctypes.data, self._found.data_ptr()]
        kinds = c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p
        function = CFUNCTYPE(None, *kinds)(self._code().address("digest"))
        self._run = partial(function, *(kind(place) for kind, place in zip(kinds, places, strict=True)))
        self._given = logits
