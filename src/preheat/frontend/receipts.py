"""Receipts: an answer with everything that gives it again.

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
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from preheat.core import Request
from preheat.errors import InvalidRequest
from preheat.frontend.receipt_log import ReceiptLog
from preheat.frontend.request_state import Choice, RequestState
from preheat.utils.contract import Contract

CHAIN_BYTES = 16

Asked = Callable[[], Contract]


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


class Receipts:
    """The receipts of a frontend's answers.

    ``always``: every sampled answer gets one. ``lacking`` is the reason why the engine gives none, if it gives none.
    ``log`` keeps all receipts.
    """

    def __init__(self, *, always: bool = False, lacking: str = "", log: ReceiptLog | None = None) -> None:
        self.always, self._lacking, self.log = always, lacking, log

    def check(self, state: RequestState) -> None:
        """Raise InvalidRequest if ``state`` asks for a receipt and cannot have one."""
        if not state.params.receipt:
            return
        if self._lacking:
            raise InvalidRequest(f"receipt: {self._lacking}", param="receipt")
        if state.segments:
            raise InvalidRequest("a receipt has tokens only, and this prompt has images or embeddings", param="receipt")

    def begin(self, choice: Choice, request: Request, contract: Contract) -> None:
        """Note what the receipt of ``choice`` is about."""
        same = msgspec.structs.replace(request, id=0, priority=0, data_parallel_rank=None, source=None)
        choice.proof = Proof(same, contract)

    def end(self, choice: Choice, contract: Contract) -> None:
        """Write the receipt of ``choice``, which has ended with all of its tokens."""
        proof = choice.proof
        if proof is None or choice.finish_reason in (None, "abort", "error"):
            return
        digests = proof.digests[: len(choice.token_ids)]
        choice.receipt = Receipt(
            contract=proof.contract,
            request=proof.request,
            adapter=proof.adapter,
            tokens=list(choice.token_ids),
            finish_reason=str(choice.finish_reason),
            digests=base64.b64encode(struct.pack(f"<{len(digests)}q", *digests)).decode(),
            chain=chain_of(choice.token_ids, digests),
            mixed=proof.contract != contract,
        )
        if self.log is not None:
            self.log.write(msgspec.json.encode(choice.receipt))


class Proof:
    """What becomes a receipt: the ``request``, its ``contract``, and the ``digests`` so far."""

    __slots__ = ("adapter", "contract", "digests", "request")

    def __init__(self, request: Request, contract: Contract) -> None:
        self.request, self.contract, self.adapter = request, contract, ""
        self.digests: list[int] = []
