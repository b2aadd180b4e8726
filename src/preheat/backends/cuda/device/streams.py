"""Streams and events of a GPU."""

from __future__ import annotations

import gc
from weakref import WeakValueDictionary

import torch

from preheat.errors import PreheatError

POOL_STREAMS = 32
"""Streams of torch for a device; torch hands them out in turns, even while in use."""

_OWNERS: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The live backend that launches and captures on a stream, by stream."""


def own_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """Return a stream on ``device`` that no other live owner has.

    torch frees cuBLAS's workspace of a stream when any graph captured on the stream is destroyed. Graphs of another
    engine on the same stream would then write to memory that is not theirs.

    Raises:
        PreheatError: all streams belong to live engines.
    """
    for left in reversed(range(2 * POOL_STREAMS)):
        stream = torch.cuda.Stream(device)
        if _OWNERS.get(stream.cuda_stream, owner) is owner:
            _OWNERS[stream.cuda_stream] = owner
            return stream
        if left == POOL_STREAMS:
            gc.collect()  # the parts of an engine refer to each other
    raise PreheatError(
        f"{POOL_STREAMS} engines are alive in this process, one for each stream that torch has: delete one of them"
    )


class CudaEvent:
    """See :class:`preheat.backends.base.device.DeviceEvent`; it is recorded on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()
