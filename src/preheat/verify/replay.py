"""``preheat replay``: answers given again from their receipts, compared logit by logit.

The request of a receipt runs once more, up to its number of tokens. Tokens and digests of logits must be the receipt's.
One step alone runs behind the tokens before it, as the law of :mod:`preheat.schedule.resume` allows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from preheat.core import Request, Resume
from preheat.errors import EngineDead, InvalidRequest, PreheatError, SettingsError
from preheat.frontend.receipt import Receipt, asked_digest, chain_of
from preheat.frontend.receipt_log import log_files
from preheat.utils.contract import Contract, Difference, first_difference
from preheat.utils.files import TABLE_BYTES, read_given, shown, why_unread
from preheat.verify.drive import Engine

logger = logging.getLogger(__name__)

TOP = 20
"""Logits of a step that are printed, the greatest first."""

TOGETHER = 64
"""Receipts of a log that run together."""

MOST_BYTES = TABLE_BYTES
FRONTEND_PARTS = ("tokenizer", "template", "defaults")
"""Parts of a contract that made the request. A receipt has the request as tokens, so they decide nothing any more."""


@dataclass(frozen=True)
class Replayed:
    """A receipt's request up to ``end`` tokens, behind the first ``begin`` ones."""

    receipt: Receipt
    begin: int
    end: int

    def request(self, id: int) -> Request:
        receipt = self.receipt
        resume = Resume(receipt.tokens[: self.begin], receipt.adapter)
        return msgspec.structs.replace(receipt.request, id=id, max_tokens=self.end, resume=resume)


class Outcome(msgspec.Struct):
    """The comparison of an answer with its receipt.

    ``position`` is the first that differs, None if the answers are equal; ``what`` says what differs there.
    """

    positions: int
    position: int | None = None
    what: str = ""

    @property
    def equal(self) -> bool:
        return self.position is None

    def __str__(self) -> str:
        if self.position is None:
            return f"equal: {self.positions:,} tokens, and the logits behind each"
        return f"not equal: {self.what} at position {self.position} of {self.positions:,}"


def read_receipts(path: str) -> list[Receipt]:
    """Return the receipts in a file: a receipt, a log of them, or answers of the server.

    Raises SettingsError if the file holds none, or one that contradicts itself.
    """
    try:
        text = read_given(path, most=MOST_BYTES)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{shown(path)} cannot be read: {why_unread(error)}") from None
    try:
        found = list(_receipts_in(_parsed(text)))
        for receipt in found:
            _check(receipt)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SettingsError(f"{shown(path)} holds no receipts: {error}") from None
    if not found:
        raise SettingsError(f"{shown(path)} holds no receipts: send requests with receipt: true")
    return found


def read_log(path: str | None) -> list[Receipt]:
    """Return the receipts in all files of the log at ``path``, the oldest first. Raises SettingsError."""
    if path is None:
        raise SettingsError("replay needs receipts: give --receipt FILE, or --receipts-log FILE as for the server")
    if not (files := log_files(path)):
        raise SettingsError(f"receipts_log {shown(path)} has no file", param="receipts_log")
    return [receipt for each in files if each.stat().st_size for receipt in read_receipts(str(each))]


def _parsed(text: str) -> list[Any]:
    """Return the JSON values in ``text``: one value, or one in each line."""
    try:
        return [msgspec.json.decode(text)]
    except msgspec.DecodeError:
        return [value for line in text.splitlines() if line.strip() for value in _line(line)]


def _line(line: str) -> list[Any]:
    """Return the value of a line, and nothing for one that a full disk has cut."""
    try:
        return [msgspec.json.decode(line)]
    except msgspec.DecodeError as error:
        logger.warning("A line of the log is skipped, as it is no JSON: %s", error)
        return []


def _receipts_in(values: Sequence[Any]) -> Iterator[Receipt]:
    """Yield the receipts in JSON values: receipts themselves, or answers with choices."""
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"an object is expected, not {type(value).__name__}")
        if "digests" in value:
            receipt = msgspec.convert(value, Receipt, str_keys=True)
            _check_asked(receipt, value)
            yield receipt
        elif isinstance(found := value.get("receipt"), dict):
            yield from _receipts_in([found])
        else:
            yield from _receipts_in([each for each in value.get("choices") or () if isinstance(each, dict)])


def _check_asked(receipt: Receipt, value: dict[str, Any]) -> None:
    """Raise ValueError if the question of a receipt was changed; ``value`` is its JSON."""
    if receipt.asked and receipt.asked != asked_digest(*(value[name] for name in ("contract", "request", "adapter"))):
        raise ValueError("its digest does not belong to its contract, request and adapter: one of them was changed")


def _check(receipt: Receipt) -> None:
    """Raise ValueError unless the receipt's chain is the chain of its own tokens and digests."""
    if not receipt.tokens:
        raise ValueError("a receipt has no tokens")
    if min(receipt.tokens) < 0 or max(receipt.tokens) >= 2**31:
        raise ValueError("a receipt has a token that is none")
    if chain_of(receipt.tokens, receipt.bits) != receipt.chain:
        raise ValueError("its chain does not belong to its tokens and digests: it was changed")


def difference(receipt: Receipt, engine: Contract) -> Difference | None:
    """Return the first part of the contract in which ``engine`` differs from the receipt, of parts that matter."""
    skipped = dict.fromkeys(FRONTEND_PARTS, "")
    if not receipt.request.params.masked:
        skipped["grammars"] = ""
    return first_difference(*(msgspec.structs.replace(each, **skipped) for each in (receipt.contract, engine)))


def check_contract(receipt: Receipt, engine: Engine) -> None:
    """Raise PreheatError if the engine has another contract, or if no engine has the receipt's."""
    if receipt.mixed:
        raise PreheatError("the weights changed while the answer was given, so no engine can give it again")
    contract = engine.ready.contract
    assert contract is not None, "an engine that is ready has a contract"
    if (found := difference(receipt, contract)) is not None:
        raise PreheatError(
            f"the receipt has another contract than this engine, first in {found}; start the engine of the receipt, or "
            "compare all the same with --any-contract"
        )


def replay(receipt: Receipt, engine: Engine) -> Outcome:
    """Give the answer again and compare it with its receipt. Raises PreheatError if the engine refuses the request."""
    return _replayed([receipt], engine)[0]


def replay_log(receipts: Sequence[Receipt], engine: Engine, *, any_contract: bool = False) -> Iterator[Outcome]:
    """Yield the outcome of each receipt. Receipts that the engine cannot give again are not equal.

    Answers do not depend on their neighbors, so many run together. ``any_contract``: receipts with another contract
    are compared all the same. Raises EngineDead.
    """
    for first in range(0, len(receipts), TOGETHER):
        group = receipts[first : first + TOGETHER]
        refused = [None if any_contract else _refusal(receipt, engine) for receipt in group]
        given = iter(_given([each for each, why in zip(group, refused, strict=True) if why is None], engine))
        yield from (next(given) if why is None else why for why in refused)


def _refusal(receipt: Receipt, engine: Engine) -> Outcome | None:
    """Return the outcome of a receipt with another contract, None if the engine has the receipt's."""
    try:
        check_contract(receipt, engine)
    except PreheatError as error:
        return Outcome(len(receipt.tokens), 0, error.message)
    return None


def _given(receipts: Sequence[Receipt], engine: Engine) -> list[Outcome]:
    """Return the outcomes of receipts that run together, or one by one if a request fails."""
    try:
        return _replayed(receipts, engine)
    except EngineDead:
        raise
    except PreheatError as error:
        if len(receipts) == 1:
            return [Outcome(len(receipts[0].tokens), 0, error.message)]
    return [outcome for receipt in receipts for outcome in _given([receipt], engine)]


def _replayed(receipts: Sequence[Receipt], engine: Engine) -> list[Outcome]:
    """Give answers again, all at once, and compare each with its receipt."""
    runs = engine.run([Replayed(receipt, 0, len(receipt.tokens)) for receipt in receipts])
    answers = [each.tokens for each in engine.answers]
    return [_outcome(receipt, seen.bits, tokens) for receipt, seen, tokens in zip(receipts, runs, answers, strict=True)]


def _outcome(receipt: Receipt, bits: Sequence[object], tokens: Sequence[int]) -> Outcome:
    """Compare the digests and tokens of an answer with its receipt."""
    total = len(receipt.tokens)
    for position, (digest, expected) in enumerate(zip(receipt.bits, bits, strict=False)):
        if digest != expected:
            return Outcome(total, position, "the logits differ")
        if receipt.tokens[position] != tokens[position]:
            return Outcome(total, position, f"the token is {tokens[position]}, not {receipt.tokens[position]},")
    if len(tokens) < total:
        return Outcome(total, len(tokens), "the answer ends")
    return Outcome(total)


class Step(msgspec.Struct):
    """One step of an answer: its token, the digest of its logits and the receipt's, and the logits, fp32 [vocab]."""

    position: int
    token: int
    digest: int
    expected: int
    logits: list[float]

    @property
    def equal(self) -> bool:
        return self.digest == self.expected

    def lines(self) -> Iterator[str]:
        """Yield the step as text: the greatest logits, the lowest id first in a tie."""
        same = "as in the receipt" if self.digest == self.expected else f"{self.expected} in the receipt"
        yield f"position {self.position}: token {self.token}, digest of the logits {self.digest}, {same}"
        order = sorted(range(len(self.logits)), key=lambda id: (-self.logits[id], id))
        yield from (f"{id:>9} {self.logits[id]!r}" for id in order[:TOP])


def check_position(receipt: Receipt, position: int) -> None:
    """Raise InvalidRequest if the answer has no token at ``position``."""
    if not 0 <= position < len(receipt.tokens):
        raise InvalidRequest(f"--at must be from 0 to {len(receipt.tokens) - 1}, not {position}")


def step_at(receipt: Receipt, engine: Engine, position: int) -> Step:
    """Compute one step of an answer, behind the receipt's own tokens. Raises InvalidRequest for a wrong position."""
    check_position(receipt, position)
    with engine.keeping_logits() as kept:
        (seen,) = engine.run([Replayed(receipt, position, position + 1)])
    token, (bits,) = engine.answers[0].tokens[0], seen.bits
    assert isinstance(bits, int), "an engine that generates has digests of logits"
    return Step(position, token, bits, receipt.bits[position], kept[0][0].tolist())
