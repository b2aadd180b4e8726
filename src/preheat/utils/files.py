"""Open files that a client, a checkpoint or an operator names.

A path is resolved before it is opened, and only a regular file is opened. A pipe or a device is refused at once, since
opening it might wait for ever. A file that is read whole has a limit. All errors are OSErrors with the reason in
``strerror``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from preheat.errors import ModelError

CONFIG_BYTES = 16 << 20
"""Most bytes that are read of a configuration, a template or a list of names."""

TABLE_BYTES = 512 << 20
"""Most bytes that are read of a tokenizer, of an index of tensors or of a record."""

PIPE_SECONDS = 30.0
"""Longest silence of the command that writes to a shell's pipe."""

_PIECE_BYTES = 1 << 16
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_PATH_SHOWN = 200


def resolved(path: str | Path, below: str | Path | None = None) -> Path:
    """Return ``path`` without links.

    Raises OSError unless it lies ``below`` the folder of this name, and only then unless it exists. So an error tells
    nothing about other folders.
    """
    try:
        if below is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(below)):
            raise OSError(errno.EACCES, "it is outside the folder from which files may be read", shown(path))
        return Path(os.path.realpath(path, strict=True))
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it cannot be a path: {error}", shown(path)) from None


def regular_file(path: str | Path, below: str | Path | None = None, *, most: int | None = None) -> Path:
    """Return the regular file behind ``path``, of at most ``most`` bytes, for a library to open."""
    if below is None and "\0" not in str(path):
        _check(os.stat(path), path, most)  # a shell's pipe is no file, and may have no path behind its links
    found = resolved(path, below)
    _check(os.stat(found), path, most)
    return found


def open_file(path: str | Path, below: str | Path | None = None, *, most: int | None = None) -> BinaryIO:
    """Open the regular file behind ``path``, of at most ``most`` bytes."""
    descriptor = os.open(regular_file(path, below), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _check(os.fstat(descriptor), path, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | Path, below: str | Path | None = None, *, most: int = CONFIG_BYTES) -> bytes:
    """Return all bytes of the regular file behind ``path``, at most ``most``."""
    with open_file(path, below, most=most) as file:
        known = os.fstat(file.fileno()).st_size  # a read allocates all bytes that it asks for
        data = file.read(min(known, most) + 1)
        if len(data) > known:  # the file has grown, or never told its size
            data += file.read(most + 1 - len(data))
    if len(data) > most:
        raise _too_large(path, most)
    return data


def read_given(path: str, *, most: int = CONFIG_BYTES) -> str:
    """Return the text in a file that the command line names, or in a pipe that the shell has opened.

    ``~`` is the user's folder, which a shell leaves in ``--config=~/file``. A pipe with a name is refused, as it may
    have no writer. Raises OSError if the writer of a shell's pipe is silent for :data:`PIPE_SECONDS`.
    """
    path = os.path.expanduser(path)
    if "\0" in path or not is_shells_pipe(path):
        return read_text(path, most=most)
    data = bytearray()
    with open(path, "rb", 0) as pipe:
        while select.select([pipe], [], [], PIPE_SECONDS)[0]:
            if not (piece := pipe.read(_PIECE_BYTES)):
                return data.decode("utf-8-sig")
            data += piece
            if len(data) > most:
                raise _too_large(path, most)
    raise OSError(errno.ETIMEDOUT, f"nothing came through the pipe for {PIPE_SECONDS:g} s", shown(path))


def is_shells_pipe(path: str) -> bool:
    """Return whether the path of an open file, as of ``<(...)``, leads to a pipe without a name."""
    return stat.S_ISFIFO(os.stat(path).st_mode) and not os.path.exists(os.path.realpath(path))


def output_file(path: str | Path) -> BinaryIO:
    """Open ``path``, which the command line names, to be written from its beginning: a file, a device or a pipe.

    A pipe without a reader is refused, since opening it might wait for ever.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it cannot be a path: {error}", shown(path)) from None
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "it is a pipe that nobody reads, or a socket", shown(path)) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb", 0)


def write_output(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``, opened by :func:`output_file`."""
    with output_file(path) as file:
        data = memoryview(text.encode())
        while data:
            data = data[file.write(data) :]


def new_file(path: str | Path) -> BinaryIO:
    """Open a new file to be written. Raises FileExistsError if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb", 0)


def grown_file(path: str | Path) -> BinaryIO:
    """Open the regular file ``path`` to be read and written; make it if it is missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        _check(os.fstat(descriptor), path, None)
        return os.fdopen(descriptor, "r+b", 0)
    except BaseException:
        os.close(descriptor)
        raise


def lock_folder(folder: Path) -> BinaryIO:
    """Return a file in ``folder`` that is locked while it is open.

    Raises BlockingIOError if another process has the lock.
    """
    file = grown_file(folder / "lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def same_file(one: str, other: str) -> bool:
    """Return whether both paths lead to the same file."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, below: str | Path | None = None, *, most: int = CONFIG_BYTES) -> str:
    """Return the text of a file, without a byte order mark.

    Raises UnicodeDecodeError, and the errors of :func:`read_file`.
    """
    return read_file(path, below, most=most).decode("utf-8-sig")


def read_json(path: str | Path, below: str | Path | None = None, *, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint.

    Without such a file it is empty. Raises ModelError for other contents.
    """
    try:
        value = json.loads(read_text(path, below, most=most))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ModelError(f"{shown(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{shown(path)} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{shown(path)} does not hold a JSON object")
    return value


def folder_below(root: str | Path, path: str | Path, *files: str) -> tuple[Path, Path]:
    """Return ``root`` and the folder ``path``, both without links.

    ``path`` is absolute or relative to ``root``. Raises OSError unless the folder lies below ``root``, and unless its
    ``files``, as far as they exist, are regular files below ``root``.
    """
    top = resolved(Path(root).expanduser())
    folder = resolved(top / path, top)
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, "it is not a folder", shown(path))
    for name in files:
        if os.path.lexists(folder / name):
            regular_file(folder / name, top)
    return top, folder


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically. A pipe or a device is no file that can be replaced: it is refused."""
    with suppress(FileNotFoundError):
        _check(os.stat(path), path, None)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)


def shown(path: object) -> str:
    """Return ``path`` for a message; of a very long path, only the end."""
    text = str(path)
    return text if len(text) <= _PATH_SHOWN else f"…{text[-_PATH_SHOWN:]}"


def why_unread(error: Exception) -> str:
    """Return the reason why a file cannot be read, without the file's name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _check(found: os.stat_result, path: str | Path, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", shown(path))
    if most is not None and found.st_size > most:
        raise _too_large(path, most)


def _too_large(path: str | Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than the {most:,} bytes that are read", shown(path))
