"""Tensors in pieces of pinned memory: zeros, each in bytes of its own, whatever was there before."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cuda.device.pinned import ALIGNMENT, PIECE_BYTES, PinnedPieces

SIZES = st.one_of(st.integers(0, 5000), st.integers(PIECE_BYTES // 2 - 300, PIECE_BYTES + 2))


@given(st.lists(SIZES, min_size=1, max_size=6))
def test_tensors_share_no_byte(sizes):
    pieces, made = PinnedPieces(pinned=False), []
    for size in sizes:
        tensor = pieces.zeros(size, dtype=torch.uint8)
        assert tensor.shape == (size,) and not tensor.any()
        made.append(tensor.fill_(255))
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in made if len(tensor))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))


def test_small_tensors_share_a_piece_and_are_aligned():
    pieces = PinnedPieces(pinned=False)
    first, second = pieces.zeros(3, 5, dtype=torch.bfloat16), pieces.zeros(2, dtype=torch.int32)
    assert (first.shape, second.dtype) == ((3, 5), torch.int32)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
