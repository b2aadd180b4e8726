"""Each draw of the sampler's check at boot sees a fault.

Each fault is seen by a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from preheat.errors import CheckFailed
from preheat.execution import logit_stages
from preheat.ops.sampler import TokenCounts
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify import draws
from preheat.verify.check_runner import CheckRunner

Plant = Callable[[pytest.MonkeyPatch], None]
OPTIONS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "skip_warmup": True,
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> CheckRunner:
    loop = boot_engine(Settings.load(OPTIONS), InlineTransport())
    return CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)


@pytest.fixture(scope="module")
def drafting() -> CheckRunner:
    """Return a check on an engine whose sequences may have drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
    loop = boot_engine(Settings.load(OPTIONS | {"speculative_config": drafts}), InlineTransport())
    return CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)


def described(kind: str, name: str, change: Callable[[np.ndarray], Any]) -> Plant:
    """Plant a changed field ``name`` in the rows as the sampler gets them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(logit_stages, kind)

        def changed(*args: Any) -> Any:
            found = right(*args)
            return replace(found, **{name: change(getattr(found, name))})

        patch.setattr(logit_stages, kind, changed)

    return plant


def random(name: str, change: Callable[[np.ndarray], Any]) -> Plant:
    """Plant a changed field of rows that draw at random."""
    return described("_metadata", name, change)


def penalised(name: str, change: Callable[[np.ndarray], Any]) -> Plant:
    """Plant a changed field of rows with penalties."""
    return described("_penalties", name, change)


def counted_once(patch: pytest.MonkeyPatch) -> None:
    right = TokenCounts.of_rows

    def of_rows(self: TokenCounts, rows: Any) -> tuple[np.ndarray, ...]:
        row, ids, count = right(self, rows)
        return row, ids, np.minimum(count, 1)

    patch.setattr(TokenCounts, "of_rows", of_rows)


def counted(change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Plant:
    """Plant penalties that see another prompt or output."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = TokenCounts.reset
        patch.setattr(
            TokenCounts, "reset", lambda self, slot, prompt, output: right(self, slot, *change(prompt, output))
        )

    return plant


def bans(more: int) -> Plant:
    """Plant stop ids that are banned for ``more`` more tokens."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right, stage = logit_stages.MinTokens.edits, logit_stages.MinTokens
        patch.setattr(stage, "needed", lambda self, slots, rows, position: slots.bans_stop_ids[rows])
        patch.setattr(stage, "edits", lambda self, request, length, least: right(self, request, length, least + more))

    return plant


def no_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logit_stages.LogitBias, "edits", lambda *_: ())


def hot(patch: pytest.MonkeyPatch) -> None:
    """Plant greedy rows that draw at random."""
    right = Slots.describe

    def describe(self: Slots, slots: Any, request: Any) -> None:
        right(self, slots, request)
        self.temperature[slots] = np.where(self.temperature[slots] > 0, self.temperature[slots], 64)
        self.seed[slots] += np.uint64(1)

    patch.setattr(Slots, "describe", describe)


PLANTS: dict[str, Plant] = {
    "greedy rows draw at random": hot,
    "half the temperature": random("temperature", lambda each: each / 2),
    "32 bits of the seed": random("seed", lambda each: each & np.uint64(0xFFFFFFFF)),
    "the noise of another seed": random("seed", lambda each: each + np.uint64(1)),
    "the position after": random("position", lambda each: each + 1),
    "the first choice": random("choice", lambda each: each * 0),
    "one more of top_k": random("top_k", lambda each: each + (each > 0)),
    "one less of top_k": random("top_k", lambda each: each - (each > 1)),
    "no top_p": random("top_p", np.ones_like),
    "no min_p": random("min_p", np.zeros_like),
    "no repetition_penalty": penalised("repetition", np.ones_like),
    "no frequency_penalty": penalised("frequency", np.zeros_like),
    "no presence_penalty": penalised("presence", np.zeros_like),
    "a token counts once": counted_once,
    "the prompt is not seen": counted(lambda prompt, output: (prompt[:0], output)),
    "the output is a prompt": counted(lambda prompt, output: (np.concatenate([prompt, output]), output[:0])),
    "bans end one token early": bans(-1),
    "bans end one token late": bans(1),
    "no logit_bias": no_bias,
}


def seen(runner: CheckRunner, plant: Plant | None, rows: tuple[draws.DrawRow, ...] = draws.ROWS) -> bool:
    """Return whether the check with only ``rows`` sees the planted fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "ROWS", rows)
        if plant:
            plant(patch)
        runner.executor.sampler.forget()
        try:
            draws.check_draws(runner)
        except CheckFailed:
            return True
        return False


ROWS = {f"row {number}": row for number, row in enumerate(draws.ROWS)}


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_is_seen(runner, name):
    assert not seen(runner, None)
    assert seen(runner, PLANTS[name])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_alone_sees_a_fault(runner, name):
    assert not seen(runner, None, (ROWS[name],))
    assert any(seen(runner, plant, (ROWS[name],)) for plant in PLANTS.values())


@pytest.mark.parametrize("vocab", [512, 4096, 32_000, 50_257, 128_256, 151_936])
@pytest.mark.parametrize(
    "fault",
    [("top_k", 3, 4), ("top_k", 3, 2), ("top_p", 0.6, 1.0), ("min_p", 0.7, 0.0)],
    ids=lambda fault: f"{fault[0]} is {fault[2]}",
)
def test_tokens_beside_a_cut_are_seen_in_any_vocabulary(fault, vocab):
    """A cut one token off is seen in any vocabulary.

    The seeds of the rows are chosen for it.
    """
    name, right, wrong = fault
    ids = [1 + place * (vocab - 2) // len(draws.LOGITS) for place in range(len(draws.LOGITS))]
    rows = [row for row in draws.ROWS if getattr(row.params, name) == right]
    faulty = [row._replace(params=structs.replace(row.params, **{name: wrong})) for row in rows]
    pairs = [(draws.contract(row, ids), draws.contract(other, ids)) for row, other in zip(rows, faulty, strict=True)]
    assert any(clear and token != other for (token, clear), (other, _) in pairs)


def test_a_row_that_is_taken_out_lets_a_fault_through(runner):
    """Control: only the rows of min_tokens see its fault, so without them it passes."""
    others = tuple(row for row in draws.ROWS if not row.params.min_tokens)
    assert not seen(runner, PLANTS["bans end one token early"], others)


def later_drafts(patch: pytest.MonkeyPatch) -> None:
    """Plant the noise of a sequence's first draft in all its drafts."""
    right = logit_stages._metadata

    def metadata(slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> Any:
        return right(slots, chosen, rows, np.full_like(position, position.min()))

    patch.setattr(logit_stages, "_metadata", metadata)


def drafts_uncounted(patch: pytest.MonkeyPatch) -> None:
    """Plant penalties that do not see the drafts before a draft."""
    right = TokenCounts.of_rows
    patch.setattr(
        TokenCounts, "of_rows",
        lambda self, rows: right(self, replace(rows, tokens=[
            tokens[:known] for tokens, known in zip(rows.tokens, rows.known, strict=True)
        ])),
    )  # fmt: skip


@pytest.mark.parametrize("plant", [None, later_drafts, drafts_uncounted])
def test_draws_of_drafts_that_are_not_the_contracts_are_seen(drafting, plant, monkeypatch):
    drafting.executor.sampler.forget()
    if plant is None:
        draws.check_drafted_draws(drafting)
        return
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=r"drafts: token \d+ was drawn where the contract has \d+"):
        draws.check_drafted_draws(drafting)
