"""A stream goes on while the engine that writes it is killed: python examples/survive_a_kill.py

Starts a server with two replicas of the bundled model and streams a sampled answer. Kills one engine in the middle of
the answer with SIGKILL, then the other, and compares the answer with the uninterrupted one, in a minute on two cores.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BODY = {
    "prompt": "class Stack:\n",
    "max_tokens": 1200,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
}


def engines(server: int) -> list[int]:
    """Return the processes of the server's engines."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [
        int(pid) for pid in children if b"preheat.server.replicas.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def ready(port: int) -> int:
    """Return the number of engines that take requests, 0 while there is none."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return json.load(answer)["engines"] if answer.status == 200 else 0
    except OSError:
        return 0


def wait(port: int) -> None:
    """Wait until both engines take requests."""
    while ready(port) < 2:
        time.sleep(0.2)


def stream(port: int) -> Iterator[str]:
    """Yield the texts of a stream's events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    for line in connection.getresponse():
        if line.startswith(b":"):
            print(f"\n\033[33m{line.decode().strip()}\033[0m", flush=True)
        elif line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["text"]


def watched(port: int, server: int, kills: dict[int, int]) -> str:
    """Return a stream's text. At the events ``kills``, kill the engine of that place."""
    text, pids, last = "", engines(server), time.monotonic()
    for place, more in enumerate(stream(port)):
        if (pause := time.monotonic() - last) > 0.1 and place:
            print(f"\033[33m[{pause:.2f} s]\033[0m", end="", flush=True)
        print(more, end="", flush=True)
        text += more
        if place in kills:
            print(f"\033[31m[kill -9 {pids[kills[place]]}]\033[0m", end="", flush=True)
            os.kill(pids[kills[place]], signal.SIGKILL)
        last = time.monotonic()
    print()
    return text


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--data-parallel-size=2", "--num-threads=1", "--kv-cache-memory-bytes=268435456", "--log-level=warning"]
    command = [sys.executable, "-m", "preheat", "serve", "bundled", f"--port={port}", *options]
    server = subprocess.Popen(command)
    try:
        wait(port)
        print("--- without a fault")
        expected = watched(port, server.pid, {})
        print("--- both engines are killed, one after the other")
        got = watched(port, server.pid, {10: 0, 40: 1})
        print("--- equal, character by character" if got == expected else "--- DIFFERENT")
        return int(got != expected)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
