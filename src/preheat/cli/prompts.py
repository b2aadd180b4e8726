"""Prompts from flags, from a file, or from standard input."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

import msgspec

from preheat.errors import SettingsError
from preheat.utils.files import TABLE_BYTES, read_given, shown, why_unread


def given_prompts(given: list[str], path: str | None) -> Iterator[str | list[int]]:
    """Yield the prompts of the flags, then of the file.

    Without either, yield the prompts of standard input.
    """
    yield from given
    if path is None and not given:
        if sys.stdin.isatty():
            raise SettingsError("no prompt: give --prompt TEXT or --prompts FILE, or pipe prompts in, one a line")
        path = "-"
    if path == "-":
        yield from _read_prompts(sys.stdin, "standard input")
    elif path is not None:
        try:
            text = read_given(path, most=TABLE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the prompts in {shown(path)}: {why_unread(error)}") from None
        yield from _read_prompts(io.StringIO(text), path)


def _read_prompts(lines: TextIO, name: str) -> Iterator[str | list[int]]:
    """Yield one prompt per nonempty line.

    The prompt of a JSON object is its ``prompt`` (text or token ids).
    """
    found = False
    for number, line in enumerate(_plain(lines), 1):
        found = found or bool(line)
        try:
            if line.startswith("{"):
                yield msgspec.json.decode(line, type=_JsonPrompt).prompt
            elif line:
                yield line
        except msgspec.ValidationError as error:
            expected = '{"prompt": "text"} or {"prompt": [token ids]}'
            raise SettingsError(f"{name}, line {number}: expected {expected}: {error}") from None
        except msgspec.DecodeError:  # a text that begins with a brace
            yield line
    if not found:
        raise SettingsError(f"no prompt in {name}: write one a line")


def _plain(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines without their ends and without the byte-order mark.

    Editors on Windows begin a file with that mark (BOM).
    """
    for number, line in enumerate(lines):
        yield (line if number else line.removeprefix("\ufeff")).rstrip("\r\n")


class _JsonPrompt(msgspec.Struct):
    prompt: str | list[int]
