"""Prompts that are embeddings: rows in place of tokens, handled like images' embeddings. No torch.

A row is used as sent, rounded once to the model's type if the types differ. A piece's hash covers the type and the
bytes of its rows, and nothing else from the sender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, cast

import numpy as np

from preheat.core import PIECE, Image, Segment
from preheat.errors import InvalidRequest
from preheat.utils.base64 import decode_base64
from preheat.utils.torch_file import ITEM_BYTES, TorchTensor, read_tensor

PARAM = "prompt_embeds"
PLACEHOLDER = 0
"""The token id at each position, for code that looks at tokens. Source: vLLM."""

HASH_BYTES = 16
HEAD_BYTES = 1 << 16
"""Most bytes in a file besides its numbers."""

_LARGEST = np.float32(2**128 - 2**119)  # smaller numbers round to bfloat16 without becoming infinite


@dataclass(frozen=True, slots=True)
class Embedded:
    """A prompt of ``rows`` embeddings."""

    rows: int
    segments: list[Segment]

    def __len__(self) -> int:
        return self.rows

    @property
    def ids(self) -> list[int]:
        """A token id for each position."""
        return [PLACEHOLDER] * self.rows


class PromptEmbeds:
    """Reader of prompts of fewer than ``most()`` rows of ``hidden`` numbers."""

    def __init__(self, hidden: int, most: Callable[[], int]) -> None:
        self._hidden, self._most = hidden, most

    def decode(self, text: str) -> Embedded:
        """Return the prompt in ``text``: base64 of a file of ``torch.save``. Raises InvalidRequest."""
        limit = self._most() * self._hidden * max(ITEM_BYTES.values()) + HEAD_BYTES
        if len(text) * 3 // 4 > limit:
            raise _refused(f"it has more than the {limit:,} bytes that the longest prompt can have")
        try:
            file = decode_base64(text)
        except ValueError as error:
            raise _refused("it is not base64") from error
        try:
            return self._embedded(read_tensor(file))
        except ValueError as error:
            raise _refused(str(error)) from error

    def of_tensor(self, tensor: Any) -> Embedded:
        """Return the prompt of a torch tensor, [rows, hidden]. Raises InvalidRequest."""
        kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        if kind not in ITEM_BYTES:
            raise _refused(f"it is of {kind}; a tensor of {', '.join(ITEM_BYTES)} is taken")
        rows = tensor.detach().float().cpu().numpy()
        return self._embedded(TorchTensor("float32", rows.shape, np.ascontiguousarray(rows).tobytes()))

    def _embedded(self, tensor: TorchTensor) -> Embedded:
        shape = list(tensor.shape)
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 2 or shape[1] != self._hidden or not shape[0]:
            raise _refused(f"it has shape {list(tensor.shape)}; the model takes [tokens, {self._hidden}]")
        if not _finite(tensor):
            raise _refused("some of its numbers are not finite")
        return Embedded(shape[0], _pieces(shape[0], tensor))


def _pieces(rows: int, tensor: TorchTensor) -> list[Segment]:
    row_bytes, found = len(tensor.data) // rows, list[Segment]()
    dtype = cast(Literal["float32", "bfloat16", "float16"], tensor.dtype)
    for first in range(0, rows, PIECE):
        last = min(first + PIECE, rows)
        data = tensor.data[first * row_bytes : last * row_bytes]
        digest = blake2b(data, digest_size=HASH_BYTES, person=dtype.encode())
        found.append(Segment(first, last, Image(digest.digest(), data, dtype)))
    return found


def _finite(tensor: TorchTensor) -> bool:
    if tensor.dtype == "bfloat16":
        return bool(((np.frombuffer(tensor.data, "<u2") & 0x7F80) != 0x7F80).all())
    if tensor.dtype == "float16":
        return bool(np.isfinite(np.frombuffer(tensor.data, "<f2")).all())
    return bool((np.abs(np.frombuffer(tensor.data, "<f4")) < _LARGEST).all())


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"prompt_embeds cannot be used: {reason}", param=PARAM)
