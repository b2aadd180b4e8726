"""Exchanges over peer memory: processes that share memory, each a rank whose kernels are interpreted."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import astuple
from itertools import product
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import LayerContext
from preheat.backends.cuda.matmul import layer as matmul_layer
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput
from preheat.backends.cuda.ranks import peer
from preheat.backends.cuda.ranks.collective import RankSums, Room, landings
from preheat.backends.cuda.ranks.peer import Launch, Peers, flags, joined_wrong, run, slots
from preheat.backends.cuda.ranks.peer_kernels import EACH, GATHER, GONE, SHARES
from preheat.backends.cuda.ranks.peer_landed import add_landed
from preheat.backends.cuda.ranks.peer_norm import sum_and_norm
from preheat.ops.matmul import tree_sum
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests import layers
from tests.kernels.backend import InterpretedCuda

PROGRAMS, STRIDE, LANDED = 3, 16, 96
FORMS = {"each": EACH.value, "shares": SHARES.value, "gather": GATHER.value}

Step = tuple[str, int, int, int]
"""The form of an exchange, its numbers, the block, and the most programs."""


def shared(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype).share_memory_()


def rooms(world: int, patience: int = 10**9, first: int = 0, stride: int = STRIDE) -> list[Room]:
    """Return the rooms of ``world`` ranks, in memory that a fork shares; counts begin at ``first``."""
    size, count = slots(world, PROGRAMS, stride), flags(world, PROGRAMS)
    parts = tuple(shared(size) for _ in range(world))
    results = tuple(shared(size) for _ in range(world))
    raised = tuple(shared(count, torch.int64).fill_(first) for _ in range(world))
    landed, returned = (tuple(shared(world * LANDED).view(world, -1) for _ in range(world)) for _ in range(2))
    return [
        Room(
            rank, parts, results, raised, shared(PROGRAMS, torch.int64).fill_(first), shared(1, torch.int64), patience,
            landed, returned,
        )
        for rank in range(world)
    ]  # fmt: skip


def given(step: int, rank: int, size: int) -> Tensor:
    return noise(1, size, seed=100 * step + rank) * 10.0 ** (rank + step % 3)


def exchanged(room: Room, step: int, what: Step) -> Tensor:
    form, size, block, programs = what
    mine = given(step, room.rank, size)
    if form == "gather":
        out = torch.empty(room.world, size)
    else:
        out, room = torch.empty(1, size, dtype=torch.bfloat16), room.as_dtype(torch.bfloat16)
    run(room, mine, None, out, Launch(FORMS[form], block, 4), programs)
    return out


def wanted(world: int, step: int, what: Step) -> Tensor:
    parts = [given(step, rank, what[1]) for rank in range(world)]
    return torch.cat(parts) if what[0] == "gather" else tree_sum(parts).bfloat16()


def forked(world: int, body: Callable[[int], Any], absent: tuple[int, ...] = ()) -> list[Any]:
    """Return the results of ``body`` on each rank, each a process forked from this one."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world)]

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            pipes[rank][1].send(body(rank))
        except BaseException as error:
            pipes[rank][1].send(repr(error))

    ranks = [rank for rank in range(world) if rank not in absent]
    children = [context.Process(target=child, args=(rank,), daemon=True) for rank in ranks]
    for each in children:
        each.start()
    try:
        found = []
        for rank in ranks:
            assert pipes[rank][0].poll(30), f"rank {rank} of {world} does not end"
            found.append(pipes[rank][0].recv())
        return found
    finally:
        for each in children:
            each.kill()
            each.join()


def in_turns(world: int, steps: list[Step], first: int = 0, slow: int = 0) -> list[list[bool]]:
    """Return on each rank, and for each of ``steps``, whether it has the bits of the tree; rank ``slow`` lags."""
    memory = rooms(world, first=first)

    def body(rank: int) -> list[bool]:
        found = []
        for number, step in enumerate(steps):
            if rank == slow:
                time.sleep(0.01)
            found.append(torch.equal(exchanged(memory[rank], number, step), wanted(world, number, step)))
        return found

    return forked(world, body)


MIXED: list[Step] = [
    ("each", 5, 8, 1), ("shares", 70, 8, 2), ("each", 100, 16, 3), ("each", 16, 16, 3), ("gather", 41, 4, 3),
    ("shares", 1, 4, 1), ("shares", 97, 4, 3), ("shares", 97, 4, 3), ("gather", 3, 16, 2), ("each", 97, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_every_form_has_the_bits_of_the_tree(world):
    """Forms, sizes and numbers of programs in any order, as graphs that are replayed in turns would have them."""
    assert in_turns(world, MIXED) == [[True] * len(MIXED)] * world


ROWS_LANDED = [(16, 8, 6), (5, 3, 2), (16, 8, 6), (7, 7, 1), (20, 2, 3)]
"""Rows, the most rows of a rank in a landing, and the numbers of a row."""


def landed(room: Room, step: int, *, early: bool = False) -> Tensor:
    """Return the sum of all ranks' numbers of a step, which each rank writes where they are added.

    ``early``: add without the wait for the other ranks.
    """
    rows, most, size = ROWS_LANDED[step]
    mine, out = given(step, room.rank, rows * size).view(rows, size), torch.empty(rows, size, dtype=torch.bfloat16)
    for landing in landings(rows, most, 1, room.world):
        for rank in range(room.world):
            part = landing.of(rank)
            room.landed[rank][room.rank, : (part.stop - part.start) * size] = mine[part].flatten()
        if early:
            room.flags[room.rank].fill_(1 << 40)
        add_landed(room.as_dtype(torch.bfloat16), landing, None, out, programs=2, block=8)
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_landed_sums_have_the_bits_of_the_tree(world):
    """Between other exchanges, with shares of equal and of other sizes, in one landing and in several."""
    memory = rooms(world)

    def body(rank: int) -> bool:
        same = True
        for step, (rows, _, size) in enumerate(ROWS_LANDED):
            if rank == step % world:
                time.sleep(0.01)
            parts = [given(step, each, rows * size).view(rows, size) for each in range(world)]
            same &= world > rows or torch.equal(landed(memory[rank], step), tree_sum(parts).bfloat16())
            same &= torch.equal(exchanged(memory[rank], step, MIXED[step]), wanted(world, step, MIXED[step]))
        return same

    assert forked(world, body) == [True] * world


def test_sums_added_before_they_have_landed_have_other_bits():
    """The negative control: rank 0 does not wait for the sums of rank 1, which is late."""
    memory = rooms(2)

    def body(rank: int) -> bool:
        if rank == 1:
            time.sleep(0.3)
        parts = [given(0, each, 96).view(16, 6) for each in range(2)]
        return torch.equal(landed(memory[rank], 0, early=rank == 0), tree_sum(parts).bfloat16())

    assert not all(forked(2, body))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("at_once", [1, 4, 256])
@pytest.mark.parametrize("most", [4, 100, 1000])
def test_each_row_lands_once(world, at_once, most):
    """Shares are whole numbers of ``at_once`` rows, but for the last one, and no larger than the memory."""
    for rows in (1, 2, 7, 8, 33, 512, 1000, 1024, 2048):
        found = landings(rows, most, at_once, world)
        assert bool(found) == (rows >= at_once * world and most >= at_once)
        parts = [landing.of(rank) for landing in found for rank in range(world)]
        assert [row for part in parts for row in range(rows)[part]] == list(range(rows)) or not found
        assert all(part.stop - part.start <= most for part in parts)
        assert all((part.stop - part.start) % at_once == 0 for part in parts if 0 < part.stop < rows)
        for landing, rank in product(found, range(world)):
            whole, pieces = landing.of(rank), landing.pieces(rank)
            assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows)[whole])
            assert len(pieces) < 3 and all((each.stop - each.start) % at_once == 0 for each in pieces[:-1])


NORMED = [(5, "rms", False), (1, "rms", True), (13, "layer", True), (2, "rms_plus_one", False), (8, "rms", True)]


@pytest.mark.parametrize(("world", "shares"), [(2, False), (2, True), (4, True)])
def test_a_sum_with_residual_and_norm_has_the_bits_of_three_launches(world, shares):
    """Rows of 13 numbers in slots of 16, between other exchanges; some layers and norms have a bias."""
    memory, size = rooms(world), 13

    def operands(step: int) -> tuple[CudaNorm, Tensor | None, Tensor]:
        rows, kind, biased = NORMED[step]
        bias = noise(size, seed=90 + step).bfloat16() if biased else None
        norm = CudaNorm(noise(size, seed=70 + step).bfloat16(), 1e-5, kind, bias if kind == "layer" else None)  # type: ignore[arg-type]
        return norm, bias, noise(rows, size, seed=80 + step).bfloat16()

    def body(rank: int) -> bool:
        same = True
        for step, (rows, *_) in enumerate(NORMED):
            norm, bias, residual = operands(step)
            other = residual.clone()
            parts = [given(step, each, rows * size).view(rows, size) for each in range(world)]
            room = memory[rank].as_dtype(torch.bfloat16) if shares else memory[rank]
            if rank == step % world:
                time.sleep(0.01)
            programs = 3 - step % 3
            found = sum_and_norm(room, parts[rank], bias, norm, residual, None, programs, shares=shares)
            total = tree_sum(parts) if bias is None else tree_sum(parts) + bias.float()
            same &= torch.equal(found, norm.add(total.bfloat16(), other)) and torch.equal(residual, other)
            same &= torch.equal(exchanged(memory[rank], step, MIXED[step]), wanted(world, step, MIXED[step]))
        return same

    assert forked(world, body) == [True] * world


@pytest.mark.parametrize("wrong", [False, True])
def test_the_proof_at_boot_compares_sums_with_a_norm(monkeypatch, wrong):
    """A control: the rank that adds a row forgets what the other one has sent."""
    memory = rooms(2, stride=4096)
    monkeypatch.setattr(peer, "EACH_MOST", 64)  # the second size is shared
    if wrong:
        monkeypatch.setattr(
            peer, "sum_and_norm", lambda room, mine, *more, **how: sum_and_norm(room, 0 * mine, *more, **how)
        )

    def body(rank: int) -> list[int]:
        peers = Peers(SimpleNamespace(rank=rank, world=2), memory[rank])  # type: ignore[arg-type]
        return joined_wrong(peers, peers, torch.Generator().manual_seed(rank), size=16)

    assert forked(2, body) == ([[48, 3200]] * 2 if wrong else [[], []])


def test_counts_of_the_host_give_other_bits():
    """The negative control: two graphs of one exchange each that keep their own counts of it.

    The second one raises a flag that is raised already, and reads a slot before it was written.
    """
    memory = rooms(2)

    def body(rank: int) -> bool:
        same = True
        for step in range(3):
            memory[rank].epochs.zero_()  # the count in the second graph
            if rank == 0:
                time.sleep(0.2)
            same &= torch.equal(exchanged(memory[rank], step, ("each", 16, 16, 1)), wanted(2, step, MIXED[3]))
        return same

    assert not all(forked(2, body))


def test_a_silent_rank_ends_the_wait_and_later_ones():
    """Rank 1 never answers; the host of rank 0 hears of it, and no later exchange waits."""
    memory = rooms(2, patience=2000)

    def body(rank: int) -> tuple[list[int], float]:
        exchanged(memory[rank], 0, ("each", 4, 16, 1))
        began = time.monotonic()
        for step in range(3):
            exchanged(memory[rank], step, ("shares", 40, 8, 1))
        return memory[rank].silent.tolist(), time.monotonic() - began

    ((silent, seconds),) = forked(2, body, absent=(1,))
    assert silent == [2] and seconds < 2
    assert memory[1].flags[1].max() == GONE.value, "rank 1 hears it, if it comes back"


def test_the_host_ends_a_wait():
    memory = rooms(2, patience=1 << 60)

    def body(rank: int) -> list[int]:
        peers = Peers(RankSums(), memory[rank])
        Timer(0.2, peers.abort).start()
        exchanged(memory[rank], 0, ("each", 4, 16, 1))
        assert peers.fault() is None, "the host knows why"
        return memory[rank].silent.tolist()

    assert forked(2, body, absent=(1,)) == [[2]]


def test_a_rank_that_adds_its_own_splits_first_keeps_the_bits():
    """So one sum of each rank travels, and not one of each split."""
    for splits in (2, 4, 8):
        parts = list((noise(splits, 3, 40) * 10.0 ** torch.arange(splits)[:, None, None]).unbind())
        whole = tree_sum(parts)
        for world in (1 << at for at in range(splits.bit_length())):
            own = [tree_sum(parts[at : at + splits // world]) for at in range(0, splits, splits // world)]
            assert torch.equal(tree_sum(own), whole)
        in_order = torch.stack(parts).cumsum(0)[-1]
        assert splits == 2 or not torch.equal(in_order, whole), "the numbers tell orders apart"


def test_a_layer_of_two_ranks_writes_sums_where_they_are_added(monkeypatch):
    """Seven rows in shares of four and three; the layer's bits are those of one rank, twice."""
    monkeypatch.setattr(matmul_layer, "rows_at_once", lambda choice, outputs: 2)
    memory, outputs, inputs = rooms(2), 24, 4 * 32
    x, weight = noise(7, inputs).bfloat16(), noise(outputs, inputs, seed=1).bfloat16()
    bias, order = noise(outputs).bfloat16(), layers.splits(4)
    alone = layers.linear(InterpretedCuda(), weight, bias, order=order, context=LayerContext(RankSums()))(x)
    norm, residual = CudaNorm(noise(outputs, seed=2).bfloat16(), 1e-5), noise(7, outputs, seed=3).bfloat16()
    codes = QuantizedInput("token", None, plain=True)
    right = residual.clone()
    normed = norm.quantized(alone, right, codes)

    def body(rank: int) -> list[bool]:
        peers = Peers(SimpleNamespace(rank=rank, world=2), memory[rank])  # type: ignore[arg-type]
        assert [each.share for each in peers.carrier.landings(7, outputs, 2)] == [4]
        monkeypatch.setattr(peers, "joining", lambda rows, size: None)  # as of many rows
        mine, part = (each.chunk(2, 1)[rank].contiguous() for each in (x, weight))
        layer = layers.linear(InterpretedCuda(), part, bias, order=layers.splits(2, rank), context=LayerContext(peers))
        same = [torch.equal(layer(mine), alone) for _ in range(2)]
        for how in (None, codes):
            stream = residual.clone()
            found = layer.join(mine, norm, stream, how)
            pairs = [(found, normed.plain)] if how is None else zip(astuple(found), astuple(normed), strict=True)
            same += [torch.equal(stream, right), *(torch.equal(*pair) for pair in pairs)]
        return same

    assert forked(2, body) == [[True] * 8] * 2


@pytest.mark.parametrize("shares", [False, True])
def test_a_layer_of_two_ranks_joins_its_norm(monkeypatch, shares):
    """The layer's own sum, and the layer with residual and norm, have the bits of one rank; gathering moves bits.

    ``shares``: of more rows, each rank adds its share; the choice of a kernel for many rows has no landings.
    """
    if shares:
        monkeypatch.setattr(matmul_layer, "rows_at_once", lambda choice, outputs: None)
        monkeypatch.setattr(Peers, "joining", lambda self, rows, size: None)
    memory, rows, outputs, inputs = rooms(2, stride=4096), 3, 24, 4 * 32
    x, weight, bias = (
        noise(rows, inputs).bfloat16(),
        noise(outputs, inputs, seed=1).bfloat16(),
        noise(outputs).bfloat16(),
    )
    norm, residual = CudaNorm(noise(outputs, seed=2).bfloat16(), 1e-5), noise(rows, outputs, seed=3).bfloat16()
    alone = layers.linear(
        InterpretedCuda(), weight, bias, order=layers.splits(4), context=LayerContext(RankSums())
    )(x)  # fmt: skip
    right = residual.clone()
    normed = norm.add(alone, right)

    def body(rank: int) -> bool:
        peers = Peers(SimpleNamespace(rank=rank, world=2), memory[rank])  # type: ignore[arg-type]
        mine, part = (each.chunk(2, 1)[rank].contiguous() for each in (x, weight))
        layer = layers.linear(InterpretedCuda(), part, bias, order=layers.splits(2, rank), context=LayerContext(peers))
        stream, odd = residual.clone(), torch.arange(5, dtype=torch.bfloat16) + rank
        assert torch.equal(layer(mine), alone) and torch.equal(layer.join(mine, norm, stream, None), normed)
        both = torch.cat([x + each for each in range(2)], 1)[:, : 2 * inputs - 2]
        assert torch.equal(peers.beside(x + rank, both.shape[1]), both) and peers.beside(x, 3) is None
        assert torch.equal(peers.gather(odd), torch.stack([odd - rank, odd - rank + 1])) and peers.fault() is None
        return torch.equal(stream, right)

    assert forked(2, body) == [True, True]


@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_of_two_ranks_join_their_norm(monkeypatch, tokens):
    """The experts, residual and norm in the launch of the exchange have the bits of one rank; 33 rows are shared."""
    monkeypatch.setattr(peer, "EACH_MOST", 32)
    memory, experts, hidden, inner, routing = rooms(2, stride=4096), 8, 32, 64, Routing(2, True, False)
    x, logits = noise(tokens, hidden).bfloat16(), noise(tokens, experts, seed=1).bfloat16()
    gate_up = noise(experts, 2 * inner, hidden, seed=2).bfloat16()
    down = noise(experts, hidden, inner, seed=3).bfloat16()
    norm, residual = CudaNorm(noise(hidden, seed=4).bfloat16(), 1e-5), noise(tokens, hidden, seed=5).bfloat16()
    context = LayerContext(RankSums())
    alone = layers.experts(InterpretedCuda(), gate_up, down, routing, order=layers.splits(4), context=context)
    assert alone.join(x, lambda _: logits, norm, residual, None) is None
    right = residual.clone()
    normed = norm.add(alone(x, logits), right)

    def body(rank: int) -> bool:
        peers = Peers(SimpleNamespace(rank=rank, world=2), memory[rank])  # type: ignore[arg-type]
        gates = gate_up.view(experts, 2, inner, hidden).chunk(2, 2)[rank].reshape(experts, -1, hidden)
        part, order = down.chunk(2, 2)[rank].contiguous(), layers.splits(2, rank)
        mine = layers.experts(InterpretedCuda(), gates, part, routing, order=order, context=LayerContext(peers))
        stream = residual.clone()
        assert torch.equal(mine.join(x, lambda _: logits, norm, stream, None), normed) and not mine.has_slots
        return torch.equal(stream, right) and torch.equal(mine(x, logits), alone(x, logits))

    assert forked(2, body) == [True, True]
