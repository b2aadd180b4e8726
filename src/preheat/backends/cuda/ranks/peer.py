"""Exchange between the GPUs of one host by writing into each other's memory.

:mod:`preheat.backends.cuda.ranks.peer_kernels` has the kernels and their contract. The memory is torch's symmetric
memory: plain device memory that the other ranks map. NVLink's multicast is never used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from preheat.backends.base.layers import FusedInput, Norm
from preheat.backends.cuda.device.compiling import compiling
from preheat.backends.cuda.device.launch import options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput
from preheat.backends.cuda.ranks.collective import (
    PATIENCE_S,
    Landing,
    Nccl,
    RankSums,
    Room,
    SumAndNorm,
    add_ranks,
    landings,
)
from preheat.backends.cuda.ranks.peer_kernels import BESIDE, EACH, GATHER, GONE, LINE, SHARES, exchange
from preheat.backends.cuda.ranks.peer_landed import add_landed, norm_landed
from preheat.backends.cuda.ranks.peer_norm import sum_and_norm
from preheat.errors import PreheatError
from preheat.ops.quantization import QuantizedRows

logger = logging.getLogger(__name__)

PROGRAMS = 128
"""Most programs of an exchange: no more than a Hopper GPU has multiprocessors."""

WITHOUT_SLOTS = 256
"""Most programs that exchange without slots: two for a multiprocessor."""

STRIDE = 8192
"""Numbers of 4 bytes in a slot: the largest tile."""

WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


EACH_MOST = 1 << 19
"""Most numbers that every rank adds by itself, times the other ranks; of more, each rank adds a share."""


SHARES_MOST = 1 << 21
"""Most numbers of which a rank adds a share with residual and norm: a program sends one row at a time."""


LANDED = 1 << 24
"""Sums that a rank has room for from each rank, see :class:`preheat.backends.cuda.ranks.collective.Landing`: 64 MiB."""


class Launch(NamedTuple):
    """How to exchange a number of numbers: the form, the numbers of a tile, and the warps of a program."""

    form: int
    block: int
    warps: int


def launch_for(size: int, world: int) -> Launch:
    """Return the fastest launch for the sum of ``size`` numbers, by measurement on two H100."""
    if size <= 1 << 15:
        return Launch(EACH.value, 1024, 4)
    if size <= 1 << 17:
        return Launch(EACH.value, 2048, 8)
    if size * (world - 1) <= EACH_MOST:
        return Launch(EACH.value, 4096, 8)
    return Launch(SHARES.value, 8192, 16) if size > 1 << 20 else Launch(SHARES.value, 4096, 8)


def slots(world: int, programs: int = PROGRAMS, stride: int = STRIDE) -> int:
    """Return the numbers in the slots of one rank."""
    return 2 * world * programs * stride


def flags(world: int, programs: int = WITHOUT_SLOTS) -> int:
    """Return the numbers of the flags of one rank."""
    return programs * world * int(LINE.value)


def run(
    room: Room, mine: Tensor, bias: Tensor | None, out: Tensor, how: Launch, programs: int = PROGRAMS
) -> None:  # fmt: skip
    """Exchange ``mine``, contiguous, into ``out`` by the launch ``how``, of at most ``programs`` programs."""
    size, outputs = mine.numel(), mine.shape[-1]
    step = how.block * (room.world if how.form == SHARES.value else 1)
    stride = room.parts[0].numel() // (2 * room.world * room.programs)
    exchange[(min(cdiv(size, step), programs, room.programs),)](
        mine, bias, out, room.parts, room.results, room.flags, room.epochs, room.silent, size, outputs, out.shape[-1],
        room.patience,
        FORM=how.form, RANK=room.rank, WORLD=room.world, BLOCK=how.block, STRIDE=stride, PROGRAMS=room.programs,
        **options(num_warps=how.warps, num_stages=1),
    )  # fmt: skip


class PeerCarrier:
    """See :class:`preheat.backends.cuda.ranks.collective.Carrier`; ``rooms`` are one room, by the dtype of results."""

    def __init__(self, rooms: Mapping[torch.dtype, Room]) -> None:
        room = rooms[torch.float32]
        self.rank, self._rooms, self._landed = room.rank, rooms, room.landed
        self._copies = torch.cuda.Stream(room.epochs.device) if room.epochs.is_cuda else None
        self._moving: list[Tensor] = []  # until their copies have ended

    def landings(self, rows: int, size: int, at_once: int) -> list[Landing]:
        return landings(rows, self._landed[0].shape[1] // size, at_once, len(self._landed))

    def places(self, landing: Landing, size: int) -> Iterator[tuple[slice, Tensor]]:
        landed = self._landed
        for rank in (each for each in range(len(landed)) if each != self.rank):
            start = landing.of(rank).start
            for rows in landing.pieces(rank):
                place = landed[rank][self.rank, (rows.start - start) * size : (rows.stop - start) * size]
                mine = torch.empty_like(place).view(-1, size)
                yield rows, mine
                self._copy(mine, place)
        own = landing.of(self.rank)
        if own.start < own.stop:
            yield own, landed[self.rank][self.rank, : (own.stop - own.start) * size].view(-1, size)

    def _copy(self, mine: Tensor, place: Tensor) -> None:
        """Start a copy of ``mine`` to ``place`` behind the work so far, beside the work to come.

        A copy engine moves it, at 380 GB/s between two H200. Kernels that write there themselves hold up their
        multiprocessors: a product then takes half as long again.
        """
        self._moving.append(mine)
        if self._copies is None:
            place.copy_(mine.view(-1))
            return
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            place.copy_(mine.view(-1), non_blocking=True)

    def landed(self, dtype: torch.dtype) -> Room:
        if self._copies is not None and self._moving:
            torch.cuda.current_stream().wait_stream(self._copies)
        self._moving.clear()
        return self._rooms[dtype]

    def add(self, landing: Landing, bias: Tensor | None, out: Tensor) -> None:
        add_landed(self.landed(out.dtype), landing, bias, out)

    def norm(
        self, landing: Landing, addend: Tensor | None, norm: Norm, residual: Tensor, to: Tensor | QuantizedRows,
        how: FusedInput | None,
    ) -> None:  # fmt: skip
        assert isinstance(norm, CudaNorm) and (how is None or isinstance(how, QuantizedInput))
        norm_landed(self.landed(residual.dtype), landing, addend, norm, residual, to, how)


class Peers(RankSums):
    """Ranks of one host that exchange by writing into each other's memory; ``nccl`` is the same group."""

    def __init__(self, nccl: Nccl, room: Room, kept: object = None) -> None:
        """``kept`` is kept as long as the ranks are: other ranks write into its memory."""
        self.rank, self.world, self._nccl, self._kept = nccl.rank, nccl.world, nccl, kept
        self._rooms = {dtype: room.as_dtype(dtype) for dtype in WIDTHS}
        self._words = {
            4: room._replace(parts=tuple(each.view(torch.int32) for each in room.parts)),
            1: room._replace(parts=tuple(each.view(torch.uint8) for each in room.parts)),
        }
        self._silent, self._flags, self._ended = room.silent, room.flags[room.rank], False
        self._gone = torch.full(self._flags.shape, GONE.value, pin_memory=self._flags.is_cuda)
        self._aside = torch.cuda.Stream(self._flags.device) if self._flags.is_cuda else None
        self.carrier = PeerCarrier(self._rooms) if room.landed else None

    def sum(self, mine: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = mine.new_empty(mine.shape, dtype=dtype)
        run(self._rooms[dtype], mine, bias, out, launch_for(mine.numel(), self.world))
        return out

    def joining(self, rows: int, size: int) -> SumAndNorm | None:
        few = rows * size * (self.world - 1) <= EACH_MOST
        return partial(sum_and_norm, self._rooms[torch.float32]) if few and next_power_of_2(size) <= STRIDE else None

    def sharing(self, rows: int, size: int, dtype: torch.dtype) -> SumAndNorm | None:
        fits = next_power_of_2(size) <= STRIDE and rows * size <= SHARES_MOST
        return partial(sum_and_norm, self._rooms[dtype], shares=True) if fits else None

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.world, *x.shape)
        x = x.contiguous()
        width = 4 if x.nbytes % 4 == x.data_ptr() % 4 == 0 else 1
        words = x.view(-1).view(torch.int32 if width == 4 else torch.uint8)
        block = 1024 if len(words) <= 1 << 15 else 4096
        run(self._words[width], words, None, found.view(-1).view(words.dtype), Launch(GATHER.value, block, 4))
        return found

    def beside(self, x: Tensor, columns: int) -> Tensor | None:
        """Return the first ``columns`` of all ranks' ``x`` [rows, width] side by side; None if they are no whole words.

        ``x`` is contiguous.
        """
        if any(each * x.element_size() % 4 for each in (x.shape[1], columns)):
            return None
        out, rows = x.new_empty(len(x), columns), x.view(torch.int32)
        block = 1024 if rows.numel() <= 1 << 15 else 4096
        run(self._words[4], rows, None, out.view(torch.int32), Launch(BESIDE.value, block, 4))
        return out

    def fault(self) -> str | None:
        """See :class:`preheat.backends.base.collective.Collective`."""
        silent = int(self._silent)
        if not silent or self._ended:
            return None
        return (
            f"rank {silent - 1} did not answer rank {self.rank} on the device within {PATIENCE_S:g} s: its GPU or its "
            "process hangs; look into its log, and try --disable-custom-all-reduce"
        )

    def abort(self) -> None:
        self._ended = True
        with torch.cuda.stream(self._aside):  # a copy needs no multiprocessor, and programs that wait may hold them all
            self._flags.copy_(self._gone, non_blocking=True)
        self._nccl.abort()


def meet(nccl: Nccl, device: torch.device) -> RankSums:
    """Return the ranks of ``nccl`` that exchange over peer memory, or ``nccl`` where their GPUs cannot.

    All ranks get the same kind. Raise PreheatError if an exchange gives other bits than NCCL and the tree.
    """
    devices = nccl.gather(torch.tensor([device.index], device=device)).flatten().tolist()
    apart = [each for each in devices if each != device.index and not torch.cuda.can_device_access_peer(device, each)]
    alone = nccl.gather(torch.tensor([len(apart)], device=device)).flatten().tolist()
    if any(alone):
        logger.warning("GPUs %s cannot write into each other's memory: ranks exchange through NCCL", devices)
        return nccl
    peers = Peers(nccl, *room_of(nccl, device))
    with compiling(os.cpu_count() or 1):
        exchange_all(peers, device)
    prove(peers, nccl, device)
    return peers


def room_of(nccl: Nccl, device: torch.device) -> tuple[Room, object]:
    """Return memory that all ranks of ``nccl`` map, and its owner."""
    world, group = nccl.world, dist.distributed_c10d._get_default_group().group_name
    numbers, counts = slots(world), flags(world)
    first = 2 * numbers + 2 * counts
    memory = symmetric.empty(first + 2 * world * LANDED, dtype=torch.int32, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    if handle is None:
        raise PreheatError("torch has no symmetric memory for these GPUs: set --disable-custom-all-reduce")
    torch.cuda.synchronize(device)
    nccl.gather(torch.zeros(1, device=device))  # all flags are zeros
    torch.cuda.synchronize(device)

    def of_all(size: tuple[int, ...], dtype: torch.dtype, first: int) -> tuple[Tensor, ...]:
        return tuple(handle.get_buffer(rank, size, dtype, first) for rank in range(world))

    room = Room(
        nccl.rank,
        of_all((numbers,), torch.float32, 0),
        of_all((numbers,), torch.float32, numbers),
        of_all((counts,), torch.int64, numbers),
        torch.zeros(WITHOUT_SLOTS, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, pin_memory=True),
        landed=of_all((world, LANDED), torch.float32, first),
        returned=of_all((world, LANDED), torch.float32, first + world * LANDED),
        with_slots=PROGRAMS,
    )
    return room, (memory, handle)


PROOF_SIZES = (1, 4096, 33 * 4096, 4096 * 200 + 24, 4096 * 300 + 24, 4096 * 2048)
"""Numbers of the proof: every launch of :func:`launch_for`, whole tiles and parts of tiles, one step and several."""


def prove(peers: Peers, nccl: Nccl, device: torch.device, sizes: tuple[int, ...] = PROOF_SIZES) -> None:
    """Raise PreheatError unless ``peers`` and ``nccl`` give equal bits, twice for each of ``sizes``."""
    random, wrong = torch.Generator(device).manual_seed(1 + nccl.rank), []
    for size in sizes:
        differs = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(3):  # both turns of the slots, and the first one again
            mine = torch.empty(1, size, device=device).normal_(generator=random).mul_(1e3)
            found = nccl.gather(mine)
            right = add_ranks(found, None, torch.bfloat16).view(torch.int16)
            differs += peers.sum(mine, None, torch.bfloat16).view(torch.int16).ne(right).sum()
            differs += peers.gather(mine).view(torch.int32).ne(found.view(torch.int32)).sum()
        if int(nccl.gather(differs).sum()):
            wrong.append(size)
    wrong += _landed_wrong(peers, nccl, random) + joined_wrong(peers, nccl, random)
    if wrong or peers.fault():
        raise PreheatError(
            f"The exchange over peer memory gives other bits than NCCL for {wrong} numbers of each rank "
            f"({peers.fault() or 'all ranks answered'}): set --disable-custom-all-reduce, and report this"
        )


def exchange_all(peers: Peers, device: torch.device, sizes: tuple[int, ...] = PROOF_SIZES) -> None:
    """Launch the sums and gathers of the proof once each, to compile their kernels side by side."""
    for size in sizes:
        mine = torch.empty(1, size, device=device)
        peers.sum(mine, None, torch.bfloat16)
        add_ranks(peers.gather(mine), None, torch.bfloat16)
    joined_wrong(peers, peers, torch.Generator(device))


LANDED_ROWS = (1024, 1000)
"""Rows of 4,096 numbers in the proof of landed sums."""


def _landed_wrong(peers: Peers, nccl: Nccl, random: torch.Generator) -> list[int]:
    """Return the numbers of ``LANDED_ROWS`` whose landed sums differ from NCCL and the tree on any rank."""
    wrong, carrier = [], peers.carrier
    assert carrier is not None
    for rows in LANDED_ROWS:
        mine = torch.empty(rows, 4096, device=random.device).normal_(generator=random).mul_(1e3)
        right, found = (
            add_ranks(nccl.gather(mine), None, torch.bfloat16),
            mine.new_empty(mine.shape, dtype=torch.bfloat16),
        )
        for landing in carrier.landings(rows, 4096, 128):
            for part, to in carrier.places(landing, 4096):
                to.copy_(mine[part])
            carrier.add(landing, None, found)
        if int(nccl.gather(found.view(torch.int16).ne(right.view(torch.int16)).sum()).sum()):
            wrong.append(mine.numel())
    return wrong


JOINED_ROWS = (3, 200)
"""Rows in the proof of sums with residual and norm: each rank adds all of them, or a share."""


def joined_wrong(peers: Peers, nccl: RankSums, random: torch.Generator, size: int = 4096) -> list[int]:
    """Return the numbers of ``JOINED_ROWS`` whose norms differ from NCCL, the tree and a norm on any rank."""
    wrong, device = [], random.device
    norm = CudaNorm(torch.ones(size, device=device, dtype=torch.bfloat16), 1e-5)
    for rows in JOINED_ROWS:
        joined = peers.joining(rows, size) or peers.sharing(rows, size, torch.bfloat16)
        assert joined is not None
        mine = torch.empty(rows, size, device=device).normal_(generator=random).mul_(1e3)
        residual = mine.to(torch.bfloat16)
        right = residual.clone()
        expected = norm.add(add_ranks(nccl.gather(mine), None, torch.bfloat16), right)
        found = joined(mine, None, norm, residual, None)
        assert isinstance(found, Tensor)
        pairs = ((found, expected), (residual, right))
        differs = sum(each.view(torch.int16).ne(other.view(torch.int16)).sum() for each, other in pairs)
        if int(nccl.gather(cast(Tensor, differs)).sum()):
            wrong.append(mine.numel())
    return wrong
