"""Weights in large pages: the numbers stay, and each tensor's memory is its own."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from preheat.backends.cpu.llvm.pages import LARGE_PAGE, in_large_pages
from preheat.model.residence import Dropped

SIZES = [1, 100, 3000, LARGE_PAGE, 5 * LARGE_PAGE + 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_have_the_numbers_and_memory_of_their_own(dtype):
    given = [(torch.randn(size // dtype.itemsize + 1, 2) * 50).to(dtype) for size in SIZES]
    found = [in_large_pages(each.t()) for each in given]
    for mine, right in zip(found, given, strict=True):
        assert torch.equal(mine, right.t())
        assert mine.is_contiguous() and mine.data_ptr() % 64 == 0
        assert mine.untyped_storage().nbytes() == mine.nbytes


def test_a_tensor_without_numbers_is_left_alone():
    assert in_large_pages(torch.empty(0, 3)).shape == (0, 3)


def test_memory_that_is_given_back_takes_no_neighbor_along():
    some = [in_large_pages(torch.full((5000,), float(number))) for number in range(3)]
    Dropped(some[1:2])
    assert bool((some[0] == 0).all()) and bool((some[2] == 2).all())
    some[1].fill_(7)
    assert bool((some[0] == 0).all()) and bool((some[1] == 7).all()) and bool((some[2] == 2).all())


def asks_for_large_pages(x: Tensor) -> bool:
    """Return whether the kernel was asked for large pages at the address of ``x``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            first, end = (int(each, 16) for each in head.split("-"))
            inside = first <= x.data_ptr() < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages")
@pytest.mark.parametrize("count", [1000, LARGE_PAGE])
def test_the_kernel_is_asked_for_large_pages(count):
    assert asks_for_large_pages(in_large_pages(torch.ones(count)))
    new = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)  # memory of the heap may have been asked for
    assert not asks_for_large_pages(new)
