"""From the pages of a file to a device, in pieces, by several threads.

A tensor of a safetensors file is a view of the file's pages. A copy from pageable memory to a GPU goes through one
small buffer of the driver's, at a fraction of what the bus can do. Here each thread copies a piece into pinned memory
of its own (and converts it on the way), from where the GPU fetches it on a stream of its own, while the other threads
copy theirs. Nothing larger than the pieces is ever in memory besides the model.
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
    """Copies to ``device``, at most ``threads`` pieces of ``piece_bytes`` at a time; use it as a context manager."""

    def __init__(self, device: torch.device, threads: int = THREADS, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(threads):
            self._free.put(_Lane(device, piece_bytes))
        on_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(threads, "upload", on_device)  # else each would wake the first GPU

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy ``source``, on the host, into ``out`` of the same shape, in the dtype of ``out``, which is contiguous.
        The device has it all when this returns.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the previous user of this memory is done with it
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
    """What one thread needs: room for a piece, and on a GPU a stream."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        cuda = device.type == "cuda"
        self._room = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(device) if cuda else None

    def move(self, source: Tensor, out: Tensor) -> None:
        """Wait until ``out`` holds ``source``, so that the room is free again."""
        staged = self._room[: out.numel() * out.element_size()].view(out.dtype)
        staged.copy_(source)
        with torch.cuda.stream(self._stream):  # nothing, without a stream
            out.copy_(staged, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
