"""Paged attention is right against float64, with the same bits however a sequence is cut, batched and placed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat.backends.cpu import tiles
from preheat.backends.cpu.decode_attention import DecodeAttention, Heads
from preheat.backends.cpu.paged_attention import PagedAttention
from preheat.backends.cpu.tiles import SPLIT, Rows, plan_tiles

HEADS, KV_HEADS = 4, 2


class Pages:
    """Sequences of random keys and values scattered over shuffled blocks."""

    def __init__(self, lengths: list[int], dim: int, block_size: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.max_keys = 1 << 14
        self.alibi: torch.Tensor | None = None
        self.lengths, self.dim, self.block_size, self.dtype = lengths, dim, block_size, dtype
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks), generator=generator).numpy() + 1
        self.cache = torch.zeros(sum(blocks) + 1, 2, KV_HEADS, block_size, dim, dtype=dtype)
        self.tables = np.zeros((len(lengths), max(blocks)), np.int32)
        self.q, self.kv = [], []
        at = 0
        for row, n in enumerate(lengths):
            self.tables[row, : blocks[row]] = order[at : at + blocks[row]]
            at += blocks[row]
            self.q.append(torch.randn(n, HEADS, dim, generator=generator).to(dtype))
            kv = torch.randn(n, 2, KV_HEADS, dim, generator=generator).to(dtype)
            self.store(row, kv)
            self.kv.append(kv)

    def store(self, row: int, kv: torch.Tensor) -> None:
        """Write keys and values [tokens, 2, kv heads, dim] into the row's blocks."""
        position = np.arange(len(kv))
        self.cache[self.tables[row, position // self.block_size], :, :, position % self.block_size] = kv

    def attend(self, work: list[tuple[int, int, int]], window: int | None = None) -> list[torch.Tensor]:
        """Return the attention of (row, first position, queries) for each of ``work``, all in one step."""
        extend = np.array([count for _, _, count in work])
        starts = np.cumsum(extend) - extend
        first = np.array([position for _, position, _ in work])
        rows = Rows(starts, first, extend, self.tables[[row for row, _, _ in work]])
        cut = plan_tiles(rows, self.block_size, window, self.max_keys)
        q = torch.cat([self.q[row][position : position + count] for row, position, count in work])
        group = PagedAttention(cut, HEADS, KV_HEADS, self.dim, self.dtype)
        out = torch.full_like(q, torch.nan)
        out[group.targets] = group(q, self.cache, self.dim**-0.5, self.alibi)
        return list(out.split(extend.tolist()))

    def decode(
        self,
        at: list[tuple[int, int]],
        window: int | None = None,
        *,
        in_place: bool,
        planned: int = 0,
        pad: int = 0,
        finite: bool = True,
    ) -> tuple[list[torch.Tensor], int]:
        """Return the attention of one query at each (row, position).

        Also return how many more steps the work lists hold. The work lists are made ``planned`` steps before. ``pad``
        tokens of padding follow the queries. With ``finite``, all outputs must be finite.
        """
        slots, position = (np.array(each, np.int64) for each in zip(*at, strict=True))
        heads = Heads(window, HEADS, KV_HEADS, self.dim)
        rows = DecodeAttention(
            position - planned,
            slots,
            self.tables,
            heads,
            self.dtype,
            block_size=self.block_size,
            tokens=len(at) + pad,
            max_keys=self.max_keys,
            in_place=in_place,
        )
        rows.move(torch.from_numpy(np.pad(position, (0, pad)).astype(np.int32)))
        qkv = torch.full((len(at) + pad, HEADS + 2 * KV_HEADS, self.dim), torch.nan, dtype=self.dtype)
        for token, (row, where) in enumerate(at):
            qkv[token, :HEADS] = self.q[row][where]
        out = rows(qkv, 0, self.cache, self.dim**-0.5, self.alibi).view(-1, 1, HEADS, self.dim)
        assert not finite or torch.isfinite(out).all()
        return list(out[: len(at)]), rows.steady

    def exact(self, row: int, window: int | None = None) -> torch.Tensor:
        """Return float64 attention of the whole sequence."""
        n = self.lengths[row]
        q = self.q[row].double()
        k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in self.kv[row].unbind(1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        position = torch.arange(n)
        seen = position[None] <= position[:, None]
        if window:
            seen &= position[None] > position[:, None] - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_float64(dim: int, window: int | None, dtype: torch.dtype) -> None:
    pages = Pages([1, 64, 65, 700], dim, 64, dtype)
    outputs = pages.attend([(row, 0, n) for row, n in enumerate(pages.lengths)], window)
    for row, out in enumerate(outputs):
        exact = pages.exact(row, window)
        error = (out.double() - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "window"), [(24, None), (64, None), (64, 200), (128, None), (256, 200)])
def test_bits_do_not_depend_on_chunks(threads: int, dtype: torch.dtype, dim: int, window: int | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pages = Pages([830, 5, 300, 256, 257, 511], dim, 64, dtype)
        whole = [pages.attend([(row, 0, n)], window)[0] for row, n in enumerate(pages.lengths)]
        together = pages.attend([(row, 0, n) for row, n in reversed(list(enumerate(pages.lengths)))], window)
        for row, out in enumerate(reversed(together)):
            assert torch.equal(out, whole[row])
        at = 0
        for count in (1, 37, 2, 200, 64, 65, 3, 256, 202):  # ragged chunks, each beside other rows
            chunk, *_ = pages.attend([(0, at, count), (2, 7, 100), (1, 4, 1)], window)
            assert torch.equal(chunk, whole[0][at : at + count])
            at += count
        assert at == 830
        for step in ([0, 255, 256, 299], [3, 100, 255], [1, 64, 128, 200]):  # decoding, alone and among others
            work = [(2, position, 1) for position in step] + [(4, 256, 1), (5, 500, 1), (0, 829, 1)]
            for (row, position, _), out in zip(work, pages.attend(work, window), strict=True):
                assert torch.equal(out[0], whole[row][position])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
def test_bits_do_not_depend_on_the_block_size(block_size: int) -> None:
    lengths = [700, 90]
    ours, reference = (Pages(lengths, 64, size, torch.bfloat16) for size in (block_size, 64))
    ours.q, ours.kv = reference.q, reference.kv
    for row, kv in enumerate(ours.kv):
        ours.store(row, kv)
    work = [(0, 0, 700), (1, 0, 90)]
    for out, expected in zip(ours.attend(work), reference.attend(work), strict=True):
        assert torch.equal(out, expected)


def test_another_split_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another split gives other bits, since the split belongs to the contract."""
    pages = Pages([830], 64, 64, torch.bfloat16)
    before = pages.attend([(0, 0, 830)])[0]
    monkeypatch.setattr(tiles, "SPLIT", 128)
    assert not torch.equal(before, pages.attend([(0, 0, 830)])[0])


@pytest.mark.parametrize("max_keys", [1, 300, 1000])
def test_calls_of_any_size_give_the_same_bits(max_keys: int) -> None:
    pages = Pages([700, 333, 20], 64, 64, torch.bfloat16)
    work = [(0, 0, 700), (1, 0, 333), (2, 3, 17)]
    before = pages.attend(work)
    pages.max_keys = max_keys
    for out, expected in zip(pages.attend(work), before, strict=True):
        assert torch.equal(out, expected)


STEPS = ([829, 4, 299, 255, 899, 512, 699], [100, 0, 256, 255, 600, 256, 256])


@pytest.mark.parametrize("window", [None, 200, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 128])
def test_rows_that_decode_have_the_bits_of_tiles(dim: int, dtype: torch.dtype, window: int | None) -> None:
    """Decoding rows have the bits of tiles, in place or gathered.

    A row's blocks lie among blocks of its own, shared ones, and blocks that hold nothing readable.
    """
    pages = Pages([830, 5, 300, 256, 900, 513, 700], dim, 256, dtype)
    pages.tables[2, 0] = pages.tables[3, 0] = pages.tables[5, 0]  # shared prefixes: one block each is unused now
    pages.tables[4, :2] = pages.tables[6, :2]
    unread = np.setdiff1d(np.arange(len(pages.cache)), pages.tables)
    assert len(unread) == 4
    pages.cache[unread] = torch.nan
    for step in STEPS:
        work = [(row, position, 1) for row, position in enumerate(step)]
        for some in (work, work[:1], work[3:6]):
            expected = pages.attend(some, window)
            for in_place in (False, True):
                outputs, _ = pages.decode([each[:2] for each in some], window, in_place=in_place, pad=3)
                for out, right in zip(outputs, expected, strict=True):
                    assert torch.equal(out, right)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [None, 200])
def test_rows_that_decode_from_small_blocks_have_the_bits_of_tiles(block_size: int, window: int | None) -> None:
    pages = Pages([830, 5, 300, 256, 900, 513, 700], 64, block_size, torch.float32)
    pages.max_keys = 600
    for step in STEPS:
        expected = pages.attend([(row, position, 1) for row, position in enumerate(step)], window)
        outputs, _ = pages.decode(list(enumerate(step)), window, in_place=False)
        for out, right in zip(outputs, expected, strict=True):
            assert torch.equal(out, right)


@pytest.mark.parametrize(("block_size", "in_place"), [(64, False), (256, False), (256, True)])
@pytest.mark.parametrize("window", [None, 100, 300])
def test_work_of_rows_that_decode_holds_for_as_long_as_it_says(
    block_size: int, in_place: bool, window: int | None
) -> None:
    pages = Pages([1300] * 4, 64, block_size, torch.float32)
    held, broke = 0, 0
    for begin in ([700, 270, 520, 10], [64, 100, 260, 300], [99, 190, 299, 355]):
        start = list(enumerate(begin))
        _, steady = pages.decode(start, window, in_place=in_place)
        for steps in {0, 1, steady // 2, steady} & set(range(steady + 1)):
            at = [(row, position + steps) for row, position in start]
            kept, _ = pages.decode(at, window, in_place=in_place, planned=steps)
            held += steps > 0
            assert all(map(torch.equal, kept, pages.decode(at, window, in_place=in_place)[0]))
        late = steady + SPLIT
        at = [(row, position + late) for row, position in start]
        try:
            kept, _ = pages.decode(at, window, in_place=in_place, planned=late)
        except IndexError:  # a row's split lies behind its window
            broke += 1
        else:
            broke += not all(map(torch.equal, kept, pages.decode(at, window, in_place=in_place)[0]))
    assert held > 3
    assert broke, "the comparison can fail: work that is kept for too long is wrong"


def test_in_place_attention_reads_the_block_itself() -> None:
    """Control: blocks that swap contents while the table stays the same give other bits."""
    pages = Pages([830, 700], 64, 256, torch.bfloat16)
    work = [(0, 829), (1, 699)]
    before, _ = pages.decode(work, in_place=True)
    here, there = pages.tables[0, 2], pages.tables[0, 3]
    pages.cache[[here, there]] = pages.cache[[there, here]]
    after, _ = pages.decode(work, in_place=True)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    pages.tables[0, [2, 3]] = there, here
    assert torch.equal(pages.decode(work, in_place=True)[0][0], before[0])


def test_splits_are_merged_from_first_to_last() -> None:
    """Five splits are merged from first to last.

    The check at boot has two, and two have only one order.
    """
    tiles, splits, rows, dim = 3, 5, 8, 16
    group = PagedAttention.__new__(PagedAttention)
    group.num_tiles, group.num_splits, group.rows = tiles, splits, rows
    group.pair_of = torch.arange(tiles * splits)
    group.unseen = torch.zeros(tiles, splits, 1, rows, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(tiles * splits, 1, rows, dim, generator=generator)
    lse = torch.randn(tiles * splits, 1, rows, generator=generator)

    def merged(order: list[int]) -> torch.Tensor:
        outs, sums = part.view(tiles, splits, 1, rows, dim), lse.view(tiles, splits, 1, rows)
        weight = torch.exp(sums - sums.amax(1, keepdim=True)).unsqueeze(-1)
        total, norm = torch.zeros(tiles, 1, rows, dim), torch.zeros(tiles, 1, rows, 1)
        for split in order:
            total, norm = total + outs[:, split] * weight[:, split], norm + weight[:, split]
        return total / norm

    assert torch.equal(group._merge(part, lse.clone()), merged([0, 1, 2, 3, 4]))
    assert not torch.equal(merged([4, 3, 2, 1, 0]), merged([0, 1, 2, 3, 4]))
