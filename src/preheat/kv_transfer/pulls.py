"""The pulls of requests that wait for their blocks, as the engine's loop sees them.

Only blocks that the cache and the host lack are pulled. They arrive in held places of the host tier. The loop then
names the places by the blocks' hashes, and the prefix cache brings the blocks to the device, like evicted ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from preheat.core import KvTransferStats, Request
from preheat.kv_transfer.client import Pull, Pulled, Target
from preheat.kv_transfer.messages import Hello
from preheat.schedule.adapters import Adapter
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.sequence import Sequence

logger = logging.getLogger(__name__)

THREADS = 8
"""Most pulls at a time."""


class Arrivals(Protocol):
    """Places on the host for blocks that arrive."""

    def targets(self, hashes: list[bytes]) -> list[Target]:
        """Return held places for as many of the blocks, from the first on, as there are."""

    def keep(self, target: Target) -> None:
        """Name a block that arrived by its hash."""

    def release(self, place: int) -> None:
        """Give a held place back."""


@dataclass(eq=False)
class _Waiting:
    pull: Pull
    done: Future[Pulled]
    request: Request | None
    """None once the request has ended."""


class Pulls:
    """Pulls of blocks into ``arrivals``. ``hello`` returns this engine's Hello; a pull takes at most ``seconds``."""

    def __init__(
        self, arrivals: Arrivals, prefix: PrefixCache, hello: Callable[[], Hello], *, key: bytes, seconds: float
    ) -> None:
        self._arrivals, self._prefix, self._hello = arrivals, prefix, hello
        self._key, self._seconds = key, seconds
        self.stats = KvTransferStats()
        self._threads = ThreadPoolExecutor(THREADS, "block-pulls")
        self._waiting: list[_Waiting] = []
        self._told: set[tuple[object, ...]] = set()

    @property
    def key(self) -> bytes:
        """The key that peers prove."""
        return self._key

    @property
    def pending(self) -> bool:
        """Whether a request waits for its blocks."""
        return any(each.request is not None for each in self._waiting)

    def start(self, request: Request, adapter: Adapter | None) -> bool:
        """Begin to pull the blocks of ``request``. Return False if it need not wait."""
        if (source := request.source) is None:
            return False
        self._reap(forgotten=True)  # their places may be taken
        sequence, most = Sequence(request, adapter=adapter), source.tokens // self._prefix.pool.block_size
        targets = self._arrivals.targets(self._prefix.lacking(sequence, most))
        if not targets:
            return False
        pull = Pull(source, self._key, self._hello(), targets, self._seconds)
        self._waiting.append(_Waiting(pull, self._threads.submit(pull.run), request))
        return True

    def take(self, timeout: float = 0.0) -> list[Request]:
        """Return the requests that wait no longer; wait up to ``timeout`` seconds for the first one."""
        if timeout and self._waiting:
            wait([each.done for each in self._waiting], timeout, FIRST_COMPLETED)
        return self._reap()

    def cancel(self, request_id: int) -> bool:
        """Forget a request. Return False if it does not wait here."""
        for each in self._waiting:
            if each.request is not None and each.request.id == request_id:
                each.request = None
                each.pull.stop()
                return True
        return False

    def cancel_all(self) -> list[int]:
        """Forget all requests. Return their ids."""
        ids = [each.request.id for each in self._waiting if each.request is not None]
        for id in ids:
            self.cancel(id)
        return ids

    def close(self) -> None:
        """End all pulls."""
        self.cancel_all()
        self._threads.shutdown(cancel_futures=True)

    def _reap(self, *, forgotten: bool = False) -> list[Request]:
        """Take the blocks of pulls that have ended, and return their requests.

        With ``forgotten`` only pulls count that nobody waits for.
        """
        ended = [each for each in self._waiting if each.done.done() and not (forgotten and each.request)]
        for each in ended:
            self._waiting.remove(each)
            self._settle(each.pull, each.done.result())
        return [each.request for each in ended if each.request is not None]

    def _settle(self, pull: Pull, found: Pulled) -> None:
        for target in pull.targets[: found.blocks]:
            self._arrivals.keep(target)
        for target in pull.targets[found.blocks :]:
            self._arrivals.release(target.place)
        stats = self.stats
        stats.pulls += 1
        stats.received_blocks += found.blocks
        stats.received_bytes += found.blocks * pull.hello.layout.block_bytes
        stats.pull_seconds += found.seconds
        if found.reason and not pull.stopped:
            stats.failures[found.reason] = stats.failures.get(found.reason, 0) + 1
            self._tell(pull, found)

    def _tell(self, pull: Pull, found: Pulled) -> None:
        """Log the end of a pull, once for each peer and reason."""
        key = pull.source.host, pull.source.port, found.reason
        level = logging.DEBUG if key in self._told else logging.WARNING
        self._told.add(key)
        logger.log(
            level, "%d of %d blocks came from %s:%d (%s: %s); the others are computed",
            found.blocks, len(pull.targets), pull.source.host, pull.source.port, found.reason, found.why,
        )  # fmt: skip
