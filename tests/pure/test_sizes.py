"""The sizes of launches, beside Triton's functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton

from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2


@given(st.integers(0, 1 << 31), st.integers(1, 1 << 20))
def test_sizes_equal_triton_s(a, b):
    assert cdiv(a, b) == triton.cdiv(a, b)
    assert next_power_of_2(a) == triton.next_power_of_2(a)
