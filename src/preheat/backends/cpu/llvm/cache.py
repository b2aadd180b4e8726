"""One layer's paged cache, for one key head of a sequence.

Contract. Keys and values are rounded to the cache's numbers (:mod:`preheat.backends.cpu.llvm.narrow`). For numbers of
eight bits they are divided by their scales first. A value that is not finite is stored as zero, and its key as NaN. A
key that is not finite is stored as NaN.
"""

from __future__ import annotations

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import FLOAT, INT, LANES, LONG, WORD, Function, Value
from preheat.backends.cpu.llvm.kinds import LayerKind
from preheat.backends.cpu.llvm.narrow import NARROW

SCORE, KEY, VALUE = range(3)
"""Places of a layer's scales: the scores' factor, with the keys' scale, and the scales of keys and values."""


class Cache:
    """One layer's cache [blocks, 2, kv heads, slots, dim] for one key head of a sequence.

    A block's keys lie in tiles of 16: for each dimension the 16 keys side by side. Values lie row by row.
    """

    def __init__(self, e: Function, how: LayerKind, parts: dict[str, Value], table: Value, head: Value) -> None:
        self.e, self.how, self._cache, self._table, self._head = e, how, parts["cache"], table, head
        self._narrow = NARROW.get(how.cached)
        self._kind = FLOAT if self._narrow is None else self._narrow.kind
        self._bytes = 4 if self._narrow is None else self._narrow.bits // 8
        self._scales = parts["scales"]

    def scale(self, place: int) -> Value | None:
        """Return the scale at ``place`` in all lanes, None if it is always 1."""
        scaled = place == SCORE or self._bytes == 1
        return self.e.splat(self.e.load(self._scales, place)) if scaled else None

    def _base(self, position: Value, values: int) -> Value:
        """Return the element where a block's keys or values begin.

        The block holds ``position``; ``values`` is 0 for the head's keys and 1 for its values.
        """
        e, how = self.e, self.how
        block = e.b.sext(e.load(self._table, e.div(position, how.block_size), WORD), LONG)
        row = e.add(e.mul(e.add(e.mul(block, 2), values), how.kv_heads), self._head)
        return e.mul(row, how.block_size * how.dim)

    def keys(self, position: Value) -> Value:
        """Return the address of the tile of keys that begins at ``position``.

        ``position`` is a multiple of 16.
        """
        e, how = self.e, self.how
        inside = e.mul(e.rem(position, how.block_size), how.dim)
        return e.at(self._cache, e.add(self._base(position, 0), inside), self._kind)

    def value(self, position: Value) -> Value:
        """Return the address of the value of ``position``."""
        e, how = self.e, self.how
        inside = e.mul(e.rem(position, how.block_size), how.dim)
        return e.at(self._cache, e.add(self._base(position, 1), inside), self._kind)

    def read(self, address: Value, at: Value) -> Value:
        """Load 16 numbers as floats, from element ``at`` on."""
        if self._narrow is None:
            return self.e.vector(address, at)
        kind = ir.VectorType(self._kind, LANES)
        codes = self.e.b.load(self.e.at(address, at, self._kind), typ=kind, align=self._bytes)
        return self._narrow.widened(self.e, codes)

    def read_part(self, address: Value, column: int) -> Value:
        """Load a row's numbers as floats, from ``column`` on; lanes beyond the row's end have any numbers.

        Memory is read up to the row's end, and from before ``column`` instead: a cache begins with keys.
        """
        beyond = max(column + LANES - self.how.dim, 0)
        found = self.read(address, column - beyond)
        if not beyond:
            return found
        lanes = ir.Constant(ir.VectorType(INT, LANES), [min(lane + beyond, LANES - 1) for lane in range(LANES)])
        return self.e.b.shuffle_vector(found, found, lanes)

    def write(self, position: Value, key: Value, value: Value) -> None:
        """Store a key and a value of ``dim`` floats."""
        e = self.e
        wrong = e.variable(e.v(0.0))
        e.set(wrong, e.v(0.0))
        out = self.value(position)
        for column, count, mask in self.columns():
            given = e.vector(value, column, mask)
            nothing = e.b.fsub(given, given)  # zero, or NaN where the number is not finite
            e.set(wrong, e.b.fadd(e.get(wrong), nothing))
            finite = e.b.fcmp_ordered("ord", nothing, nothing)
            numbers = self._numbers(e.b.select(finite, given, e.v(0.0)), VALUE)
            if count == LANES:
                e.store(numbers, e.at(out, column, self._kind), 0, numbers.type, align=self._bytes)
            else:
                self._each(numbers, count, out, column, 1)
        odd = e.splat(e.tree(e.get(wrong), e.b.fadd))
        lane = e.rem(position, LANES)
        tile = e.at(self.keys(e.sub(position, lane)), lane, self._kind)
        for column, count, mask in self.columns():
            given = e.vector(key, column, mask)
            marked = e.b.fadd(given, e.b.fadd(e.b.fsub(given, given), odd))
            self._each(self._numbers(marked, KEY), count, tile, column, LANES)

    def columns(self) -> list[tuple[int, int, Value | None]]:
        """Return the vectors of a head: the first column, the number of lanes, and their mask, None for all."""
        e, dim = self.e, self.how.dim
        counts = [(column, min(LANES, dim - column)) for column in range(0, dim, LANES)]
        return [(column, count, None if count == LANES else e.first(count)) for column, count in counts]

    def _numbers(self, x: Value, place: int) -> Value:
        """Return ``x`` as the cache stores it, divided by the scale at ``place``."""
        if (scale := self.scale(place)) is not None:
            x = self.e.b.fdiv(x, scale)
        return x if self._narrow is None else self._narrow.narrowed(self.e, x)

    def _each(self, numbers: Value, count: int, out: Value, column: int, step: int) -> None:
        """Store ``count`` lanes one by one, ``step`` elements apart, as numbers from ``column`` on."""
        for place in range(count):
            each = self.e.b.extract_element(numbers, ir.Constant(INT, place))
            self.e.store(each, out, (column + place) * step, self._kind, align=self._bytes)
