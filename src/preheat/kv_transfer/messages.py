"""The messages of two engines that exchange blocks, and the reasons to refuse a peer.

The puller says :class:`Hello` and hears :class:`Welcome`. Then it sends :class:`Want`, and gets one :class:`Part` for
each block, followed by the block's bytes. A part without a hash is the last one.

A block's bytes are those of all its heads: [layers, keys and values, heads, slots, dim], contiguous. So engines with
other numbers of ranks exchange blocks.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from preheat.utils.contract import Contract, differing

VERSION = 1

MOST_HELLO = 1 << 18
"""Most bytes of a Hello or a Welcome."""

MOST_BLOCKS = 1 << 16
"""Most blocks of one Want."""

MOST_WANT = 32 * MOST_BLOCKS
MOST_PART = 1 << 10

MOST_REASON = 500
"""Most characters of a difference."""

Hash = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Layout(msgspec.Struct, frozen=True):
    """The form of a block: ``row`` are the bytes of a head's slots, ``sides`` is 2 for keys and values."""

    layers: int
    sides: int
    heads: int
    row: int
    dtype: str
    block_size: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.sides * self.heads * self.row


class Hello(msgspec.Struct, frozen=True):
    """An engine: its contract, and the key and form of its blocks."""

    contract: Contract
    contents: str
    layout: Layout
    version: int = VERSION


class Welcome(msgspec.Struct):
    """The answer to Hello: the reason to refuse the peer, or an empty text."""

    refused: str = ""


class Want(msgspec.Struct):
    """The hashes of wanted blocks, in the order of a prompt."""

    hashes: Annotated[list[Hash], Meta(max_length=MOST_BLOCKS)]


class Part(msgspec.Struct):
    """A block that follows, with the digest of its bytes. Without a hash nothing follows, because of ``end``."""

    hash: bytes = b""
    digest: bytes = b""
    end: str = ""


def why_not(mine: Hello, theirs: Hello) -> str:
    """Return the first difference between two engines, as far as blocks depend on it; empty if there is none."""
    one, other = msgspec.to_builtins(mine), msgspec.to_builtins(theirs)
    for name in ("version", "contract", "layout", "contents"):
        if (found := next(differing(name, one[name], other[name]), None)) is not None:
            return str(found)[:MOST_REASON]
    return ""


def digest_of_block(data: memoryview) -> bytes:
    """Return the digest of a block's bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()
