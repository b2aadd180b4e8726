"""Triton's interpreter, mended in four places.

Scalars are arrays of one element, which numpy 2.4 no longer takes for integers; bfloat16 is cut off where a device
rounds, and multiplied as if its bits were integers; and a product adds in an order that follows the shapes, where a
device goes through the inputs in order. And it prepares triton.language anew for every function that a kernel calls,
which is most of its time.
"""

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_cast = interpreter.InterpreterBuilder.cast_impl


def mend():
    interpreter._patch_lang = _patch_all
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._patch_lang_tensor = _patch
    interpreter.InterpreterBuilder.cast_impl = _mended_cast
    interpreter.InterpreterBuilder.create_dot = _in_order


def _patch(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(numbers):
    """bfloat16 nearest to ``numbers``, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def _mended_cast(self, src, dst_type):
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_widened(src.data), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_rounded(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def _in_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    a_data, b_data = (_widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    total = d.data.copy()
    for k in range(a_data.shape[1]):
        total += a_data[:, k, None] * b_data[k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _patch_all(fn):
    return _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call(self, *args, **kwargs):
    return self.rewrite()(*args, **kwargs)
