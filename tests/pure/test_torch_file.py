"""A client's tensor file is read in bounded time.

The objects of its pickle stay small at every step.
"""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.utils import torch_file
from preheat.utils.torch_file import MAX_ENTRIES, MAX_PARTS, MAX_PICKLE, read_tensor

DOUBLE = b"q\0h\0\x86"  # pairs the top of the stack with itself
SMALL = [b"K\1", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"X\1\0\0\0x", b")", b"N", b"ccollections\nOrderedDict\n"]
OPCODES = [*SMALL, b"(", b"t", b"\x85", b"\x86", b"\x87", b"q\0", b"q\1", b"h\0", b"h\1", b"Q", b"R", DOUBLE]


def tensor_file(shape: bytes, stride: bytes = b"(K\2K\1t", offset: bytes = b"K\0", entries: int = 0) -> bytes:
    """Return a file of ``torch.save`` with these parts of the pickle."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ"
    pickle = b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + stride
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a/data.pkl", pickle + b"\x89ccollections\nOrderedDict\n)RtR.")
        archive.writestr("a/data/0", bytes(64))
        for number in range(entries):
            archive.writestr(f"a/{number}", b"")
    return made.getvalue()


def number(bits: int) -> bytes:
    size = bits // 8 + 1
    return b"\x8a" + bytes([size]) + (2**bits - 1).to_bytes(size, "little")


def many(item: bytes, count: int) -> bytes:
    """Return a tuple with ``count`` references to one ``item``."""
    return b"(" + item + b"q\5" + b"h\5" * (count - 1) + b"t"


def test_a_small_one_is_read() -> None:
    found = read_tensor(tensor_file(b"(K\3K\2t"))
    assert (found.dtype, found.shape, found.data) == ("float32", (3, 2), bytes(24))


LARGE = {
    "pairs in the shape": tensor_file(b")" + DOUBLE * 60),
    "pairs in the stride": tensor_file(b"(K\3K\2t", b")" + DOUBLE * 60),
    "pairs in the offset": tensor_file(b"(K\3K\2t", offset=b")" + DOUBLE * 60),
    "pairs behind the stride": tensor_file(b"(K\3K\2t", b"(K\2K\1t" + b")" + DOUBLE * 60),
    "sides": tensor_file(many(b"K\1", MAX_PARTS)),
    "many sides": tensor_file(many(number(2000), 1000)),
    "long sides": tensor_file(b"(" + number(64) + b"K\2t"),
    "long offset": tensor_file(b"(K\3K\2t", offset=number(2000)),
    "long stride": tensor_file(b"(K\3K\2t", b"(" + number(1000) + b"K\1t"),
    "a deep name": tensor_file(b")" + b"Q" * 2000),
    "a deep call": tensor_file(b"ccollections\nOrderedDict\n" * 70 + b")" + b"R" * 70),
    "marks": tensor_file(b"(" * 1000 + b"t" * 1000),
    "a long pickle": tensor_file(b"K\1" * MAX_PICKLE),
    "many entries": tensor_file(b"(K\3K\2t", entries=MAX_ENTRIES),
}


@pytest.mark.parametrize("what", LARGE)
def test_large_pickles_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"larger than|few parts|one tensor|one plain tensor"):
        read_tensor(LARGE[what])


@given(program=st.lists(st.sampled_from(OPCODES), max_size=200).map(b"".join))
def test_nothing_large_is_ever_made(program: bytes) -> None:
    seen, right = [], torch_file._small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_file, "_small", lambda value: (seen.append(right(value)), value)[1])
        try:
            seen.append(torch_file._followed(program + b"."))
        except ValueError:
            pass
    assert all(torch_file._parts(value) <= MAX_PARTS for value in seen)


def test_a_pair_of_pairs_would_be_large() -> None:
    """Control: one pair of pairs more would be too large, and is refused."""
    assert torch_file._parts(torch_file._followed(b")" + DOUBLE * 5 + b".")) == MAX_PARTS - 1
    with pytest.raises(ValueError, match="larger than"):
        torch_file._followed(b")" + DOUBLE * 6 + b".")
