"""A boot's digest with everything that its bits may depend on.

It is stored and compared with another boot's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from preheat.errors import SettingsError
from preheat.utils.files import TABLE_BYTES, read_file, shown, why_unread
from preheat.utils.text import brief
from preheat.warmup.record import Proof
from preheat.warmup.store import fingerprint

DIGEST = re.compile(r"(simulated-)?[0-9a-f]{8,}")


def proof_of(level: str, parts: Mapping[str, Any]) -> Proof:
    """Return a proof without a digest yet.

    The plan among ``parts`` is reduced to a fingerprint.
    """
    short = {name: fingerprint({name: part}) if name == "plan" else part for name, part in parts.items()}
    return Proof(level=level, parts=json.loads(json.dumps(short)))  # tuples become lists, as in a file


def read_proof(path: str) -> Proof:
    """Return the proof in a JSON file.

    The file is a record or the output of ``preheat verify --json``. A record comes from ``/warmup`` or ``preheat warm
    --json``. Raises SettingsError for anything else.
    """
    try:
        found = msgspec.json.decode(read_file(path, most=TABLE_BYTES), type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise SettingsError(
            f"--digest {shown(path)} is neither a record of a boot nor an output of preheat verify: {why_unread(error)}"
        ) from None
    proof, failed = found.proof, found.failed
    if not proof.digest:
        raise SettingsError(f"--digest {path} holds no digest: that boot ran without the check (--boot-check off)")
    if not DIGEST.fullmatch(proof.digest):
        raise SettingsError(f"--digest {path} holds {brief(proof.digest)}, and that is not a digest of a boot")
    if failed:
        raise SettingsError(f"--digest {path} is of a boot that failed a check: {brief(failed)}")
    return proof


class _Check(msgspec.Struct):
    """The fields of a record's item that are read."""

    kind: str = ""
    outcome: str = ""
    reason: str = ""


class _File(msgspec.Struct):
    """A record or a verdict.

    It has the reason why its boot was wrong, if it was.
    """

    proof: Proof
    entries: list[_Check] = []
    blocked_reason: str = ""

    @property
    def failed(self) -> str:
        checks = (each for each in self.entries if each.kind == "check" and each.outcome == "failed")
        return self.blocked_reason or next((each.reason or "a check failed" for each in checks), "")


def differences(stored: Proof, now: Proof) -> list[str]:
    """Return the differences, one line each: parts by name, then the bits."""
    lines = [f"{name}: {was} -> {is_}" for name, was, is_ in _changed("", stored.parts, now.parts)]
    if stored.digest != now.digest:
        lines.append(f"bits: {stored.digest} -> {now.digest}")
    return lines


def _changed(name: str, was: Any, is_: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ, by their dotted names."""
    if isinstance(was, dict) and isinstance(is_, dict):
        for key in [*was, *(key for key in is_ if key not in was)]:
            yield from _changed(f"{name}.{key}" if name else key, was.get(key), is_.get(key))
    elif isinstance(was, list) and isinstance(is_, list) and len(was) == len(is_):
        for place, (one, other) in enumerate(zip(was, is_, strict=True)):
            yield from _changed(f"{name}[{place}]", one, other)
    elif was != is_:
        yield name, was, is_
