"""Base64 of clients, decoded without holding Python's lock for long.

One call of Python's decoder holds the lock until its end: 100 ms for 16 MB. No other thread runs meanwhile, and the
event loop answers nobody.
"""

from __future__ import annotations

import binascii

_PIECE = 1 << 16
"""Characters decoded by one call, a multiple of four."""


def decode_base64(text: str, first: int = 0) -> bytes:
    """Return the bytes in ``text`` from the character ``first`` on.

    Raises ValueError for any other character, and for padding that is wrong or not at the end.
    """
    found = []
    for start in range(first, len(text), _PIECE):
        piece = binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        if start + _PIECE < len(text) and len(piece) < _PIECE // 4 * 3:
            raise ValueError("padding before the end")
        found.append(piece)
    return b"".join(found)
