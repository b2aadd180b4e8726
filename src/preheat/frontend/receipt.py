"""A receipt: an answer with everything that gives it again.

A receipt has the contract, the engine's request, the tokens, and a digest of the logits behind each token. The chain
covers tokens and digests in order, so one number stands for the whole answer. Another digest covers what was asked.

Contract. ``digests`` are the digests of :mod:`preheat.ops.digest`, of the raw fp32 logits, 8 bytes each in
little-endian order, as base64. The chain of nothing is 16 zero bytes. The chain behind a token is the blake2b digest
(16 bytes) of the chain before it, the token (4 bytes) and its digest (8 bytes). ``asked`` is the blake2b digest
(16 bytes) of the JSON of [contract, request, adapter], with sorted keys.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from preheat.core import Request
from preheat.utils.contract import Contract, digest_of

CHAIN_BYTES = 16
_LINK = struct.Struct("<iq")


class Receipt(msgspec.Struct, kw_only=True):
    """The receipt of one choice of an answer.

    ``request`` is the engine's, with the id 0. ``adapter`` is the digest of its adapter, empty for the base model.
    ``mixed``: the contract changed meanwhile, so no engine can give the answer again. ``asked`` is empty in receipts of
    earlier versions.
    """

    contract: Contract
    request: Request
    adapter: str
    tokens: list[int]
    finish_reason: str
    digests: str
    chain: str
    asked: str = ""
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
    chain, digest_of, pack = bytes(CHAIN_BYTES), hashlib.blake2b, _LINK.pack
    for token, digest in zip(tokens, digests, strict=True):
        chain = digest_of(chain + pack(token, digest), digest_size=CHAIN_BYTES).digest()
    return chain.hex()


def asked_digest(contract: object, request: object, adapter: object) -> str:
    """Return the digest of a question, as hexadecimal digits; its parts may be the plain data of their JSON."""
    return digest_of(msgspec.to_builtins([contract, request, adapter], str_keys=True))


class Proof:
    """What becomes a receipt: the ``request``, its ``contract``, and the ``digests`` so far."""

    __slots__ = ("adapter", "contract", "digests", "request")

    def __init__(self, request: Request, contract: Contract) -> None:
        self.request, self.contract, self.adapter = request, contract, ""
        self.digests: list[int] = []
