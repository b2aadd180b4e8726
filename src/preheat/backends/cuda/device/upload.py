"""Copies from the pages of a file to a device, in pieces, by several threads.

A tensor of a safetensors file is a view of the file's pages. A copy from pageable memory to a GPU goes through one
small buffer of the driver, at a fraction of the bus's rate. Here each thread copies a piece into pinned memory of its
own, and converts it on the way. The GPU fetches the piece on a stream of the thread, while the other threads copy other
pieces. Besides the model, no memory is larger than the pieces.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

THREADS = 8
PIECE_BYTES = 4 << 20


class Upload:
    """Copies to ``device``, at most ``threads`` pieces of ``piece_bytes`` at a time; a context manager."""

    def __init__(self, device: torch.device, threads: int = THREADS, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(threads):
            self._free.put(_Lane(device, piece_bytes))
        on_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(threads, "upload", on_device)  # else each thread would wake the first GPU

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy ``source``, on the host, into ``out``; returns when the device has everything.

        ``out`` is contiguous and has the same shape; its dtype may differ.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # earlier work may still use the memory
        length = self._piece_bytes // out.element_size()
        pieces = zip(torch.split(source.reshape(-1), length), torch.split(out.view(-1), length), strict=True)
        for moved in [self._pool.submit(self._move, *piece) for piece in pieces]:
            moved.result()

    def _move(self, source: Tensor, out: Tensor) -> None:
        lane = self._free.get()
        try:
            lane.move(source, out)
        finally:
            self._free.put(lane)


class _Lane:
    """Room for one thread's piece and, on a GPU, a stream."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        cuda = device.type == "cuda"
        self._room = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(device) if cuda else None

    def move(self, source: Tensor, out: Tensor) -> None:
        """Copy ``source`` into ``out`` and wait, so that the room is free again."""
        staged = self._room[: out.numel() * out.element_size()].view(out.dtype)
        staged.copy_(source)
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            out.copy_(staged, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
