"""Pulling of blocks from another engine, in a thread.

A block counts only if its digest agrees. Whatever fails ends the pull, and the blocks so far are good: the others are
computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from preheat.core import BlockSource
from preheat.kv_transfer.line import Line
from preheat.kv_transfer.messages import MOST_HELLO, MOST_PART, Hello, Part, Want, Welcome, digest_of_block

Reason = Literal["", "missing", "refused", "lost", "corrupt"]


class Target(NamedTuple):
    """A wanted block: its hash, its place on the host, and the memory for its bytes.

    ``wait`` returns once no earlier copy reads the place.
    """

    hash: bytes
    place: int
    view: memoryview
    wait: Callable[[], None]


@dataclass
class Pulled:
    """The outcome of a pull: the number of blocks that arrived, from the first on, and the reason for its end."""

    blocks: int = 0
    seconds: float = 0.0
    reason: Reason = ""
    why: str = ""


@dataclass
class Pull:
    """One pull of ``targets`` from ``source`` within ``seconds`` from now; :meth:`stop` ends it early.

    The time for which it waits for a thread counts, so a peer that is frozen delays no request for longer.
    """

    source: BlockSource
    key: bytes
    hello: Hello
    targets: Sequence[Target]
    seconds: float
    stopped: bool = False
    began: float = field(default_factory=time.monotonic)
    _line: Line | None = field(default=None, repr=False)

    def stop(self) -> None:
        """End the pull soon; any thread may call it."""
        self.stopped = True
        if (line := self._line) is not None:
            line.hang_up()

    def run(self) -> Pulled:
        """Pull, and return the outcome. Raise nothing that a peer can cause."""
        found, left = Pulled(), self.began + self.seconds - time.monotonic()
        try:
            if left <= 0 or self.stopped:
                raise TimeoutError("other pulls took all the time")
            self._line = Line.to(self.source.host, self.source.port, left)
            self._pull(self._line, found)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            found.reason, found.why = "lost", str(error) or type(error).__name__
        finally:
            if self._line is not None:
                self._line.close()
            found.seconds = time.monotonic() - self.began
        return found

    def _pull(self, line: Line, found: Pulled) -> None:
        line.prove(self.key, first=False)
        line.send_bytes(msgspec.msgpack.encode(self.hello))
        welcome = msgspec.msgpack.decode(line.recv_bytes(MOST_HELLO), type=Welcome)
        if welcome.refused:
            found.reason, found.why = "refused", welcome.refused
            return
        line.send_bytes(msgspec.msgpack.encode(Want([each.hash for each in self.targets])))
        for target in self.targets:
            part = msgspec.msgpack.decode(line.recv_bytes(MOST_PART), type=Part)
            if not part.hash:
                found.reason, found.why = "missing", part.end
                return
            if part.hash != target.hash:
                raise OSError("the peer sent another block than the wanted one")
            target.wait()
            line.receive_into(target.view)
            if digest_of_block(target.view) != part.digest:
                found.reason, found.why = "corrupt", f"block {target.hash.hex()} arrived with other bytes"
                return
            if self.stopped:
                raise OSError("the request ended")
            found.blocks += 1
