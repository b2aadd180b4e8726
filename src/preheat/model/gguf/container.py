"""The container of a GGUF file: its fields, and where its tensors lie. No numpy, no torch.

The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: a header, fields of metadata, descriptions of
tensors, padding, data. The file is mapped. Every count and length is compared with the rest of the file before
something is allocated, so a wrong file costs no memory. All errors are ModelErrors of one line.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from preheat.errors import ModelError
from preheat.model.gguf.kinds import KINDS, Kind
from preheat.utils.files import open_file, shown

GGUF = ".gguf"
GGUF_WEIGHTS = f"model{GGUF}"
"""The ending of a GGUF file's name, and the link to the file in its folder (:mod:`preheat.model.gguf.folder`)."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Versions with the same layout; version 1 has shorter counts."""

AGAIN = "fetch or convert the file again"

LONGEST_NAME, MOST_ITEMS, MOST_TENSORS, MOST_DIMS = 1 << 16, 1 << 22, 1 << 20, 4
"""Bounds of a key or a tensor's name, of a list, of the number of tensors and of a tensor's dimensions."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = 8
"""Types of a field's value, and the bytes of a count."""


@dataclass(frozen=True)
class Stored:
    """A tensor's ``shape`` (rows first), ``kind`` of numbers and place in the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Container:
    """The fields and tensors of a mapped file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    data: memoryview

    def rows(self, tensor: Stored, first: int, last: int) -> memoryview:
        """Return the bytes of the rows [first, last) of ``tensor``."""
        at = tensor.offset
        return self.data[at + first * tensor.row_bytes : at + last * tensor.row_bytes]


def read_container(path: Path) -> Container:
    """Map the GGUF file ``path`` and read its description. Raises ModelError for a file that is none."""
    try:
        with open_file(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelError(f"{shown(path)} is empty: {AGAIN}")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(f"{shown(path)} cannot be read: {error.strerror or error}") from None
    cursor = _Cursor(path, data)
    num_tensors, num_fields = _counts(cursor)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.name("a field's name")
        if name in fields:
            raise cursor.wrong(f"the field {name!r} is there more than once")
        fields[name] = cursor.value(name)
    return Container(path, fields, _tensors(cursor, fields, num_tensors), data)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and fields, after a look at magic and version."""
    magic = bytes(cursor.take(len(MAGIC), "the header"))
    if magic != MAGIC:
        raise ModelError(
            f"{shown(cursor.path)} is no GGUF file: it begins with {magic!r} and not with {MAGIC!r}; give a file of "
            "llama.cpp that ends in .gguf"
        )
    version = cursor.number("I", "the header")
    if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "big"), "little") in (1, *VERSIONS):
        raise ModelError(f"{shown(cursor.path)} is a big-endian GGUF file: convert it without --bigendian")
    if version not in VERSIONS:
        raise ModelError(
            f"{shown(cursor.path)} has version {version} of GGUF, and versions 2 and 3 are read: convert the "
            "checkpoint again with a current convert_hf_to_gguf.py"
        )
    num_tensors, num_fields = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    if num_tensors > MOST_TENSORS:
        raise cursor.wrong(f"it states {num_tensors:,} tensors, and at most {MOST_TENSORS:,} are read")
    if num_fields > MOST_TENSORS:
        raise cursor.wrong(f"it states {num_fields:,} fields, and at most {MOST_TENSORS:,} are read")
    return num_tensors, num_fields


def _tensors(cursor: _Cursor, fields: Mapping[str, Any], count: int) -> dict[str, Stored]:
    """Return the tensors by name; each lies within the file."""
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise cursor.wrong(f"general.alignment must be a power of two from 8 on, got {alignment!r}")
    found: dict[str, Stored] = {}
    for _ in range(count):
        tensor = _tensor(cursor)
        if tensor.name in found:
            raise cursor.wrong(f"the tensor {tensor.name!r} is there more than once")
        found[tensor.name] = tensor
    start = -(-cursor.at // alignment) * alignment
    placed = {}
    for name, tensor in found.items():
        end = start + tensor.offset + tensor.num_bytes
        if end > len(cursor.data):
            raise cursor.wrong(
                f"the tensor {name!r} ends at byte {end:,}, and the file has {len(cursor.data):,} bytes: it is cut off"
            )
        if tensor.offset % alignment:
            raise cursor.wrong(f"the tensor {name!r} begins at {tensor.offset:,}, no multiple of {alignment}")
        placed[name] = Stored(name, tensor.shape, tensor.kind, start + tensor.offset)
    return placed


def _tensor(cursor: _Cursor) -> Stored:
    """Return the next tensor's description; its offset counts from the data."""
    name = cursor.name("a tensor's name")
    dims = cursor.number("I", name)
    if not 1 <= dims <= MOST_DIMS:
        raise cursor.wrong(f"the tensor {name!r} has {dims:,} dimensions, and 1 to {MOST_DIMS} are read")
    shape = tuple(cursor.number("Q", name) for _ in range(dims))[::-1]
    number, offset = cursor.number("I", name), cursor.number("Q", name)
    kind = KINDS.get(number)
    if kind is None:
        raise cursor.wrong(f"the tensor {name!r} has the unknown type {number}", "update preheat or convert it again")
    if not 0 < prod(shape) < 1 << 48:
        raise cursor.wrong(f"the tensor {name!r} has the shape {list(shape)}")
    if shape[-1] % kind.numbers:
        raise cursor.wrong(f"rows of {shape[-1]:,} numbers of the tensor {name!r} are no blocks of {kind.numbers}")
    return Stored(name, shape, kind, offset)


class _Cursor:
    """A place in the file's description that only moves on within the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def wrong(self, what: str, remedy: str = AGAIN) -> ModelError:
        """Return an error of this file."""
        return ModelError(f"{shown(self.path)} cannot be read: {what}; {remedy}")

    def take(self, size: int, what: str) -> memoryview:
        """Return the next ``size`` bytes."""
        left = len(self.data) - self.at
        if size > left:
            raise self.wrong(f"it is cut off in {what!r}, where {size:,} bytes are stated and {left:,} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        """Return the next number, in the code of ``struct``."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def name(self, what: str) -> str:
        """Return the next short text."""
        length = self.number("Q", what)
        if length > LONGEST_NAME:
            raise self.wrong(f"{what} has {length:,} bytes, and at most {LONGEST_NAME:,} are read")
        return self._decoded(self.take(length, what), what)

    def text(self, what: str) -> str:
        """Return the next text."""
        return self._decoded(self.take(self.number("Q", what), what), what)

    def _decoded(self, data: memoryview, what: str) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what!r} is no UTF-8 at byte {error.start:,}") from None

    def value(self, name: str) -> Any:
        """Return the value of the field ``name``: a number, a text or a list."""
        kind = self.number("I", name)
        if kind == _STRING:
            return self.text(name)
        if kind == _ARRAY:
            return self._array(name)
        return self.number(self._code(kind, name), name)

    def _code(self, kind: int, name: str) -> str:
        if kind not in _NUMBERS:
            raise self.wrong(f"the field {name!r} has the unknown type {kind}")
        return _NUMBERS[kind]

    def _array(self, name: str) -> list[Any]:
        """Return a list of numbers or texts."""
        kind, count = self.number("I", name), self.number("Q", name)
        size = _LENGTH if kind == _STRING else struct.calcsize(f"<{self._code(kind, name)}")
        if count > MOST_ITEMS or count * size > len(self.data) - self.at:
            most = min(MOST_ITEMS, (len(self.data) - self.at) // size)
            raise self.wrong(f"{name!r} states {count:,} items, and at most {most:,} can follow")
        if kind == _STRING:
            return [self.text(name) for _ in range(count)]
        return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self.take(count * size, name)))
