"""Triton's interpreter, mended in five places.

Scalars are arrays of one element, which numpy 2.4 no longer takes for integers; bfloat16 is cut off where a device
rounds, and multiplied as if its bits were integers; eight bits are rounded up, or without a carry, where a device
rounds to even; and a product adds in an order that follows the shapes, where a device goes through the inputs in order.
And it prepares triton.language anew for every function that a kernel calls, which is most of its time.
"""

from types import SimpleNamespace

import numpy as np
import torch
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
    interpreter.InterpreterBuilder.create_fp_to_fp = _mended_conversion
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


def _of_codes(codes):
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).float().numpy()


def _mended_cast(self, src, dst_type):
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_widened(src.data), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_rounded(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


FLOATS = {
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16, tl.float32: torch.float32,
}  # fmt: skip


def _mended_conversion(self, src, dst_type, rounding_mode):
    """As torch does it, and devices with these types."""
    narrow, wide = FLOATS[src.dtype.scalar], FLOATS[dst_type.scalar]
    bits = {1: np.uint8, 2: np.int16, 4: np.int32}
    given = torch.from_numpy(np.ascontiguousarray(src.data).view(bits[narrow.itemsize])).view(narrow).to(wide)
    found = given.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[wide.itemsize]).numpy()
    return interpreter.TensorHandle(found.view(interpreter._get_np_dtype(dst_type)), dst_type.scalar)


def _in_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    wide = {tl.bfloat16: _widened, tl.float8e4nv: _of_codes}
    a_data, b_data = (wide[x.dtype.scalar](x.data) if x.dtype.scalar in wide else x.data for x in (a, b))
    total = d.data.copy()
    for k in range(a_data.shape[1]):
        total += a_data[:, k, None] * b_data[k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _patch_all(fn):
    return _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call(self, *args, **kwargs):
    return self.rewrite()(*args, **kwargs)
