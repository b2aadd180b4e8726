"""A boot's digest with everything that its bits may depend on.

It is stored and compared with another boot's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.utils.contract import Contract, differing
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


SAMPLER = "Philox4x32-10, Gumbel-max"
"""The noise and the draw of every backend's sampler: :mod:`preheat.ops.sampler`."""

_WITHOUT_BITS = ("plan", "model", "grammars", "ranks", "stages")
"""Parts of a boot that decide no bit, or that have a part of their own in the contract."""


def contract_of(settings: Settings, parts: Mapping[str, Any], weights: str) -> Contract:
    """Return the engine's parts of the contract, from the ``parts`` of its boot's proof.

    Device and threads are left out in the mode with one result on all processors.
    """
    numerics = {name: part for name, part in parts.items() if name not in _WITHOUT_BITS}
    numerics["versions"] = {name: version for name, version in parts["versions"].items() if name != "python"}
    if parts["mode"] == "llvm":
        del numerics["device"], numerics["threads"]
    if "lora" in parts:
        numerics["lora"] = {"dtype": parts["lora"]["dtype"]}
    if not settings.batch_invariant:
        numerics["batch_invariant"] = False
    ties = ", ties of top_k kept" if settings.handle_topk_duplicates else ""
    return Contract(
        weights=weights,
        numerics={"config": parts["model"]["config"], **numerics},
        sampler=SAMPLER + ties,
        grammars=parts.get("grammars", ""),
    )


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
    lines = [str(each) for each in differing("", stored.parts, now.parts)]
    if stored.digest != now.digest:
        lines.append(f"bits: {stored.digest} -> {now.digest}")
    return lines
