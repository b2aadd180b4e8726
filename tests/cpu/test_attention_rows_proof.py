"""The proof of attention's rows per tile.

A row has the same bits at every place of a call.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from preheat.backends.cpu import paged_attention
from preheat.backends.cpu.paged_attention import PagedAttention, widest_tile
from preheat.backends.cpu.tiles import Rows, plan_tiles

LENGTH, DIM, BLOCK = 136, 64, 64


def forget() -> None:
    """Forget all proofs of the kernel."""
    for cache in (paged_attention._proven_rows, paged_attention._reference, paged_attention._expected):
        cache.cache_clear()


@pytest.fixture
def _unproven():
    """Forget all proofs of the kernel, before and after a test."""
    forget()
    yield
    forget()


def attend(work: list[tuple[int, int]], group: int) -> torch.Tensor:
    """Return the attention of a step with rows (position, count) of one sequence.

    The sequence has ``LENGTH`` tokens and one key head.
    """
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(LENGTH, group, DIM, generator=generator)
    cache = torch.randn(-(-LENGTH // BLOCK) + 1, 2, 1, BLOCK, DIM, generator=generator)
    first, extend = (np.array(column, np.int64) for column in zip(*work, strict=True))
    tables = np.tile(np.arange(1, len(cache), dtype=np.int32), (len(work), 1))
    rows = Rows(np.cumsum(extend) - extend, first, extend, tables)
    tiles = plan_tiles(rows, BLOCK, None, 1 << 14, widest=widest_tile(group, DIM, q.dtype))
    found = PagedAttention(tiles, group, 1, DIM, q.dtype)
    queries = torch.cat([q[at : at + count] for at, count in work])
    out = torch.empty_like(queries)
    out[found.targets] = found(queries, cache, DIM**-0.5)
    return out


def differing(group: int) -> list[str]:
    """Return the ways to cut the sequence that give other bits than one token at a time."""
    alone = torch.cat([attend([(at, 1)], group) for at in range(LENGTH)])
    found = []
    for size in (LENGTH, 128, 37, 32, 16, 5, 2):
        chunks = [(at, min(size, LENGTH - at)) for at in range(0, LENGTH, size)]
        apart = torch.cat([attend([chunk], group) for chunk in chunks])
        for how, out in (("apart", apart), ("in one step", attend(chunks, group))):
            if not torch.equal(out, alone):
                found.append(f"{group} heads a key head, chunks of {size} {how}")
    return found


def differing_on_threads() -> list[str]:
    """Return :func:`differing` for one and for two threads, each with proofs of its own."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        forget()
        found += [f"{threads} threads, {line}" for group in (1, 5, 7) for line in differing(group)]
    return found


@pytest.mark.parametrize("instructions", ["", "AVX2", "SSE4_2"])
def test_a_query_has_the_same_bits_at_every_place_of_a_tile(instructions: str) -> None:
    """A query's bits do not depend on its place.

    That holds with MKL's kernels for this processor and for older ones. Some of MKL's kernels compute the last rows of
    a block differently. The places differ between one and two threads.
    """
    code = "from tests.cpu.test_attention_rows_proof import differing_on_threads as found; print(found())"
    env = {name: value for name, value in os.environ.items() if name != "MKL_ENABLE_INSTRUCTIONS"}
    env |= {"MKL_ENABLE_INSTRUCTIONS": instructions} if instructions else {}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("_unproven")
def test_a_kernel_that_depends_on_a_rows_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged_attention.kernel

    def last_rows_otherwise(query: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        part, lse = right(query, *args, **options)
        part[:, :, 30::32] += 1e-3
        return part, lse

    assert paged_attention._reference(DIM, torch.float32, 1) >= 24
    paged_attention._reference.cache_clear()
    paged_attention._expected.cache_clear()
    monkeypatch.setattr(paged_attention, "kernel", last_rows_otherwise)
    assert paged_attention._reference(DIM, torch.float32, 1) <= 24
    assert paged_attention._proven_rows(40, DIM, torch.float32, 1) == 0


@pytest.mark.usefixtures("_unproven")
def test_a_kernel_that_packs_the_keys_of_four_heads_in_another_order_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch packs keys from four heads on, for many rows, on processors with AMX."""
    right = paged_attention.kernel

    def packed_otherwise(query: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        part, lse = right(query, *args, **options)
        if query.shape[1] >= 4 and query.shape[2] >= 24:
            part += 1e-3
        return part, lse

    monkeypatch.setattr(paged_attention, "kernel", packed_otherwise)
    assert 0 < paged_attention._reference(DIM, torch.float32, 1) < 24
    assert 0 < paged_attention._proven_rows(7, DIM, torch.float32, 1) < 24
    assert paged_attention._proven_rows(24, DIM, torch.float32, 1) == 0
