"""Microseconds of the sum of all ranks' partials, beside NCCL and torch.

    python -m benchmarks collective [--world 2] [--output FOLDER]

Partials are fp32 [rows, 4096]; calls run in a graph. Both of our sums have a stated order: over peer memory, and with
`--disable-custom-all-reduce` gathered by NCCL, then added. NCCL and torch add in their own order. Of many rows, sums
are copied to the rank that adds them while others are computed; "landed" is the time of what is left to do. "joined"
are the sums with residual and norm in the same launch, of many rows again what is left to do. The machine needs
``--world`` GPUs.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.common.report import RESULTS, parser, save
from preheat.backends.cuda.device.early import NO_MULTICAST

if TYPE_CHECKING:
    from preheat.backends.cuda.ranks.collective import RankSums

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
WIDTH = 4096
CALLS, REPLAYS = 20, 20
AT_ONCE = 512
"""Rows of 4,096 outputs whose tiles keep a Hopper GPU busy once."""


NAMES = ("peer memory", "landed", "joined", "NCCL and tree", "NCCL all_reduce", "NCCL bf16", "torch one-shot")


def microseconds(work: Callable[[], object]) -> float:
    """Return microseconds of one call, from many calls in a graph."""
    from preheat.backends.cuda.device.graph import capture

    def calls() -> None:
        for _ in range(CALLS):
            work()

    calls()
    torch.cuda.synchronize()
    graph = capture(calls)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / CALLS / REPLAYS


def landed(ranks: RankSums, mine: torch.Tensor) -> float | None:
    """Return microseconds of the sum of parts that lie where they are added; None for few rows."""
    rows, size = mine.shape
    out, carrier = mine.bfloat16(), ranks.carrier
    assert carrier is not None, "the ranks exchange through NCCL"
    found = carrier.landings(rows, size, AT_ONCE)

    def work() -> None:
        for landing in found:
            carrier.add(landing, None, out)

    return microseconds(work) if found else None


def joined(ranks: RankSums, mine: torch.Tensor) -> float | None:
    """Return microseconds of the sum with residual and norm; None where these are launches of their own."""
    from preheat.backends.cuda.pointwise.norm import CudaNorm

    (rows, size), carrier, residual = mine.shape, ranks.carrier, mine.bfloat16()
    norm, to = CudaNorm(torch.ones_like(residual[0]), 1e-5), torch.empty_like(residual)
    at_once = ranks.joining(rows, size) or ranks.sharing(rows, size, residual.dtype)
    found = [] if at_once is not None or carrier is None else carrier.landings(rows, size, AT_ONCE)

    def work() -> None:
        if at_once is not None:
            at_once(mine, None, norm, residual, None)
        for landing in found:
            assert carrier is not None
            carrier.norm(landing, None, norm, residual, to, None)

    return microseconds(work) if at_once is not None or found else None


def measure(rank: int, world: int, folder: str, output: str) -> None:
    """Measure as one process of the group.

    Rank 0 prints and saves the figures.
    """
    import torch.distributed._symmetric_memory as symm

    from preheat.backends.cuda.backend import CudaBackend
    from preheat.backends.cuda.ranks.collective import Nccl
    from preheat.backends.cuda.ranks.peer import meet
    from preheat.backends.rendezvous import OneNode
    from preheat.settings import Settings

    backend = CudaBackend(rank)
    backend.prepare(Settings(device="cuda"), "eager", None)
    nccl = Nccl(backend.device, OneNode(Path(folder), rank, world), lambda: None)
    ranks = meet(nccl, backend.device)
    group = dist.distributed_c10d._get_default_group().group_name
    room = symm.empty(max(ROWS) * WIDTH, dtype=torch.float32, device=backend.device)
    handle = symm.rendezvous(room, group)
    if rank == 0:
        print(f"{world} GPUs, multicast pointer {handle.multicast_ptr}, {torch.cuda.get_device_name()}")
        print(f"{'rows':>6} {'KiB':>8}" + "".join(f"{name:>16}" for name in NAMES))
    figures = []
    for rows in ROWS:
        mine = torch.randn(rows, WIDTH, device=backend.device)
        half, there = mine.bfloat16(), room[: rows * WIDTH]
        times = [
            microseconds(partial(ranks.sum, mine, None, torch.bfloat16)),
            landed(ranks, mine),
            joined(ranks, mine),
            microseconds(partial(nccl.sum, mine, None, torch.bfloat16)),
            microseconds(partial(dist.all_reduce, mine)),
            microseconds(partial(dist.all_reduce, half)),
            microseconds(partial(torch.ops.symm_mem.one_shot_all_reduce, there, "sum", group)),
        ]
        figures.append({"rows": rows, **dict(zip(NAMES, times, strict=True))})
        if rank == 0:
            print(
                f"{rows:6} {rows * WIDTH // 256:8}" + "".join(f"{each or math.nan:16.1f}" for each in times), flush=True
            )
    if rank == 0:
        print(save("collective", {"world": world, "microseconds": figures}, Path(output)), flush=True)
    os._exit(0)  # skips the destructors of NCCL: they wait for each other


def main(words: Sequence[str]) -> None:
    arguments = parser(__doc__, __name__)
    arguments.add_argument("--world", type=int, default=2)
    arguments.add_argument("--output", default=str(RESULTS), help="the folder for collective.json [benchmarks/results]")
    given = arguments.parse_args(words)
    os.environ.update(NO_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (given.world, folder, given.output), nprocs=given.world)  # type: ignore[no-untyped-call]
