"""Tests in this folder run Triton kernels in its interpreter, on the CPU. It must be told before Triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter  # noqa: E402

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor, scope):
    """The interpreter keeps a scalar as an array of one element, which numpy 2.4 no longer takes for an integer."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
