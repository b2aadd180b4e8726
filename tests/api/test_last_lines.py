"""A server with an unread log and a wait without end still serves, and leaves in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.api.conftest import Server, serving

SECONDS = 60.0
"""Seconds to leave, on a machine with other work. The server's own limits are 2 s twice; hung work never ends."""


def helpers(server: Server) -> list[int]:
    """Return the processes that render chat templates."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if b"preheat.utils.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_log_that_is_not_read_and_a_thread_that_hangs(folder: Path) -> None:
    reading, writing = os.pipe()
    log = Path(f"/dev/fd/{writing}")
    with serving(str(folder), log=log, access_log="text", log_level="info", skip_warmup=False) as server:
        for number in range(200):  # a pipe holds 64 KiB; a boot's own lines take 12 to 15 of them
            assert server.get(f"/{'x' * 5_000}%0aINFO%20made%20up%1b%5b2J{number}").status == 404
        assert server.get("/health").status == 200
        for pid in (stopped := helpers(server)):
            os.kill(pid, signal.SIGSTOP)
        assert len(stopped) == 2
        body = {"messages": [{"role": "user", "content": "never shown"}]}
        client = threading.Thread(target=_post, args=[server, body], daemon=True)
        client.start()
        try:
            time.sleep(0.5)
            assert client.is_alive() and server.get("/health").status == 200
            leave(server, signal.SIGTERM, 0)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
        client.join(60)
    os.close(writing)
    os.set_blocking(reading, False)
    lines = os.read(reading, 1 << 20).decode().splitlines()
    os.close(reading)
    assert sum("made up" in line for line in lines) >= 5
    assert all(line.isprintable() and line.startswith(("INFO ", "WARNING ")) for line in lines[:-1])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_boot_that_takes_long_is_left_at_once(folder: Path, tmp_path: Path, number: int, status: int) -> None:
    """A signal ends a boot at once.

    Here the boot tries out a chat template that does not end.
    """
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with serving(str(folder), wait=False, chat_template=template, log=tmp_path / "log") as server:
        server.wait_until_open()
        leave(server, number, status)


def leave(server: Server, number: int, status: int) -> None:
    server.process.send_signal(number)
    assert server.process.wait(SECONDS) == status


def _post(server: Server, body: object) -> None:
    with suppress(OSError):
        server.post("/v1/chat/completions", body)
