"""Where the answers of a batch go.

They are written to a file beside the one that was asked for, each as it comes, and it takes that file's name when all
are there: what has the name is whole. A run that ends before leaves them there, and the next one can go on
(``--resume``). Standard output, a pipe or a device is written to at once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from preheat.errors import PreheatError, SettingsError
from preheat.utils.files import open_file, shown, why_unread

PARTIAL = ".partial"


class Answers:
    """The answers to ``asked`` requests, which are written to the descriptor ``file``. ``kept`` are the custom_ids of
    those that an earlier run has answered. ``place`` is a file that will have another name when all are there.
    """

    def __init__(self, file: int, asked: int, kept: Collection[str] = (), place: Path | None = None) -> None:
        self.kept, self._file, self._asked, self._place = kept, file, asked, place
        self.answered, self.refused = len(kept), 0

    def write(self, answer: bytes, *, refused: bool) -> None:
        """Write one line, which counts when all of it is written. Raises PreheatError if it cannot be."""
        left = memoryview(answer + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BrokenPipeError:
            raise  # whoever read them wants no more
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
        """How many requests were answered, and where their answers are if others have none."""
        text = f"{self.answered} of {self._asked} requests were answered"
        if self.whole or self._place is None or not self.answered + self.refused:
            return text
        return f"{text}: the answers are in {self._place}, and --resume asks for the others"


@contextmanager
def answers_to(path: str | None, asked: Collection[str], *, resume: bool = False) -> Iterator[Answers]:
    """Where the answers to the requests with the custom_ids ``asked`` are written: ``path``, or standard output.
    ``resume``: keep what an earlier run has answered. Raises SettingsError before anything is changed.
    """
    if path is not None and "\0" in path:
        raise SettingsError("--output-file has a NUL byte, which no path may have", param="output_file")
    target = None if path is None else Path(os.path.realpath(path))
    if target is None or _is_stream(target):
        if resume:
            raise SettingsError("--resume needs --output-file, and a regular file there", param="output_file")
        with open(sys.stdout.fileno() if target is None else target, "wb", 0, closefd=target is not None) as stream:
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


def _is_stream(target: Path) -> bool:
    """Whether there is something that cannot be replaced: a pipe or a device."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _check_place(target: Path, partial: Path, resume: bool) -> None:
    """Raise SettingsError where no file can be written."""
    why = ""
    if target.is_dir():
        why = "it is a folder"
    elif not target.parent.is_dir():
        why = "there is no such folder"
    elif not os.access(target.parent, os.W_OK | os.X_OK) or (target.exists() and not os.access(target, os.W_OK)):
        why = "it cannot be written"
    elif not resume and partial.exists() and partial.stat().st_size:
        why = f"{partial} has the answers of a run that did not end: --resume goes on from there, or remove it"
    if why:
        raise SettingsError(f"--output-file {shown(target)}: {why}", param="output_file")


class _Response(msgspec.Struct):
    status_code: int


class _Answer(msgspec.Struct):
    """What is read of an answer."""

    custom_id: str
    response: _Response


def _take_over(source: Path, partial: Path, asked: Collection[str]) -> set[str]:
    """Let ``partial`` be the answers in ``source`` with status 200: others are asked for again. Their custom_ids."""
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
    """An answer of an earlier run; None for one that was not written to its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        answer = msgspec.json.decode(line, type=_Answer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} is no answer of a batch: {why_unread(error)}", param="resume") from None
    if answer.custom_id not in asked:
        raise SettingsError(f"{where}: {answer.custom_id!r} answers no request of this batch", param="resume")
    return answer
