"""The tensors of a GGUF file, in the form of an open safetensors file."""

from __future__ import annotations

from collections.abc import KeysView
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.model.gguf.blocks import codes_and_scales, dequantized
from preheat.model.gguf.description import Description, Entry

CHUNK = 1 << 22
"""Numbers that are dequantized at once: with their temporary copies about 50 MB."""


class GgufTensors:
    """The tensors of the GGUF file ``path`` under the names of the model's family.

    Plain tensors are float32 and new. Raises ModelError for a file that does not run.
    """

    def __init__(self, path: Path) -> None:
        self._model = Description(path)
        self._entries: dict[str, Entry] = {}
        for name, entry in self._model.entries():
            if name in self._entries:
                raise self._model.wrong(f"tensor {name} is there more than once")
            self._entries[name] = entry

    def keys(self) -> KeysView[str]:
        return self._entries.keys()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, self._entries[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return the whole tensor ``name``."""
        return self.whole(self._entries[name])

    def whole(self, entry: Entry) -> Tensor:
        """Return the whole tensor of ``entry``."""
        found = self.read(entry, 0, entry.rows[1] - entry.rows[0]).view(entry.shape)
        return found[_in_file(entry, 0, len(found))] if entry.pairs and found.dim() == 1 else found

    def read(self, entry: Entry, first: int, last: int) -> Tensor:
        """Return the rows [first, last) of a tensor: [rows, numbers]."""
        width = entry.stored.shape[-1]
        out = torch.empty(last - first, entry.shape[-1], dtype=torch.int8 if entry.packed == "codes" else torch.float32)
        step = max(1, CHUNK // width)
        for at in range(first, last, step):
            end = min(at + step, last)
            out[at - first : end - first] = torch.from_numpy(self._chunk(entry, at, end))
        return out.sub_(entry.less) if entry.less else out

    def _chunk(self, entry: Entry, first: int, last: int) -> Any:
        data, stored = self._bytes(entry, first, last), entry.stored
        if not entry.packed:
            return dequantized(stored.kind.name, data, stored.shape[-1])
        codes, scales = codes_and_scales(stored.kind.name, data, stored.shape[-1])
        return codes if entry.packed == "codes" else scales

    def _bytes(self, entry: Entry, first: int, last: int) -> Any:
        """Return the bytes of some rows in the order of the family."""
        container, stored = self._model.container, entry.stored
        if not entry.pairs or len(entry.shape) == 1:
            return container.rows(stored, entry.rows[0] + first, entry.rows[0] + last)
        whole = np.frombuffer(container.rows(stored, *entry.rows), dtype=np.uint8)
        return whole.reshape(-1, stored.row_bytes)[_in_file(entry, first, last)].reshape(-1)


def _in_file(entry: Entry, first: int, last: int) -> Any:
    """Return the places in the file of the rows [first, last) of the family.

    In the file a head's rows alternate between its halves: row 2 i + j is row i of half j.
    """
    half = entry.pairs // 2
    head, place = np.divmod(np.arange(first, last), entry.pairs)
    return head * entry.pairs + 2 * (place % half) + place // half


class _Slice:
    """A tensor that is read part by part."""

    def __init__(self, file: GgufTensors, entry: Entry) -> None:
        self._file, self._entry = file, entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def __getitem__(self, part: Any) -> Tensor:
        rows, *rest = part if isinstance(part, tuple) else (part,)
        entry = self._entry
        if len(entry.shape) != 2 or not isinstance(rows, slice):
            return self._file.whole(entry)[part]
        first, last, step = rows.indices(entry.shape[0])
        assert step == 1
        found = self._file.read(entry, first, max(first, last))
        return found[(slice(None), *rest)]
