"""Operators of interpreted tensors that learn what they make of the types of their operands.

Triton looks at both operands of each operator, converts and broadcasts them, and makes objects on the way: ten times
the work of numpy's function. For two types the function and the type of the result are always the same. An operator
takes Triton's way once for two types, and numpy's from then on, if both gave the same bits. Numpy broadcasts by itself.
Loads and new axes are learned alike.

Only operands of one type, a pointer and an integer, and a tensor and a number of Python are learned: Triton converts
others.
"""

import numpy as np
import triton.language as tl
from triton.language.core import tensor
from triton.runtime.interpreter import TensorHandle, interpreter_semantic
from triton.runtime.interpreter import _interpreter as memory

_PLAIN = [
    tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64, tl.float16, tl.float32,
]  # fmt: skip
"""Types that numpy has, too: the interpreter keeps the bits of others as integers."""
_WITH_NUMBERS = [tl.int32, tl.int64, tl.float32]
_SIGNED = [tl.int32, tl.int64]
"""Types of which numpy takes the wider one, as Triton does."""
_MOST = 10_000
"""Most numbers that an operator remembers."""


def _quotient(one, other):
    """Round towards zero, as a device does."""
    return (one - np.fmod(one, other)) // other


_FUNCTIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": _quotient, "mod": np.fmod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_SWAPPED = {f"r{name}": lambda one, other, of=of: of(other, one) for name, of in _FUNCTIONS.items()}
_OPERATORS = {f"__{name}__": of for name, of in (_FUNCTIONS | _SWAPPED).items()}


def quick(name, slow):
    """Return the operator ``name`` that learns from ``slow``, or ``slow`` where there is nothing to learn."""
    if name == "__getitem__":
        return _learning_axes(slow)
    return _learning(_OPERATORS[name], slow, moves=name in ("__add__", "__radd__")) if name in _OPERATORS else slow


def _learning(function, slow, moves):
    ways, ways_of_numbers = {}, {}

    def operate(self, other):
        kind = type(other)
        if kind is tensor:
            way = ways.get((id(self.type), id(other.type)))
            if way is not None:
                return _made(way, way.function(self.handle.data, other.handle.data))
            return _learn(ways, function, slow, self, other, moves)
        if kind is tl.constexpr:
            other = other.value
            kind = type(other)
        if kind is not int and kind is not float:
            return slow(self, other)
        way = ways_of_numbers.get((id(self.type), kind, other))
        if way is not None:
            return _made(way, way.function(self.handle.data, way.number))
        return _learn_number(ways_of_numbers, function, slow, self, other, moves)

    return operate


class _Way:
    """A function, and the types of its result. A way keeps the types of its operands: no other type gets their ids."""

    def __init__(self, function, result, kept, number=None):
        self.function, self.kept, self.number = function, kept, number
        self.of_handle, self.type, self.dtype = result.handle.dtype, result.type, result.dtype
        self.numel, self.shape = result.numel, result.shape


def _made(way, data):
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, way.of_handle, {}
    made = object.__new__(tensor)
    made.handle, made.type, made.dtype, made.numel, made.shape = handle, way.type, way.dtype, way.numel, way.shape
    return made


def _learn(ways, function, slow, one, other, moves):
    found = slow(one, other)
    kinds = one.dtype, other.dtype
    if moves and kinds[0].is_ptr() and kinds[1].is_int():
        function = _moving(kinds[0])
    elif not ((kinds[0] is kinds[1] and kinds[0] in _PLAIN) or all(kind in _SIGNED for kind in kinds)):
        return found
    if _same(found, function(one.handle.data, other.handle.data)):
        ways[id(one.type), id(other.type)] = _Way(function, found, (one.type, other.type))
    return found


def _moving(pointer):
    width = max(1, pointer.element_ty.primitive_bitwidth // 8)
    return lambda place, count: place + width * count.astype(np.uint64)


def _learn_number(ways, function, slow, one, number, moves):
    found = slow(one, number)
    zero_or_nan = type(number) is float and (number == 0 or number != number)  # two zeros are one key, and no nan is
    if zero_or_nan:
        return found
    if moves and one.dtype.is_ptr():
        function, constant = _moving(one.dtype), np.array([number], np.int64)
    elif (constant := _constant(one, number)) is None:
        return found
    if _same(found, function(one.handle.data, constant)):
        if len(ways) > _MOST:
            ways.clear()
        ways[id(one.type), type(number), number] = _Way(function, found, one.type, constant)
    return found


def _constant(one, number):
    """Return what ``number`` becomes beside ``one``, or None if ``one`` changes its type."""
    if one.dtype not in _WITH_NUMBERS:
        return None
    same, block = interpreter_semantic.binary_op_type_checking_impl(one, number)
    return block.handle.data.reshape(-1)[:1].copy() if same is one and block.dtype is one.dtype else None


def _learning_axes(slow):
    ways = {}

    def item(self, places):
        if type(places) is not tuple or any(each is not None and each != _ALL for each in places):
            return slow(self, places)
        key = (id(self.type), *(each is None for each in places))
        if (way := ways.get(key)) is not None:
            return _made(way, self.handle.data[places])
        found = slow(self, places)
        if _same(found, self.handle.data[places]):
            ways[key] = _Way(None, found, self.type)
        return found

    return item


_ALL = slice(None)


def quick_load(slow):
    """Return a load that learns from ``slow``: blocks of pointers, with any mask, and a number for what it hides."""
    ways = {}

    def load(pointer, mask=None, other=None, **more):
        if type(other) is tl.constexpr:
            other = other.value
        plain = (mask is None or type(mask) is tensor) and (other is None or type(other) in (int, float))
        if not plain or not pointer.type.is_block() or not more.keys() <= _HINTS or str(other) == "-0.0":
            return slow(pointer, mask=mask, other=other, **more)
        key = id(pointer.type), mask is not None and id(mask.type), type(other), other
        if (way := ways.get(key)) is not None:
            return _made(way, way.function(pointer, mask))
        found = slow(pointer, mask=mask, other=other, **more)
        element = pointer.type.scalar.element_ty
        if element.name != "int1":
            function = _reading(pointer.handle.data.shape, found.handle.data.dtype, element, other)
            if _same(found, function(pointer, mask)):
                ways[key] = _Way(function, found, (pointer.type, mask is not None and mask.type))
        return found

    return load


_HINTS = {"cache_modifier", "eviction_policy", "volatile"}
"""Arguments of a load that change nothing here."""


def _reading(shape, dtype, element, other):
    """Triton converts ``other``: a number may be kept as the bits of a type that numpy lacks."""
    whole, hidden = np.ones(shape, bool), np.zeros(shape, dtype)
    if other is not None:
        converted = interpreter_semantic.cast(interpreter_semantic.to_tensor(other), element)
        hidden.fill(converted.handle.data.item())

    def read(pointer, mask):
        seen = whole if mask is None else mask.handle.data
        seen = seen if seen.shape == shape else np.broadcast_to(seen, shape)
        return memory.load(pointer.handle.data, seen, hidden, dtype)

    return read


def _same(found, data):
    """Return whether ``data`` has the type, the shape and the bits of the tensor ``found``."""
    right = found.handle.data
    return (data.dtype, data.shape, data.tobytes()) == (right.dtype, right.shape, right.tobytes())
