"""The contract: everything that decides the tokens of an answer, in named parts.

Engines with equal contracts give equal answers to equal requests. Receipts, continued answers and kept answers name the
contract that they belong to, and :func:`first_difference` names the first part that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

DIGEST_BYTES = 16


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a contract. An engine knows the first four, a frontend adds the others.

    - ``weights``: the digest of every byte of every tensor.
    - ``numerics``: backend, versions, device, threads, dtypes, scales, and orders of sums.
    - ``sampler``: the noise and its order of operations.
    - ``grammars``: the library of masks, with its version.
    - ``tokenizer``, ``template``, ``defaults``: digests of the tokenizer, the chat template and sampling defaults.

    Adapters are named by each request, so a receipt has the digest of its own.
    """

    weights: str = ""
    numerics: dict[str, Any] = {}
    sampler: str = ""
    grammars: str = ""
    tokenizer: str = ""
    template: str = ""
    defaults: str = ""

    @property
    def id(self) -> str:
        """The digest of all parts, 32 hexadecimal digits."""
        return digest_of(msgspec.to_builtins(self))


class Difference(NamedTuple):
    """A part that differs: its dotted ``name``, and both values."""

    name: str
    one: object
    other: object

    def __str__(self) -> str:
        return f"{self.name}: {self.one} -> {self.other}"


def first_difference(one: Contract, other: Contract) -> Difference | None:
    """Return the first part in which the contracts differ, None if they are equal."""
    return next(differing("", msgspec.to_builtins(one), msgspec.to_builtins(other)), None)


def differing(name: str, one: Any, other: Any) -> Iterator[Difference]:
    """Yield the values that differ inside ``one`` and ``other``, plain data, by their dotted names."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from differing(f"{name}.{key}" if name else key, one.get(key), other.get(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(f"{name}[{place}]", *pair)
    elif one != other:
        yield Difference(name, one, other)


def digest_of(value: object) -> str:
    """Return the digest of plain data, 32 hexadecimal digits; the order of keys does not matter."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
