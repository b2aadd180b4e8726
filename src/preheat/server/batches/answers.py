"""The answers of a running batch: two files that grow by whole lines.

A later server continues the files.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from preheat.server.batches.schema import RequestCounts
from preheat.utils.files import grown_file, open_file


class _Answered(Struct):
    """The fields that are read from an answer."""

    custom_id: str


class BatchAnswers:
    """The answers and refusals of a batch, one line each.

    Answers are written to ``path``, refusals to ``failed``.

    ``counts`` counts both. ``done`` holds the custom_ids of written lines, including lines of an earlier server. A line
    that an earlier server did not finish is cut off, and its request runs again. Raises OSError if a file fails.
    """

    def __init__(self, path: Path, failed: Path, counts: RequestCounts) -> None:
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, "batch")  # one thread, so that lines never mix
        self._files: list[BinaryIO] = [grown_file(each) for each in (path, failed)]
        answered, refused = (_take_over(file, each) for file, each in zip(self._files, (path, failed), strict=True))
        self.done = answered | refused
        counts.completed, counts.failed = len(answered), len(refused)

    async def write(self, answer: dict[str, Any], *, refused: bool) -> None:
        """Write one line, then count it. The write goes on if the caller is cancelled. Raises OSError if it fails."""
        self.done.add(answer["custom_id"])
        await asyncio.wrap_future(self._thread.submit(self._write, msgspec.json.encode(answer) + b"\n", refused))

    async def close(self) -> None:
        """Wait until all written lines are on the disk."""
        await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)

    def _write(self, line: bytes, refused: bool) -> None:
        left = memoryview(line)
        while left:
            left = left[self._files[refused].write(left) :]
        if refused:
            self._counts.failed += 1
        else:
            self._counts.completed += 1

    def _close(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
            file.close()


def _take_over(file: BinaryIO, path: Path) -> set[str]:
    """Return the custom_ids of the whole lines of ``file``.

    A torn last line is cut off.
    """
    found, end = set[str](), 0
    with open_file(path) as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                found.add(msgspec.json.decode(line, type=_Answered).custom_id)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                break
            end += len(line)
    file.truncate(end)
    file.seek(end)
    return found
