"""Microseconds of exchanges between two ranks on CPUs.

    python -m benchmarks ranks [--calls 300] [--output FOLDER]

They exchange through memory, by TCP as between nodes, and by gloo. Both ranks are processes on this machine, so TCP
goes over the loopback. The figure of gathering bytes of each rank is the best of several rounds; the figure of telling
a step is the median of the leader's calls. A step is 8 KiB of integers.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.report import RESULTS, parser, save
from preheat.backends.cpu.sharing import CpuSharing
from preheat.backends.rendezvous import OneNode
from preheat.parallel.sites import Memory, Network, Site
from preheat.parallel.wire import Door

SIZES = (4 << 10, 64 << 10, 1 << 20)
STEP_BYTES = 8 << 10
ROUNDS = 5
KEY = b"of a benchmark"


def nothing() -> None:
    """Do nothing: no rank has died."""


class Rank:
    """Rank 0 or 1, with a ``pipe`` to the other one, which shares ``folder``."""

    def __init__(self, rank: int, pipe: Connection, folder: Path) -> None:
        torch.set_num_threads(1)
        self.rank, self._pipe = rank, pipe
        self.doors = Door("127.0.0.1", KEY), Door("127.0.0.1", KEY)
        pipe.send([door.address for door in self.doors])
        theirs = pipe.recv()
        pairs = [(door.address, other) for door, other in zip(self.doors, theirs, strict=True)]
        networks = [Network(pair if rank == 0 else pair[::-1]) for pair in pairs]
        peers = [network.rendezvous(rank, door, nothing) for network, door in zip(networks, self.doors, strict=True)]
        (folder / "ranks").mkdir(exist_ok=True)
        self._links = {
            "memory": CpuSharing().join(OneNode(folder / "ranks", rank, 2), nothing).gather,
            "TCP": CpuSharing().join(peers[0], nothing).gather,
            "gloo": self._gloo(folder),
        }
        self._line = peers[1].peers[1 - rank]
        self._sites: dict[str, Site] = {"memory": Memory(folder, 2), "TCP": networks[1]}

    def _gloo(self, folder: Path) -> Callable[[Tensor], Tensor]:
        dist.init_process_group("gloo", f"file://{folder}/gloo", rank=self.rank, world_size=2)

        def gather(x: Tensor) -> Tensor:
            found = x.new_empty(2, len(x))
            dist.all_gather([found[0], found[1]], x)
            return found

        return gather

    def gathering(self, calls: int) -> list[dict[str, Any]]:
        """Return the microseconds of gathering each number of bytes."""
        figures = []
        for size in SIZES:
            x = torch.zeros(size, dtype=torch.uint8)
            figures.append({"bytes": size} | {way: self._best(link, x, calls) for way, link in self._links.items()})
        return figures

    def _best(self, link: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
        found = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            for _ in range(calls):
                link(x)
            found.append((time.perf_counter() - began) / calls * 1e6)
        return round(min(found[1:]), 1)

    def telling(self, calls: int) -> dict[str, float]:
        """Return the microseconds of telling a step.

        The other rank reads it before the next one is told.
        """
        figures, step, together = {}, np.zeros(STEP_BYTES, np.uint8), self._links["memory"]
        for way, site in self._sites.items():
            assert self._line is not None
            if self.rank == 0:
                tell: Callable[[], object] = partial(site.sender([self._line], nothing).send, ("step", step))
            else:
                tell = site.receiver(1, self._line).receive
            found = []
            for _ in range(calls):
                together(torch.zeros(1))
                began = time.perf_counter()
                tell()
                found.append((time.perf_counter() - began) * 1e6)
            figures[way] = round(median(found), 1)
        return figures


def work(number: int, pipe: Connection, folder: Path, calls: int, results: Connection) -> None:
    """Run one rank's process."""
    rank = Rank(number, pipe, folder)
    results.send((rank.gathering(calls), rank.telling(calls)))


def main(words: Sequence[str]) -> None:
    arguments = parser(__doc__, __name__)
    arguments.add_argument("--calls", type=int, default=300)
    arguments.add_argument(
        "--output", type=Path, default=RESULTS, help="the folder for ranks.json [benchmarks/results]"
    )
    given = arguments.parse_args(words)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        pipes, found = context.Pipe(), [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=work, args=(rank, pipes[rank], Path(name), given.calls, results), daemon=True)
            for rank, (_, results) in enumerate(found)
        ]
        for process in processes:
            process.start()
        gathering, telling = found[0][0].recv()
        for process in processes:
            process.join()
    for figures in gathering:
        print(
            f"gather {figures['bytes'] >> 10:5} KiB:", ", ".join(f"{way} {figures[way]}" for way in list(figures)[1:])
        )
    print("tell a step:     ", ", ".join(f"{way} {each}" for way, each in telling.items()))
    print(save("ranks", {"gather_us": gathering, "step_bytes": STEP_BYTES, "step_us": telling}, given.output))
