"""The batches of ``/v1/batches``, on disk in ``--batch-dir`` beside their files."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from preheat.errors import InvalidRequest, NotFound, SettingsError, TooManyBatches
from preheat.server.batches.file_store import UPLOADED, FileStore, new_id
from preheat.server.batches.lines import ENDPOINTS
from preheat.server.batches.schema import BatchObject, BatchRequest
from preheat.settings import Settings
from preheat.utils.files import CONFIG_BYTES, lock_folder, read_file, shown, why_unread, write_whole

Ended = Literal["failed", "completed", "expired", "cancelled"]
ENDED = get_args(Ended)

_ID = re.compile(r"batch_[0-9a-f]{24}")
_HOURS = {"h": 1, "d": 24}


class StoredBatch(Struct):
    """A batch with the ids of its two output files.

    ``kept_seconds`` is the lifetime of these files.

    ``tries`` counts the servers that began the batch and ended before any answer.
    """

    batch: BatchObject
    answers: str
    failures: str
    kept_seconds: int | None = None
    tries: int = 0

    @property
    def ended(self) -> bool:
        return self.batch.status in ENDED


class BatchStore:
    """The batches in ``--batch-dir``; the folder is locked against other servers.

    Methods may be called in threads. Raises SettingsError for a folder that cannot be used.
    """

    def __init__(self, folder: str, settings: Settings) -> None:
        self._settings, self._lock = settings, threading.RLock()
        try:
            root = Path(folder).expanduser()
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locked = lock_folder(root)
            self._folder = root / "batches"
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._batches = {
                stored.batch.id: stored for stored in map(_read, sorted(self._folder.glob("batch_*.json")))
            }
            kept = [id for stored in self.unended for id in (stored.answers, stored.failures)]
            self.files = FileStore(root / "files", settings.max_batch_files, kept)
        except BlockingIOError:
            raise SettingsError(f"batch_dir {shown(folder)}: another server uses it", param="batch_dir") from None
        except (OSError, ValueError) as error:
            text = f"batch_dir {shown(folder)} cannot be used: {why_unread(error)}"
            raise SettingsError(text, param="batch_dir") from None
        for stored in self.unended:
            self.files.used[stored.batch.input_file_id] += 1

    def close(self) -> None:
        """Unlock the folder for other servers."""
        self._locked.close()

    @property
    def unended(self) -> list[StoredBatch]:
        """The batches that have not ended, oldest first."""
        with self._lock:
            return [stored for stored in self._batches.values() if not stored.ended]

    def create(self, asked: BatchRequest) -> StoredBatch:
        """Create a batch. Raises InvalidRequest, NotFound, or TooManyBatches if there is no room."""
        if asked.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint {asked.endpoint} is not one of {', '.join(ENDPOINTS)}", param="endpoint")
        try:
            purpose = self.files.get(asked.input_file_id).purpose
        except NotFound as error:
            raise NotFound(error.message, param="input_file_id") from error
        if purpose != UPLOADED:
            raise InvalidRequest("input_file_id does not name a file with purpose batch", param="input_file_id")
        now, window = int(time.time()), asked.completion_window
        batch = BatchObject(
            id=new_id("batch_"), endpoint=asked.endpoint, input_file_id=asked.input_file_id, metadata=asked.metadata,
            completion_window=window, created_at=now, expires_at=now + int(window[:-1]) * _HOURS[window[-1]] * 3600,
        )  # fmt: skip
        kept = asked.output_expires_after
        stored = StoredBatch(batch, new_id("file-"), new_id("file-"), kept.seconds if kept else None)
        with self._lock:
            self._make_room()
            self._batches[batch.id] = stored
            self.files.used[batch.input_file_id] += 1
            self.save(stored)
        return stored

    def save(self, stored: StoredBatch) -> None:
        """Write the state of a batch to the disk."""
        with self._lock:
            write_whole(self._folder / f"{stored.batch.id}.json", msgspec.json.encode(stored))

    def end(self, stored: StoredBatch, status: Ended) -> None:
        """End a batch with ``status``."""
        with self._lock:
            stored.batch.status = status
            setattr(stored.batch, f"{status}_at", int(time.time()))
            self.save(stored)
            self.files.used[stored.batch.input_file_id] -= 1

    def get(self, id: str) -> StoredBatch:
        """Return the batch of this id. Raises NotFound."""
        with self._lock:
            if id not in self._batches:
                raise NotFound(f"There is no batch {id!r}", param="batch_id")
            return self._batches[id]

    def listed(self) -> dict[str, BatchObject]:
        """Return all batches by id, newest first."""
        with self._lock:
            return {id: self._batches[id].batch for id in sorted(self._batches, reverse=True)}

    def _make_room(self) -> None:
        """Forget the oldest batch that has ended, if there are too many. Raises TooManyBatches if no more may run."""
        unended, settings = len(self.unended), self._settings
        if unended >= settings.max_batches:
            raise TooManyBatches(
                f"{unended} batches have not ended, and --max-batches allows no more: wait for one, or cancel it"
            )
        self.files.check_room(2 * (unended + 1))
        if len(self._batches) >= settings.max_batch_files:
            oldest = next(id for id, stored in self._batches.items() if stored.ended)
            del self._batches[oldest]
            (self._folder / f"{oldest}.json").unlink(missing_ok=True)


def _read(path: Path) -> StoredBatch:
    if not _ID.fullmatch(path.stem):
        raise ValueError(f"{path.name} is not a batch")
    return msgspec.json.decode(read_file(path, path.parent, most=CONFIG_BYTES), type=StoredBatch)


def open_store(settings: Settings) -> BatchStore | None:
    """Open the batches of a server; return None without ``--batch-dir``. Raises SettingsError."""
    return None if settings.batch_dir is None else BatchStore(settings.batch_dir, settings)
