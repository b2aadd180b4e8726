"""The destination of a batch's answers.

Answers are written, each as it comes, to a file beside the requested one. That file takes the requested name once all
answers are there, so a file of that name is always whole. A run that ends early leaves its answers in the partial file,
and the next run can go on (``--resume``). Standard output, a pipe or a device is written directly.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from preheat.errors import PreheatError, SettingsError
from preheat.utils.files import open_file, output_file, shown, why_unread

PARTIAL = ".partial"


class Answers:
    """The answers to ``asked`` requests, written to the descriptor ``file``.

    ``kept`` holds the custom_ids that an earlier run has answered. ``place`` is the path of a partial file, which is
    renamed once all answers are there.
    """

    def __init__(self, file: int, asked: int, kept: Collection[str] = (), place: Path | None = None) -> None:
        self.kept, self._file, self._asked, self._place = kept, file, asked, place
        self.answered, self.refused = len(kept), 0

    def write(self, answer: bytes, *, refused: bool) -> None:
        """Write one line, then count it. Raises PreheatError if the write fails."""
        left = memoryview(answer + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BrokenPipeError:
            raise  # the reader wants no more
        except OSError as error:
            raise PreheatError(f"the answers cannot be written: {why_unread(error)}") from None
        if refused:
            self.refused += 1
        else:
            self.answered += 1

    @property
    def whole(self) -> bool:
        """Whether every request has an answer."""
        return self.answered + self.refused == self._asked

    @property
    def report(self) -> str:
        """The number of answered requests, and the place of a partial file."""
        text = f"{self.answered} of {self._asked} requests were answered"
        if self.whole or self._place is None or not self.answered + self.refused:
            return text
        return f"{text}: the answers are in {self._place}, and --resume asks for the others"


@contextmanager
def answers_to(path: str | None, asked: Collection[str], *, resume: bool = False) -> Iterator[Answers]:
    """Open the destination of the answers to ``asked`` (custom_ids): ``path``, or standard output.

    ``resume`` keeps the answers of an earlier run. Raises SettingsError before anything is changed.
    """
    if path is not None and "\0" in path:
        raise SettingsError("--output-file has a NUL byte, and a path cannot have one", param="output_file")
    target = None if path is None else Path(os.path.realpath(path))
    if target is None or _is_stream(target):
        if resume:
            raise SettingsError("--resume needs --output-file, and a regular file there", param="output_file")
        with open(sys.stdout.fileno(), "wb", 0, closefd=False) if target is None else _opened(target) as stream:
            yield Answers(stream.fileno(), len(asked))
        return
    partial = target.with_name(target.name + PARTIAL)
    _check_place(target, partial, resume)
    kept = _take_over(partial if partial.exists() else target, partial, asked) if resume else set[str]()
    file = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield (answers := Answers(file, len(asked), kept, partial))
        if answers.whole:
            os.fsync(file)
            os.replace(partial, target)
    finally:
        empty = not os.fstat(file).st_size
        os.close(file)
        if empty:
            partial.unlink(missing_ok=True)


def _opened(target: Path) -> BinaryIO:
    try:
        return output_file(target)
    except OSError as error:
        raise SettingsError(f"--output-file {shown(target)}: {why_unread(error)}", param="output_file") from None


def _is_stream(target: Path) -> bool:
    """Return whether the target cannot be replaced: a pipe or a device."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _check_place(target: Path, partial: Path, resume: bool) -> None:
    """Raise SettingsError if no file can be written there."""
    why = ""
    if target.is_dir():
        why = "it is a folder"
    elif not target.parent.is_dir():
        why = "its folder does not exist; create it, or name another file"
    elif not os.access(target.parent, os.W_OK | os.X_OK) or (target.exists() and not os.access(target, os.W_OK)):
        why = "it cannot be written"
    elif not resume and partial.exists() and partial.stat().st_size:
        why = f"{partial} has the answers of a run that did not end: --resume goes on from there, or remove it"
    if why:
        raise SettingsError(f"--output-file {shown(target)}: {why}", param="output_file")


class _Response(msgspec.Struct):
    status_code: int


class _Answer(msgspec.Struct):
    """The fields that are read from an answer."""

    custom_id: str
    response: _Response


def _take_over(source: Path, partial: Path, asked: Collection[str]) -> set[str]:
    """Copy the answers of ``source`` with status 200 to ``partial``, and return their custom_ids.

    Requests with another status run again.
    """
    kept = set[str]()
    if not source.exists():
        return kept
    with open_file(source) as lines, tempfile.NamedTemporaryFile(dir=partial.parent, delete=False) as new:
        try:
            for number, line in enumerate(lines, 1):
                answer = _read(line, f"{source}, line {number}", asked)
                if answer is not None and answer.response.status_code == 200 and answer.custom_id not in kept:
                    new.write(line)
                    kept.add(answer.custom_id)
            new.flush()
            os.replace(new.name, partial)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(new.name)
    return kept


def _read(line: bytes, where: str, asked: Collection[str]) -> _Answer | None:
    """Parse an answer of an earlier run; return None for an unfinished line.

    Raises SettingsError for a line that is no answer to ``asked``.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        answer = msgspec.json.decode(line, type=_Answer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} is not an answer of a batch: {why_unread(error)}", param="resume") from None
    if answer.custom_id not in asked:
        raise SettingsError(f"{where}: {answer.custom_id!r} answers no request of this batch", param="resume")
    return answer
