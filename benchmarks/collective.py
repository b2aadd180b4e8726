"""Microseconds of the sum of all ranks' fp32 partials [rows, 4096], in a graph, beside what adds in its own order.

``python -m benchmarks.collective --world 2`` on a machine with so many GPUs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from preheat.backends.cuda.early import NO_MULTICAST

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)
WIDTH = 4096
CALLS, REPLAYS = 20, 20


def measure(rank: int, world: int, folder: str) -> None:
    """One process."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    from preheat.backends.cuda.backend import CudaBackend
    from preheat.backends.cuda.graph import capture
    from preheat.settings import Settings

    def microseconds(work: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(CALLS):
                work()

        calls()
        torch.cuda.synchronize()
        graph = capture(calls)
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS / REPLAYS

    backend = CudaBackend(rank)
    backend.prepare(Settings(device="cuda"), None)
    assert backend.sharing is not None
    ranks = backend.sharing.join(Path(folder), rank, world, lambda: None)
    group = dist.group.WORLD.group_name
    room = symm.empty(max(ROWS) * WIDTH, dtype=torch.float32, device=backend.device)
    handle = symm.rendezvous(room, group)
    if rank == 0:
        print(f"{world} GPUs, multicast pointer {handle.multicast_ptr}, {torch.cuda.get_device_name()}")
        print(f"{'rows':>6} {'KiB':>8} {'ours':>9} {'NCCL all_reduce':>16} {'NCCL bf16':>10} {'torch one-shot':>15}")
    for rows in ROWS:
        mine = ranks.place(rows, WIDTH)
        mine.normal_()
        half, there = mine.bfloat16(), room[: rows * WIDTH]
        times = [
            microseconds(partial(ranks.sum, mine, None, torch.bfloat16)),
            microseconds(partial(dist.all_reduce, mine)),
            microseconds(partial(dist.all_reduce, half)),
            microseconds(partial(torch.ops.symm_mem.one_shot_all_reduce, there, "sum", group)),
        ]
        if rank == 0:
            print(
                f"{rows:6} {rows * WIDTH // 256:8} " + "{:9.1f} {:16.1f} {:10.1f} {:15.1f}".format(*times), flush=True
            )
    os._exit(0)  # without the destructors of NCCL, which wait for each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    world = parser.parse_args().world
    import torch

    os.environ.update(NO_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (world, folder), nprocs=world)


if __name__ == "__main__":
    main()
