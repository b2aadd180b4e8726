"""Ranks on several nodes, without Ray: data sent by connections keeps the bits of data sent through memory."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams, startup
from preheat.backends.base.collective import Link
from preheat.backends.cpu import collective as exchanges
from preheat.backends.cpu.collective import PLACE_BYTES
from preheat.backends.cpu.sharing import CpuSharing
from preheat.backends.rendezvous import Nodes
from preheat.errors import RankDied
from preheat.model.files import BUNDLED_PATH
from preheat.parallel import share
from preheat.parallel.channel import LineReceiver, LineSender
from preheat.parallel.groups import Groups
from preheat.parallel.ranks import Child, Started
from preheat.parallel.remote import callers
from preheat.parallel.sites import Network
from preheat.parallel.wire import Door, call
from preheat.settings import Settings
from tests.cpu.test_tensor_parallel import (
    OPTIONS,
    RoundsOnTheWire,
    Wrapped,
    answers,
    logits_on,
    on_ranks,
    record_of,
)

KEY = b"the key of one engine"


def nothing() -> None:
    """Report no death."""


def on_nodes(world: int, run: Callable[[Nodes], object]) -> list:
    """Return the results of ``run`` on ``world`` ranks: threads with nothing but connections."""
    doors = [Door("127.0.0.1", KEY) for _ in range(world)]
    site = Network(tuple(door.address for door in doors))

    def rank(number: int) -> object:
        torch.set_num_threads(1)
        return run(site.rendezvous(number, doors[number], nothing))

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank, range(world)))
    for door in doors:
        door.close()
    return found


def joined(run: Callable[[Link], Tensor], check: Callable[[], None] = nothing) -> Callable[[Nodes], Tensor]:
    return lambda rendezvous: run(CpuSharing().join(rendezvous, check))


def random_bits(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return any bits: NaNs with payloads, zeros with signs, numbers too small for their exponent."""
    bits = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8)
    return torch.from_numpy(bits).view(dtype)


def everything(link: Link) -> Tensor:
    """Return the bytes of many exchanges in a row."""
    found = []
    for seed, dtype in enumerate((torch.uint8, torch.bfloat16, torch.float32, torch.int64)):
        for size in (1, 3, 257, (PLACE_BYTES + 5) // dtype.itemsize):
            mine = random_bits(size, dtype, 10 * seed + link.rank)
            found += [link.gather(mine), link.gather(mine[None].repeat(2, 1).T)]  # not contiguous
            found += [link.broadcast(mine.clone(), source) for source in range(link.world)]
    found.append(link.gather(torch.tensor(link.rank)))  # without a dimension
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in found])


def test_connections_move_the_bits_that_memory_moves(tmp_path):
    through_memory = on_ranks(3, tmp_path / "memory", everything)
    by_connections = on_nodes(3, joined(everything))
    assert all(torch.equal(found, through_memory[0]) for found in through_memory + by_connections)


def test_the_control_of_moved_bits():
    """Control: a conversion on the way, there and back, makes other NaNs, and is seen."""

    class Converts(Wrapped):
        def gather(self, x: Tensor) -> Tensor:
            return super().gather(x.double()).to(x.dtype)

    def gathered(link: Link) -> Tensor:
        return link.gather(random_bits(1 << 16, torch.float32, link.rank)).view(torch.uint8)

    (plain, _), (converted, _) = on_nodes(2, joined(gathered)), on_nodes(2, joined(lambda c: gathered(Converts(c))))
    assert not torch.equal(plain, converted)


def test_gathered_tensors_are_in_the_order_of_ranks():
    def late(link: Link) -> Tensor:
        time.sleep(0.05 * (2 - link.rank))
        return link.gather(torch.full((3,), link.rank))

    for found in on_nodes(3, joined(late)):
        assert found[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("wrap", "same"), [(lambda link: link, True), (RoundsOnTheWire, False)])
def test_a_model_on_nodes_has_the_logits_of_one_rank(wrap, same, tmp_path):
    """Two nodes give the logits of one rank.

    The control rounds partial sums on the way.
    """
    (alone,) = on_ranks(1, tmp_path / "one", lambda link: logits_on(link, BUNDLED_PATH))
    for logits in on_nodes(2, joined(lambda link: logits_on(wrap(link), BUNDLED_PATH))):
        assert torch.equal(logits, alone) is same


def test_stages_on_nodes_pass_on_their_tensors():
    settings, sent = Settings(pipeline_parallel_size=2, tensor_parallel_size=2), torch.randn(2, 300, 96)

    def rank(rendezvous: Nodes) -> Tensor:
        groups = Groups.join(settings, CpuSharing(), rendezvous, nothing)
        assert groups.pipe is not None and groups.collective is not None
        got = sent + rendezvous.rank if groups.stage == 0 else torch.zeros_like(sent)
        (groups.pipe.receive if groups.stage else groups.pipe.send)(*got)
        shared = groups.collective.gather(got)
        return groups.pipe.logits(shared if rendezvous.rank == 2 else torch.zeros_like(shared))

    for logits in on_nodes(4, rank):
        assert torch.equal(logits, torch.stack([sent, sent + 1]))


def test_a_process_group_begins_at_the_first_ranks_address():
    """A process group begins at the first rank's address, as NCCL's would.

    No test has GPUs on several nodes.
    """

    def meet(rendezvous: Nodes) -> tuple[bytes, object]:
        """Return a value from the store, and the store.

        The first rank's store serves only while it is referenced.
        """
        store = rendezvous.store()
        store.set(str(rendezvous.rank), str(rendezvous.rank))
        return store.get(str(1 - rendezvous.rank)), store

    assert [found for found, _ in on_nodes(2, meet)] == [b"1", b"0"]


def pair() -> tuple[Connection, Connection]:
    door = Door("127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(call, door.address, KEY, lambda host: host.encode())
        ours, hello = door.accept(nothing)
        assert hello == b"127.0.0.1"
        door.close()
        return ours, caller.result()


def test_messages_arrive_whole_and_in_order():
    """Messages arrive whole and in order, with more data than connections hold and one of two ranks slow."""
    pairs = [pair() for _ in range(2)]
    sent = [np.full(size, size) for size in (1, 10, 40_000, 300_000) * 3]

    def read(rank: int) -> bool:
        receiver = LineReceiver(pairs[rank][1])
        for expected in sent:
            time.sleep(0.01 * rank)
            if not np.array_equal(receiver.receive(), expected):
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        read_all = [pool.submit(read, rank) for rank in range(2)]
        sender = LineSender([ours for ours, _ in pairs])
        for message in sent:
            sender.send(message)
        assert all(each.result(20) for each in read_all)


def test_who_does_not_know_the_key_is_not_heard(monkeypatch):
    monkeypatch.setattr("preheat.parallel.wire._PROOF_SECONDS", 1)
    door = Door("127.0.0.1", KEY)
    with ThreadPoolExecutor(2) as pool, socket.create_connection(door.address):
        stranger = pool.submit(call, door.address, b"another key", lambda host: b"let me in")
        accepted = pool.submit(door.accept, nothing)
        with pytest.raises(AuthenticationError):
            stranger.result(10)
        with socket.create_connection(door.address) as rude:
            rude.sendall(pickle.dumps("what is not asked for") * 100)
        known = pool.submit(call, door.address, KEY, lambda host: b"it is me")
        assert accepted.result(10)[1] == b"it is me"
        known.result(10).close()
    door.close()


def test_a_peer_that_has_gone_ends_the_exchange(monkeypatch):
    monkeypatch.setattr(exchanges, "_LAST_WORDS_SECONDS", 0.2)
    gone, left = pair()
    link = CpuSharing().join(Nodes((None, left), 0, ()), nothing)
    gone.close()
    with pytest.raises(ConnectionError, match="rank 1 cannot be reached: it closed its connection"):
        link.gather(torch.zeros(3))


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_a_waiting_rank_learns_why_its_peer_died(how):
    """A rank that waits for a silent or closed connection is told the leader's reason for the death.

    A silent connection alone would never tell of it.
    """
    other, ours = pair()
    reason: list[str] = []

    def check() -> None:
        if reason:
            raise RankDied(reason[0])

    threading.Timer(0.3, reason.append, ["Rank 1 ended with status -9"]).start()
    link = CpuSharing().join(Nodes((None, ours), 0, ()), check)
    if how == "closed":
        other.close()
    with pytest.raises(RankDied, match="status -9"):
        link.gather(torch.zeros(1 << 22))


class TwoNodes:
    """Launcher of a rank on a simulated other node: the rank has only an address and a key."""

    nodes = ("here", "there")

    def __init__(self) -> None:
        self.door = Door("127.0.0.1", KEY)

    def launch(self) -> list[Started]:
        there = f"from preheat.parallel.remote import be_rank; be_rank(1, {self.door.address!r}, {KEY!r})"
        child = Child([sys.executable, "-c", there], stdin=subprocess.DEVNULL)
        return [Started(child, *found, device=0) for found in callers(self.door, 1, nothing).values()]


@pytest.fixture
def on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(startup, "waiting_ranks", lambda settings: None)
    monkeypatch.setattr(share, "_launcher", lambda settings, backend: TwoNodes())
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    yield llm
    llm.loop.executor.ranks.close()


def test_an_engine_on_two_nodes(on_two_nodes):
    """An engine on two nodes has the digest and answers of one rank.

    It shares no memory, and ends with a killed rank.
    """
    one = LLM(tp_invariant=True, **OPTIONS)
    assert record_of(on_two_nodes).proof.digest == record_of(one).proof.digest
    assert answers(on_two_nodes) == answers(one)
    ranks = on_two_nodes.loop.executor.ranks
    maps = Path(f"/proc/{ranks.processes[0].pid}/maps").read_text()
    assert "/preheat-" not in maps and ranks.on_a_node == 1
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="Rank 1 ended with status -9: it was killed"):
        on_two_nodes.generate(["x"] * 3, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
