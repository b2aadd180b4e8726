"""A receipt: an answer with everything that gives it again.

A receipt has the contract, the engine's request, the tokens, and a digest of the logits behind each token. The chain
covers tokens and digests in order, so one number stands for the whole answer.

Contract. ``digests`` are the digests of :mod:`preheat.ops.digest`, of the raw fp32 logits, 8 bytes each in
little-endian order, as base64. The chain of nothing is 16 zero bytes. The chain behind a token is the blake2b digest
(16 bytes) of the chain before it, the token (4 bytes) and its digest (8 bytes).
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from preheat.core import Request
from preheat.utils.contract import Contract

CHAIN_BYTES = 16


class Receipt(msgspec.Struct, kw_only=True):
    """The receipt of one choice of an answer.

    ``request`` is the engine's, with the id 0. ``adapter`` is the digest of its adapter, empty for the base model.
    ``mixed``: the contract changed meanwhile, so no engine can give the answer again.
    """

    contract: Contract
    request: Request
    adapter: str
    tokens: list[int]
    finish_reason: str
    digests: str
    chain: str
    mixed: bool = False
    format: Literal[1] = 1

    @property
    def bits(self) -> list[int]:
        """The digest of the logits behind each token. Raises ValueError if there is not one for each."""
        data = base64.b64decode(self.digests, validate=True)
        if len(data) != 8 * len(self.tokens):
            raise ValueError(f"it has {len(data) / 8:g} digests for {len(self.tokens)} tokens")
        return list(struct.unpack(f"<{len(self.tokens)}q", data))


def chain_of(tokens: Sequence[int], digests: Sequence[int]) -> str:
    """Return the chain of an answer, as hexadecimal digits."""
    chain = bytes(CHAIN_BYTES)
    for token, digest in zip(tokens, digests, strict=True):
        chain = hashlib.blake2b(chain + struct.pack("<iq", token, digest), digest_size=CHAIN_BYTES).digest()
    return chain.hex()


class Proof:
    """What becomes a receipt: the ``request``, its ``contract``, and the ``digests`` so far."""

    __slots__ = ("adapter", "contract", "digests", "request")

    def __init__(self, request: Request, contract: Contract) -> None:
        self.request, self.contract, self.adapter = request, contract, ""
        self.digests: list[int] = []
