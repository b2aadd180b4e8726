"""The socket that the server listens on: a TCP port, or with ``--uds`` a path."""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

from preheat.errors import SettingsError
from preheat.settings import Settings

BACKLOG = 2048


def listen(settings: Settings) -> socket.socket:
    """The open socket. Raises SettingsError if it cannot be opened."""
    if settings.uds is not None:
        return _listen_at(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}", param="port"
        ) from error


def unlisten(settings: Settings) -> None:
    """Remove what :func:`listen` left in the file system."""
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)


def _listen_at(path: str) -> socket.socket:
    """A Unix socket at ``path``, in place of one that nobody listens to any more."""
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            Path(path).unlink()
        unix.bind(path)
        unix.listen(BACKLOG)
    except OSError as error:
        unix.close()
        raise SettingsError(f"Cannot listen on {path}: {error.strerror or error}", param="uds") from error
    return unix


def _is_abandoned(path: str) -> bool:
    """Whether ``path`` is a socket whose server has gone."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(Path(path).stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    return True
    return False
