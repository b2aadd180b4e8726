"""Publication of prefix cache events over ZeroMQ, as in vLLM.

A message has a topic, a sequence number and a batch.

A thread sends the batches. Sequence numbers have 8 bytes and count from 0. A subscriber that misses a batch may ask for
it again on the replay socket. The request is the first wanted number; each answer has a number and a batch, and the
last answer has the number -1.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque

import msgspec
import zmq

from preheat.configs.kv_events import KvEventsConfig
from preheat.errors import SettingsError
from preheat.schedule.kv_events import KvEventBatch

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_TICK_SECONDS = 0.05


class KvPublisher:
    """Publisher that runs until it is closed.

    Raises SettingsError for an endpoint that cannot be bound.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._topic, self._encoder, self._number = config.topic.encode(), msgspec.msgpack.Encoder(), 0
        self._queue: queue.Queue[tuple[int, KvEventBatch]] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._out = self._bound(zmq.PUB, config.endpoint, config.hwm)
        self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, config.hwm) if config.replay_endpoint else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(
                f"kv_events_config: cannot listen on {endpoint}: {error}", param="kv_events_config"
            ) from None
        return socket

    def publish(self, batch: KvEventBatch) -> None:
        """Queue a batch, and never wait. If the queue is full the batch is lost, and its number is missing."""
        try:
            self._queue.put_nowait((self._number, batch))
        except queue.Full:
            logger.warning(
                "Batch %d of KV events is lost: max_queue_size batches are waiting; raise it in kv_events_config",
                self._number,
            )
        self._number += 1

    def close(self) -> None:
        """Stop, once all queued batches are sent."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            try:
                number, batch = self._queue.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                pass
            else:
                frames = number.to_bytes(8, "big"), self._encoder.encode(batch)
                self._sent.append(frames)
                self._out.send_multipart((self._topic, *frames))
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches that a client requests."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning(
                "A request to replay KV events is ignored: it has %d frames, and must be 3 frames with a number of 8 "
                "bytes in the last",
                len(frames),
            )
            return
        for number, payload in list(self._sent):
            if number >= frames[2]:
                replay.send_multipart((frames[0], b"", number, payload))
        replay.send_multipart((frames[0], b"", END, b""))
