"""The receipts of a frontend's answers, see :mod:`preheat.frontend.receipt`."""

from __future__ import annotations

import msgspec

from preheat.core import Request
from preheat.errors import InvalidRequest
from preheat.frontend.receipt import Proof
from preheat.frontend.receipt_log import ReceiptLog
from preheat.frontend.request_state import Choice, RequestState
from preheat.utils.contract import Contract


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
        """Have ``choice``, which has ended with all of its tokens, get its receipt. The log makes it in its thread."""
        proof = choice.proof
        if proof is None or choice.finish_reason in (None, "abort", "error"):
            return
        proof.end(choice.token_ids, choice.finish_reason, mixed=proof.contract != contract)
        if self.log is not None:
            self.log.write(lambda: msgspec.json.encode(proof.receipt))
