"""Slots that a query does not see change no bit of its attention, whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat.backends.cpu import decode_attention, hidden, paged_attention
from tests.controls import fails
from tests.cpu.test_attention import Pages

LENGTHS = [830, 5, 300, 256, 70]
AT = [700, 3, 299, 130, 64]
"""Position of each row's query: some in a last block, some with blocks behind it."""

ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])

POISON = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38]


def spoil(pages: Pages, row: int, positions: np.ndarray, seed: int | None) -> None:
    """Fill the slots of these positions with all kinds of poison.

    Keys and values are filled; with seed None, by zeros.
    """
    shape = (len(positions), 2, *pages.cache.shape[2:3], pages.dim)
    chosen = torch.zeros(shape)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.tensor(POISON)[torch.randint(len(POISON), shape, generator=generator)]
    blocks = pages.tables[row, positions // pages.block_size]
    pages.cache[blocks, :, :, positions % pages.block_size] = chosen.to(pages.dtype)


def spoil_behind(pages: Pages, seed: int | None, window: int | None = None) -> None:
    """Fill all slots that the queries at ``AT`` do not see."""
    for row, at in enumerate(AT):
        room = -(-LENGTHS[row] // pages.block_size) * pages.block_size
        spoil(pages, row, np.arange(at + 1, room), seed)
        if window:
            spoil(pages, row, np.arange(max(at - window + 1, 0)), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "in_place"), [(16, False), (64, False), (256, False), (256, True)])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("alibi", [None, ALIBI])
def test_decoding_sees_nothing_behind_its_end(
    dtype: torch.dtype, block_size: int, in_place: bool, window: int | None, alibi: torch.Tensor | None
) -> None:
    pages = Pages(LENGTHS, 32, block_size, dtype)
    pages.alibi = alibi
    spoil_behind(pages, None, window)
    right, _ = pages.decode(list(enumerate(AT)), window, in_place=in_place)
    for seed in range(3):
        spoil_behind(pages, seed, window)
        found, _ = pages.decode(list(enumerate(AT)), window, in_place=in_place)
        assert all(map(torch.equal, found, right))
        tiles = pages.attend([(row, at, 1) for row, at in enumerate(AT)], window)
        assert all(torch.equal(one[0], other[0]) for one, other in zip(tiles, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("where", "alibi"), [(40, None), (255, None), (256, None), (500, None), (500, ALIBI)])
def test_a_prompt_token_reaches_only_the_queries_that_see_it(
    dtype: torch.dtype, window: int | None, where: int, alibi: torch.Tensor | None
) -> None:
    """A prompt token changes no query before it in its tile, and no other row of the step.

    The KV splits of other rows are merged beside the row's own.
    """
    pages = Pages(LENGTHS, 32, 64, dtype)
    pages.alibi = alibi
    work = [(row, 0, n) for row, n in enumerate(LENGTHS)]
    right = pages.attend(work, window)
    spoil(pages, 0, np.array([where]), 0)
    found = pages.attend(work, window)
    last = LENGTHS[0] if window is None else where + window
    assert torch.equal(found[0][:where], right[0][:where])
    assert torch.equal(found[0][last:], right[0][last:])
    assert not found[0][where:last].isfinite().any(), "what sees it is not finite, and says so"
    assert all(map(torch.equal, found[1:], right[1:]))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_row_that_is_not_finite_leaves_its_neighbors_alone(in_place: bool) -> None:
    """A row that is not finite leaves its neighbors alone, also neighbors with fewer KV splits, and padding."""
    pages = Pages(LENGTHS, 32, 256, torch.float32)
    at = list(enumerate(AT))
    right, _ = pages.decode(at, in_place=in_place)
    for row in range(len(at)):
        before = pages.q[row][AT[row]].clone()
        pages.q[row][AT[row]] = torch.nan
        found, _ = pages.decode(at, in_place=in_place, pad=3, finite=False)
        assert found[row].isnan().all()
        assert all(torch.equal(found[i], right[i]) for i in range(len(at)) if i != row)
        pages.q[row][AT[row]] = before


def test_a_kernel_that_multiplies_by_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the bare kernel multiplies hidden values by zero, and breaks the laws above."""

    def multiplied(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, lse = hidden.kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return part, lse

    for module in (decode_attention, paged_attention):
        monkeypatch.setattr(module, "attend", multiplied)
    pages = Pages(LENGTHS, 32, 256, torch.float32)
    spoil_behind(pages, 0)
    for in_place in (False, True):
        with fails():
            pages.decode(list(enumerate(AT)), in_place=in_place)
    pages = Pages(LENGTHS, 32, 64, torch.float32)
    spoil(pages, 0, np.array([40]), 0)
    assert pages.attend([(0, 0, 830)])[0][:40].isnan().any()
