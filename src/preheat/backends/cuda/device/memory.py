"""GPU memory that is given back and taken again at the same addresses, as captured graphs need.

The driver's virtual memory: a range of addresses stays reserved, and physical memory is mapped behind it, unmapped and
mapped again. torch's caching allocator takes its segments from here while a tag's pool is in use. So everything
allocated meanwhile can sleep, without a change to the code that allocates.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PINNED, DEVICE, READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

PIECE_BYTES = 1 << 30
"""Most bytes of one allocation of pinned memory."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = (
        ("type", c_int), ("handles", c_int), ("location", Location), ("win32", c_void_p), ("flags", AllocFlags),
    )  # fmt: skip


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Driver:
    """Virtual memory calls of libcuda; raise RuntimeError with the driver's name of an error."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        where = Location(DEVICE, device)
        self._prop = AllocationProp(type=PINNED, location=where)
        self._access = AccessDesc(where, READ_WRITE)

    def granularity(self) -> int:
        """Return the unit of sizes and addresses, in bytes."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), c_int(0))
        return size.value

    def reserve(self, size: int) -> int:
        """Reserve a range without memory behind it; return its address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def map(self, address: int, size: int) -> int:
        """Put new physical memory behind a range; return the memory's handle."""
        handle, place = c_uint64(), (c_uint64(address), c_size_t(size))
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._prop), c_uint64(0))
        try:
            self._call("cuMemMap", *place, c_size_t(0), handle, c_uint64(0))
            try:
                self._call("cuMemSetAccess", *place, byref(self._access), c_size_t(1))
            except RuntimeError:
                self._call("cuMemUnmap", *place)
                raise
        except RuntimeError:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def synchronize(self) -> None:
        """Wait until the device has finished all launches."""
        self._call("cuCtxSynchronize")

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Give physical memory back; the range stays reserved."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))
        self._call("cuMemRelease", c_uint64(handle))

    def free(self, address: int, size: int) -> None:
        """End the reservation of a range."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            text = ctypes.POINTER(c_char)()
            self._library.cuGetErrorName(code, byref(text))
            said = ctypes.string_at(text).decode() if text else str(code)
            raise RuntimeError(f"{name}: {said}")


@dataclass
class Segment:
    """A segment of torch's allocator; ``handle`` is None while no memory is behind its addresses."""

    tag: str
    address: int
    size: int
    handle: int | None

    def tensor(self, device: torch.device) -> Tensor:
        """Return the segment's bytes as uint8."""
        return torch.as_tensor(_Bytes(self.address, self.size), device=device)


class _Bytes:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


_ALLOCATORS: list[VirtualMemory] = []
"""Kept until the process ends: torch calls back when it gives segments up, in any order of garbage collection."""


class VirtualMemory:
    """Memory on ``device`` that may sleep, by tag; ``driver`` is like :class:`Driver`."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self._device, self._driver = device, driver or Driver(device.index or 0)
        self.segments: dict[int, Segment] = {}
        self._unit, self._tag = 0, ""
        self._pools: dict[str, Any] = {}
        self._host: dict[str, list[Tensor]] = {}
        self._asleep: dict[str, bool] = {}  # by tag, whether its contents are on the host
        self._malloc = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)(self._allocate)
        self._free = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)(self._release)
        self._allocator: Any = None
        _ALLOCATORS.append(self)

    @contextmanager
    def taking(self, tag: str) -> Iterator[None]:
        """Let this thread's allocations inside sleep under ``tag``."""
        if tag not in self._pools:
            if self._allocator is None:
                pointers = [ctypes.cast(each, c_void_p).value or 0 for each in (self._malloc, self._free)]
                self._allocator = torch._C._cuda_customAllocator(*pointers)
            self._pools[tag] = torch.cuda.MemPool(self._allocator)
        self._tag = tag
        with torch.cuda.use_mem_pool(self._pools[tag], self._device):
            yield

    def pin(self, tag: str) -> int:
        """Take pinned memory of the host for the contents of ``tag``, ahead of sleep; return its bytes."""
        pieces = self._pieces(tag)
        self._host[tag] = [torch.empty(len(piece), dtype=torch.uint8, pin_memory=True) for piece in pieces]
        return sum(map(len, pieces))

    def sleep(self, tag: str, *, keep: bool) -> None:
        """Give the memory of ``tag`` back; ``keep`` saves its contents on the host, else they are lost."""
        if keep:
            if tag not in self._host:
                self.pin(tag)
            for kept, piece in zip(self._host[tag], self._pieces(tag), strict=True):
                kept.copy_(piece, non_blocking=True)
        torch.cuda.synchronize(self._device)  # nothing reads or writes the memory from now on
        self._asleep[tag] = keep
        for segment in self._of(tag):
            assert segment.handle is not None
            self._driver.unmap(segment.address, segment.size, segment.handle)
            segment.handle = None

    def wake(self, tag: str) -> None:
        """Take the memory of ``tag`` again, at the same addresses.

        Contents that were not kept are undefined. Raises RuntimeError if the device has too little memory; then nothing
        is awake.
        """
        woken = []
        try:
            for segment in self._of(tag):
                segment.handle = self._driver.map(segment.address, segment.size)
                woken.append(segment)
        except RuntimeError:
            for segment in woken:
                assert segment.handle is not None
                self._driver.unmap(segment.address, segment.size, segment.handle)
                segment.handle = None
            raise
        if self._asleep.pop(tag):
            for kept, piece in zip(self._host[tag], self._pieces(tag), strict=True):
                piece.copy_(kept, non_blocking=True)
            torch.cuda.synchronize(self._device)

    def _of(self, tag: str) -> list[Segment]:
        return [each for each in self.segments.values() if each.tag == tag]

    def _pieces(self, tag: str) -> list[Tensor]:
        return [piece for each in self._of(tag) for piece in each.tensor(self._device).split(PIECE_BYTES)]

    def _allocate(self, size: int, device: int, stream: int | None) -> int | None:
        """Return a segment's address for torch's allocator; None if there is no memory."""
        del device, stream
        try:
            self._unit = self._unit or self._driver.granularity()
            whole = -(-size // self._unit) * self._unit
            address = int(self._driver.reserve(whole))
            try:
                handle = self._driver.map(address, whole)
            except RuntimeError:
                self._driver.free(address, whole)
                raise
        except RuntimeError as error:  # nothing may be raised through torch's allocator
            logger.error("Cannot allocate %d bytes of memory that sleep can release: %s", size, error)
            return None
        self.segments[address] = Segment(self._tag, address, whole, handle)
        return address

    def _release(self, address: int, size: int, device: int, stream: int | None) -> None:
        """Free a segment of torch's allocator, maybe still in use by kernels launched before."""
        del size, device, stream
        segment = self.segments.pop(address)
        if segment.handle is not None:
            self._driver.synchronize()
            self._driver.unmap(address, segment.size, segment.handle)
        self._driver.free(address, segment.size)
