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
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from preheat.core import Request
from preheat.utils.contract import Contract, digest_of

CHAIN_BYTES = 16
TOGETHER = 64
"""Steps whose digests are given to proofs together: more would make one of the steps long."""

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


def packed(digests: Sequence[int]) -> bytes:
    """Return digests as bytes, 8 each."""
    return struct.pack(f"<{len(digests)}q", *digests)


def unpacked(data: bytes) -> tuple[int, ...]:
    """Return the digests that are the bytes ``data``, 8 each."""
    return struct.unpack(f"<{len(data) // 8}q", data)


class Proof:
    """What becomes a receipt: the ``request``, its ``contract``, and the ``digests`` as :func:`packed`.

    The digests may lack the latest steps' before the end, and have some behind the answer's last token after it.
    :meth:`end` adds the rest. The chain is a hash a token, so nobody computes it before a reader asks for the receipt.
    """

    __slots__ = ("_finish_reason", "_mixed", "_receipt", "_tokens", "adapter", "contract", "digests", "request")

    def __init__(self, request: Request, contract: Contract) -> None:
        self.request, self.contract, self.adapter = request, contract, ""
        self.digests = bytearray()
        self._finish_reason, self._mixed = "", False
        self._tokens: list[int] = []
        self._receipt: Receipt | None = None

    def end(self, tokens: list[int], finish_reason: str, *, mixed: bool) -> None:
        """Note the end of the answer; nobody changes its ``tokens`` from now on."""
        self._tokens, self._finish_reason, self._mixed = tokens, finish_reason, mixed

    def digests_of(self, tokens: list[int]) -> bytes:
        """Return the digests behind all ``tokens`` of an answer that has ended, 8 bytes each."""
        return bytes(self.digests[: 8 * len(tokens)])

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, made once; None before the end."""
        if self._receipt is None and self._finish_reason:
            digests = self.digests_of(self._tokens)
            self._receipt = Receipt(
                contract=self.contract,
                request=self.request,
                adapter=self.adapter,
                tokens=[*self._tokens],
                finish_reason=self._finish_reason,
                digests=base64.b64encode(digests).decode(),
                chain=chain_of(self._tokens, unpacked(digests)),
                asked=asked_digest(self.contract, self.request, self.adapter),
                mixed=self._mixed,
            )
        return self._receipt


class StepDigests:
    """Digests of steps that gave a token to each of the same sequences, until the proofs of these get them.

    ``proof_of`` returns the proof of a sequence, None if it wants no receipt or has ended. A step
    costs the same for any number of sequences, and one step in :data:`TOGETHER` pays for each of them. A proof of a
    sequence that ends within a step gets the digests of all tokens of the step.
    """

    def __init__(self, proof_of: Callable[[int], Proof | None]) -> None:
        self._proof_of = proof_of
        self._ids: list[int] = []
        self._steps: list[bytes] = []
        self._most = 0

    def add(self, ids: list[int], digests: bytes) -> None:
        """Take the ``digests`` of a step's tokens, of the sequences ``ids``."""
        if ids != self._ids or len(self._steps) == self._most:
            self.give()
            self._ids = ids
            self._most = TOGETHER if len(set(ids)) == len(ids) else 1  # a column is one sequence's in its order
        self._steps.append(digests)

    def give(self) -> None:
        """Give the proofs all digests that they lack."""
        if self._steps:
            self._give()

    def _give(self) -> None:
        width = 8 * len(self._steps)
        by_step = np.frombuffer(b"".join(self._steps), np.int64).reshape(len(self._steps), len(self._ids))
        columns = by_step.T.tobytes()
        self._steps.clear()
        for place, id in enumerate(self._ids):
            if (proof := self._proof_of(id)) is not None:
                proof.digests += columns[place * width : (place + 1) * width]
