"""The listening socket: a TCP port, or a path with ``--uds``."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.utils.files import CONFIG_BYTES, regular_file, shown, why_unread

BACKLOG = 2048


def check_certificates(settings: Settings) -> None:
    """Raise SettingsError unless the TLS files are regular and readable.

    The TLS library would wait for a pipe.
    """
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if (path := getattr(settings, name)) is not None:
            try:
                regular_file(path, most=CONFIG_BYTES)
            except OSError as error:
                raise SettingsError(f"{name} {shown(path)} cannot be read: {why_unread(error)}", param=name) from None


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket. Raises SettingsError if it cannot be opened."""
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
    """Remove the Unix socket of :func:`listen` from the file system."""
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)


def _listen_at(path: str) -> socket.socket:
    """Listen on a Unix socket at ``path``, and replace an abandoned one. Raises SettingsError."""
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            Path(path).unlink()
        unix.bind(path)
        unix.listen(BACKLOG)
    except OSError as error:
        unix.close()
        said = (
            "it is a file or a folder and no socket: name another path" if _is_taken(path) else error.strerror or error
        )
        raise SettingsError(f"Cannot listen on {shown(path)}: {said}", param="uds") from error
    return unix


def _is_taken(path: str) -> bool:
    """Return whether another thing than a socket is at ``path``."""
    with contextlib.suppress(OSError):
        return not stat.S_ISSOCK(os.lstat(path).st_mode)
    return False


def _is_abandoned(path: str) -> bool:
    """Return whether ``path`` is a socket without a server."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(Path(path).stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    return True
    return False
