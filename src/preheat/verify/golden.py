"""``preheat verify --golden FILE``: answers compared with a file of an earlier boot, such as the one before an upgrade.

The file has a digest of each prompt's answer, and a digest of each layer's output for one prompt. If answers differ,
the first layer that differs tells an operation within the model from the sampler.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from preheat.errors import SettingsError
from preheat.utils.contract import Contract, first_difference
from preheat.utils.files import TABLE_BYTES, read_file, shown, why_unread, write_whole
from preheat.verify.compare import Seen
from preheat.verify.context_paths import large_steps
from preheat.verify.drive import Answer, Engine
from preheat.verify.prompts import Prompt

DIGEST_BYTES = 16
CONTEXT = 64
"""Most tokens of the context whose layers are compared."""


class Golden(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The digests of a boot.

    ``answers`` has one for each prompt: of its tokens and of the logits behind each. ``prompts`` is the digest of all
    prompts. ``layers`` has one for each layer's output, and last one of the logits, for the first prompt.
    """

    contract: Contract
    prompts: str
    answers: list[str]
    layers: list[str]


def golden_of(engine: Engine, prompts: Sequence[Prompt]) -> Golden:
    """Run ``prompts`` on ``engine`` and return their digests."""
    contract, seen = engine.ready.contract, engine.run(prompts)
    assert contract is not None, "an engine that is ready has a contract"
    return Golden(
        contract=contract,
        prompts=_digest_of(prompts),
        answers=[_answer(*pair) for pair in zip(seen, engine.answers, strict=True)],
        layers=[_digest(each.contiguous().numpy().tobytes()) for each in _outputs(engine, prompts[0].tokens)],
    )


def _digest_of(prompts: Sequence[Prompt]) -> str:
    return _digest(repr([(each.tokens, each.params) for each in prompts]).encode())


def _answer(seen: Seen, answer: Answer) -> str:
    return _digest(repr((list(seen.bits), answer.tokens)).encode())


def _outputs(engine: Engine, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Yield the output of each layer, then the logits, for the first of ``tokens``, operation by operation."""
    with engine.unwatched() as runner:
        runner.eager = True
        (logits,) = large_steps(runner, np.array(tokens[:CONTEXT], np.int32))
        yield from (each.float().cpu() for each in runner.layers)
        yield logits.float().cpu()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def differences(stored: Golden, now: Golden) -> list[str]:
    """Return what differs, one line each: first the contract, which may differ with equal bits, then the answers."""
    lines, changed = list[str](), [one != other for one, other in zip(stored.answers, now.answers, strict=True)]
    if (part := first_difference(stored.contract, now.contract)) is not None:
        lines.append(f"contract, first in {part}")
    if any(changed):
        count = f"{sum(changed):,} of {len(changed):,} prompts differ, first prompt {changed.index(True)}"
        lines.append(f"answers: {count}; {_where(stored, now)}")
    return lines


def _where(stored: Golden, now: Golden) -> str:
    """Return the first layer that differs for the first prompt."""
    pairs = itertools.zip_longest(stored.layers, now.layers)
    found = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if found is None:
        return "operation by operation all layers and logits of prompt 0 agree: look at the sampler and at programs"
    if found == len(stored.layers) - 1:
        return "all layers agree, but the logits differ"
    return f"the first layer that differs is layer {found}"


def read_golden(path: str) -> Golden:
    """Return the golden file at ``path``. Raises SettingsError if it is none."""
    try:
        return msgspec.json.decode(read_file(path, most=TABLE_BYTES), type=Golden)
    except FileNotFoundError:
        raise SettingsError(f"--golden {shown(path)} does not exist: write it with --write-golden {path}") from None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise SettingsError(f"--golden {shown(path)} is no golden file: {why_unread(error)}") from None


def check_same_prompts(stored: Golden, prompts: Sequence[Prompt], path: str) -> None:
    """Raise SettingsError if the file is about other prompts."""
    if (stored.prompts, len(stored.answers)) != (_digest_of(prompts), len(prompts)):
        raise SettingsError(
            f"--golden {shown(path)} has {len(stored.answers):,} other prompts: give --prompts, --reduced and "
            "--max-model-len as they were"
        )


def write_golden(golden: Golden, path: str) -> None:
    """Write a golden file. Raises SettingsError if it cannot be written."""
    try:
        write_whole(Path(path), msgspec.json.format(msgspec.json.encode(golden)) + b"\n")
    except OSError as error:
        raise SettingsError(f"--write-golden {shown(path)} cannot be written: {why_unread(error)}") from None
