"""The server of an engine's blocks: a thread that listens, and a thread for each peer.

A peer is heard only after it has proved the key. It then has to name a contract, a form and a key of blocks that are
equal to this engine's. A peer that is silent for :data:`IDLE_SECONDS` is left.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from queue import Empty

import msgspec

from preheat.errors import SettingsError
from preheat.kv_transfer.line import Line
from preheat.kv_transfer.messages import MOST_HELLO, MOST_WANT, Hello, Part, Want, Welcome, digest_of_block, why_not
from preheat.kv_transfer.sends import Answer, Sends, Staged

logger = logging.getLogger(__name__)

MOST_PEERS = 64
"""Most connections at a time; others are closed at once."""

PROOF_SECONDS = 5.0
IDLE_SECONDS = 60.0
BLOCK_SECONDS = 30.0
"""Most seconds until a block is on the host, and until the peer has it."""

_LOOK_SECONDS = 0.2


class BlockServer:
    """A server of the blocks of ``sends`` at ``host`` and ``port`` (0: a free one). Raises SettingsError."""

    def __init__(self, sends: Sends, host: str, port: int, key: bytes) -> None:
        try:
            self._listening = socket.create_server((host, port), backlog=MOST_PEERS)
        except OSError as error:
            raise SettingsError(
                f"kv_transfer_port: cannot listen on {host}:{port}: {error}", param="kv_transfer_port"
            ) from None
        self._listening.settimeout(_LOOK_SECONDS)
        self._sends, self._key = sends, key
        self.port: int = self._listening.getsockname()[1]
        self._closing, self._told = threading.Event(), ""
        self._peers: dict[threading.Thread, Line] = {}
        self._thread = threading.Thread(target=self._listen, name="block-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and stop listening."""
        self._closing.set()
        self._thread.join()
        for thread, line in [*self._peers.items()]:
            line.hang_up()
            thread.join()

    def _listen(self) -> None:
        with self._listening:
            while not self._closing.is_set():
                with suppress(TimeoutError):
                    end, _ = self._listening.accept()
                    self._admit(end)

    def _admit(self, end: socket.socket) -> None:
        for thread in [each for each in self._peers if not each.is_alive()]:
            del self._peers[thread]
        if len(self._peers) >= MOST_PEERS:
            end.close()
            return
        line = Line(end, PROOF_SECONDS)
        thread = threading.Thread(target=self._serve, args=[line], name="block-peer", daemon=True)
        self._peers[thread] = line
        thread.start()

    def _serve(self, line: Line) -> None:
        try:
            line.prove(self._key, first=True)
            if self._welcome(line):
                while not self._closing.is_set():
                    line.limit(IDLE_SECONDS)
                    self._answer(line, msgspec.msgpack.decode(line.recv_bytes(MOST_WANT), type=Want))
        except (OSError, EOFError, msgspec.MsgspecError, Empty) as error:
            logger.debug("A peer that takes blocks has left: %s", error)
        finally:
            line.close()

    def _welcome(self, line: Line) -> bool:
        """Hear a peer's Hello. Return whether it may have blocks."""
        hello = msgspec.msgpack.decode(line.recv_bytes(MOST_HELLO), type=Hello)
        why = why_not(self._sends.hello(), hello)
        line.send_bytes(msgspec.msgpack.encode(Welcome(why)))
        if why:
            self._sends.stats.refused_peers += 1
            level, self._told = logging.DEBUG if why == self._told else logging.WARNING, why
            logger.log(level, "A peer gets no blocks, because it differs: %s (here -> there)", why)
        return not why

    def _answer(self, line: Line, want: Want) -> None:
        answer = self._sends.ask(want.hashes)
        try:
            while True:
                line.limit(BLOCK_SECONDS)
                staged = self._next(answer)
                if isinstance(staged, str):
                    break
                self._send(line, answer, staged)
            if staged:
                line.send_bytes(msgspec.msgpack.encode(Part(end=staged)))
        finally:
            self._sends.leave(answer)

    def _next(self, answer: Answer) -> Staged | str:
        """Wait for the next block. Raise Empty if it is late, or if the server closes."""
        until = time.monotonic() + BLOCK_SECONDS
        while True:
            try:
                return answer.ready.get(timeout=_LOOK_SECONDS)
            except Empty:
                if self._closing.is_set() or time.monotonic() > until:
                    raise

    def _send(self, line: Line, answer: Answer, staged: Staged) -> None:
        try:
            staged.wait()
            line.send_bytes(msgspec.msgpack.encode(Part(staged.hash, digest_of_block(staged.view))))
            line.send_raw(staged.view)
        finally:
            self._sends.sent(answer, staged)
