"""The files of ``/v1/files``, on disk: contents, each with a description.

A file exists once it is described. Contents without a description come from an upload that ended early, or from a batch
that has not ended. The descriptions are read when the server starts, and kept in memory.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from preheat.errors import InvalidRequest, NotFound, TooManyFiles
from preheat.utils.files import CONFIG_BYTES, new_file, open_file, read_file, write_whole

UPLOADED, ANSWERS = "batch", "batch_output"
"""The purposes of files: uploaded inputs, and answers."""

_ID = re.compile(r"file-[0-9a-f]{24}")
_DESCRIBED = ".json"


class StoredFile(Struct, kw_only=True):
    """OpenAI's file object; times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None


Item = TypeVar("Item")


def new_id(prefix: str) -> str:
    """Return an id that sorts after all earlier ones."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


def page(items: dict[str, Item], after: str | None, limit: int) -> tuple[list[Item], bool]:
    """Return the page of ``items`` after the id ``after``.

    A page has up to ``limit`` items. The second result says whether there are more.
    """
    ids = list(items)
    if after is not None and after not in items:
        raise InvalidRequest(f"after: there is no {after!r} in this list", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    return [items[id] for id in ids[begin : begin + limit]], len(ids) > begin + limit


class FileStore:
    """At most ``most`` files below ``folder``.

    ``kept`` are ids of contents that will be described later. ``used`` counts the uses of files by id: a used file is
    never removed. Methods may be called in threads.
    """

    def __init__(self, folder: Path, most: int, kept: Collection[str] = ()) -> None:
        self._folder, self._most, self._lock = folder, most, threading.RLock()
        self.used: Counter[str] = Counter()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files: dict[str, StoredFile] = {}
        for path in sorted(folder.iterdir()):
            if path.suffix == _DESCRIBED and _ID.fullmatch(path.stem):
                found = msgspec.json.decode(read_file(path, folder, most=CONFIG_BYTES), type=StoredFile)
                self._files[found.id] = found
        for path in list(folder.iterdir()):
            if path.name not in kept and path.name.removesuffix(_DESCRIBED) not in self._files:
                path.unlink()

    def check_room(self, more: int) -> None:
        """Raise TooManyFiles unless there is room for ``more`` files."""
        if len(self._known()) + more > self._most:
            raise TooManyFiles(
                f"there are {len(self._files)} files, and {more} more would be over the {self._most} of "
                "--max-batch-files: delete some"
            )

    def receive(self, id: str) -> BinaryIO:
        """Create the contents of a new file, for writing."""
        return new_file(self.path(id))

    def discard(self, id: str) -> None:
        """Remove contents that were not described."""
        self.path(id).unlink(missing_ok=True)

    def add(self, file: StoredFile) -> None:
        """Describe contents that are whole. Safe to repeat."""
        with self._lock:
            write_whole(self._folder / f"{file.id}{_DESCRIBED}", msgspec.json.encode(file))
            self._files[file.id] = file

    def get(self, id: str) -> StoredFile:
        """Return the file of this id. Raises NotFound."""
        if (found := self._known().get(id)) is None:
            raise NotFound(f"There is no file {id!r}", param="file_id")
        return found

    def listed(self, purpose: str | None = None, *, newest_first: bool = True) -> dict[str, StoredFile]:
        """Return the files by id, in order of arrival."""
        known = self._known()
        return {id: known[id] for id in sorted(known, reverse=newest_first) if purpose in (None, known[id].purpose)}

    def contents(self, id: str) -> BinaryIO:
        """Open the contents of a file. Raises NotFound."""
        return open_file(self.path(self.get(id).id), self._folder)

    def delete(self, id: str) -> None:
        """Remove a file. Raises NotFound, and InvalidRequest if it is used."""
        with self._lock:
            self.get(id)
            if self.used[id]:
                raise InvalidRequest(
                    f"{id} is the input of a batch that has not ended: cancel it first", param="file_id"
                )
            self._remove(id)

    def path(self, id: str) -> Path:
        """Return the path of the contents of a file. Raises NotFound for a malformed id."""
        if not _ID.fullmatch(id):
            raise NotFound(f"There is no file {id!r}", param="file_id")
        return self._folder / id

    def _known(self) -> dict[str, StoredFile]:
        """Return the files that have not expired, and remove expired ones."""
        now = time.time()
        with self._lock:
            for id, file in list(self._files.items()):
                if file.expires_at is not None and file.expires_at <= now and not self.used[id]:
                    self._remove(id)
            return dict(self._files)

    def _remove(self, id: str) -> None:
        """Remove the description, then the contents."""
        del self._files[id]
        (self._folder / f"{id}{_DESCRIBED}").unlink(missing_ok=True)
        self.discard(id)
