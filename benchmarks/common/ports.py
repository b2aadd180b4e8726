"""Free ports for servers that start later."""

from __future__ import annotations

import contextlib
import os
import random
import socket

RANGE = range(12_000, 32_000)
"""Below the ports of outgoing connections, which the system may give away before a server takes its own."""


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    own = random.Random(os.urandom(8))
    while True:
        port = own.choice(RANGE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_ports(count: int) -> list[int]:
    """Return free ports, each another one."""
    found = set[int]()
    while len(found) < count:
        found.add(free_port())
    return [*found]
