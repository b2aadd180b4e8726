"""A killed rank ends a server of several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.api.conftest import Server, serving
from tests.api.test_faults import ask, until_running
from tests.waiting import until

STREAMS = 64


def ranks_of(server: Server) -> list[int]:
    """Return the processes of the other ranks: the children of the engine's process."""
    return [
        int(pid) for pid in Path(f"/proc/{server.engine_pid}/task/{server.engine_pid}/children").read_text().split()
    ]


def shared_folders(pid: int) -> set[Path]:
    """Return the folders of the memory that a rank shares. Servers of other tests have folders of their own."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/dev/shm/preheat-") :]).parent for line in lines if "/dev/shm/preheat-" in line}


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


async def streams(server: Server, count: int, rank: int) -> list[bytes]:
    """Kill ``rank`` in the midst of ``count`` streams. Return the bytes that clients read."""
    body = {"prompt": "def f(x):", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    running = [asyncio.create_task(ask(server.port, body)) for _ in range(count)]
    if running:
        await until_running(server, count)
    os.kill(rank, signal.SIGKILL)
    return await asyncio.gather(*running)


@pytest.mark.parametrize("count", [STREAMS, 0], ids=["streams", "idle"])
def test_a_killed_rank(count: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"num_threads": 1, "kv_cache_memory_bytes": 256 << 20, "log_level": "error", "engine_restarts": 0}
    with serving("bundled", engine=None, log=log, tensor_parallel_size=2, **options) as server:
        (rank,) = ranks_of(server)
        engine, folders = server.engine_pid, shared_folders(rank)
        assert folders
        answers = asyncio.run(asyncio.wait_for(streams(server, count, rank), 120))
        with contextlib.suppress(OSError):  # the server may have ended by now
            assert server.get("/health").status == 503 or not count
        assert server.process.wait(60) == 1
    assert len(answers) == count
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200") and b'"type":"engine_dead"' in answer, answer[-300:]
        assert b"Rank 1 ended with status -9: it was killed" in answer, answer[-300:]
    assert b"Rank 1 ended with status -9" in log.read_bytes()
    assert until(lambda: gone(rank) and gone(engine))
    assert until(lambda: not any(each.exists() for each in folders))
