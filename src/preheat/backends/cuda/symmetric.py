"""Sums of ranks through memory that all GPUs of a host read: one kernel, in the order of the tree, with the bits of
:func:`preheat.backends.cuda.collective.add_ranks`.

A program is a channel. It takes a span of numbers at a time: it writes its rank's to where its peers read, tells the
same channel of each peer, waits until they have told it, and adds what all have written. Channels never wait for each
other, so a rank may be ahead in some.

How often a channel has met its peers, its epoch, is kept on the device, so that a graph can be replayed after any
other. What is written for an epoch lies in the half of that epoch's parity. It is overwritten two epochs later, after a
meeting at which every peer was past reading it; so one meeting for each block is enough.

All programs of a launch must be on the GPU at a time: there are fewer than its multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.collective import Nccl
from preheat.backends.cuda.launch import COMPILED, begin, options

CHANNELS = 128
SPAN = tl.constexpr(32768)
"""Numbers that a channel may write for an epoch: with 128 channels, 32 MiB of each GPU."""
_SIZES = ((1024, 4), (4096, 16))
"""Numbers that a program loads at a time, and its warps: the first with which once is enough, else the last."""
TWICE_FROM = 1 << 21
"""Numbers, times ranks, from which on each rank adds a share and the others read its sums: a second meeting takes less
than reading everything. It is what 128 rows of 4,096 are to four ranks; not measured yet.
"""

_FENCE = tl.constexpr("""{
    .reg .pred %first;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    @%first fence.acq_rel.sys;
    mov.u32 $0, $1;
}""")
_TELL = tl.constexpr("""{
    .reg .pred %first;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    @%first st.relaxed.sys.global.u32 [$1], $2;
    mov.u32 $0, $2;
}""")
_WAIT = tl.constexpr("""{
    .reg .pred %other, %behind;
    .reg .u32 %thread;
    .reg .s32 %seen, %over;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %other, %thread, 0;
    @%other bra met;
again:
    ld.acquire.sys.global.s32 %seen, [$1];
    ld.relaxed.sys.global.s32 %over, [$3];
    sub.s32 %seen, %seen, $2;
    setp.lt.s32 %behind, %seen, 0;
    setp.eq.and.s32 %behind, %over, 0, %behind;
    @%behind bra again;
met:
    mov.u32 $0, $2;
}""")
"""Epochs are compared by their difference, which wraps around as they do."""


@triton.jit
def _meet(flags, mine, rank, channel, epoch, over, WORLD: tl.constexpr):
    """What this program wrote before can be seen by the ``channel`` of all ranks behind their calls for ``epoch``."""
    if COMPILED:
        tl.debug_barrier()  # all threads have written, and have read what the last meeting was for
        tl.inline_asm_elementwise(_FENCE, "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1)
        for peer in tl.static_range(WORLD):
            there = flags[peer] + channel * WORLD + rank
            tl.inline_asm_elementwise(_TELL, "=r,l,r", [there, epoch], dtype=tl.int32, is_pure=False, pack=1)
        for peer in tl.static_range(WORLD):
            here = mine + channel * WORLD + peer
            tl.inline_asm_elementwise(_WAIT, "=r,l,r,l", [here, epoch, over], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def _both(buffers, rank: tl.constexpr, place):
    """What two neighbours wrote."""
    left = tl.load(buffers[rank] + place, cache_modifier=".cg")
    return left + tl.load(buffers[rank + 1] + place, cache_modifier=".cg")


@triton.jit
def _all(buffers, place, WORLD: tl.constexpr):
    """The sum of what all ranks wrote, in the order of the tree."""
    total = _both(buffers, 0, place)
    if WORLD >= 4:
        total += _both(buffers, 2, place)
    if WORLD == 8:
        right = _both(buffers, 4, place)
        right += _both(buffers, 6, place)
        total += right
    return total


@triton.jit
def _store(out, at, size, total, bias, outputs):
    """Sums, rounded, with the bias."""
    if bias is not None:
        total += tl.load(bias + at % outputs).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["rank", "rows", "blocks"])
def _sum_ranks(
    mine, bias, out, buffers, flags, own, own_flags, epochs, over, rank, rows, blocks, outputs,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Spans of out, of ``blocks`` times BLOCK numbers, a channel every so many spans. ``buffers`` and ``flags`` are
    tuples, one of each rank; ``own`` are those of ``rank``. ``TWICE``: a rank adds its share of each span, and reads
    the others' after a second meeting; ranks divide ``blocks``.
    """
    begin(overlap)
    channel = tl.program_id(0)
    epoch = tl.load(epochs + channel)
    lane, size = tl.arange(0, BLOCK), rows.to(tl.int64) * outputs
    span = blocks.to(tl.int64) * BLOCK
    for turn in range(channel, tl.cdiv(size, span), tl.num_programs(0)):
        epoch += 1
        first = turn * span
        place = (channel * 2 + (epoch & 1)) * SPAN + lane
        for done in range(0, tl.minimum(span, size - first), BLOCK):
            at = first + done + lane
            tl.store(own + place + done, tl.load(mine + at, mask=at < size))
        _meet(flags, own_flags, rank, channel, epoch, over, WORLD)
        if not TWICE:
            for done in range(0, tl.minimum(span, size - first), BLOCK):
                _store(out, first + done + lane, size, _all(buffers, place + done, WORLD), bias, outputs)
        else:
            share = blocks // WORLD * BLOCK
            epoch += 1
            shared = (channel * 2 + (epoch & 1)) * SPAN + lane
            for done in range(0, share, BLOCK):
                tl.store(own + shared + done, _all(buffers, place + rank * share + done, WORLD))
            _meet(flags, own_flags, rank, channel, epoch, over, WORLD)
            for peer in tl.static_range(WORLD):
                for done in range(0, share, BLOCK):
                    total = tl.load(buffers[peer] + shared + done, cache_modifier=".cg")
                    _store(out, first + peer * share + done + lane, size, total, bias, outputs)
    tl.store(epochs + channel, epoch)


@dataclass(frozen=True)
class Room:
    """What rank ``rank`` has of memory that is shared: a buffer fp32 [CHANNELS * 2 * SPAN] and flags int32 [CHANNELS *
    ranks] of each rank, all zero at first, and for itself its ``epochs`` int32 [CHANNELS] and ``over`` int32 [1], which
    ends all waiting.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epochs: Tensor
    over: Tensor


def sum_ranks(room: Room, mine: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of all ranks' fp32 ``mine`` [rows, outputs] and of ``bias`` [outputs]: in ``dtype``, a new tensor."""
    rows, outputs = mine.shape
    out = torch.empty_like(mine, dtype=dtype)
    world, size = len(room.buffers), mine.numel()
    twice = world > 2 and size * world >= TWICE_FROM  # with two ranks it would move as much
    block, warps = next((found for found in _SIZES if found[0] * CHANNELS >= size and not twice), _SIZES[-1])
    share = block * world if twice else block
    span = min(triton.cdiv(size, CHANNELS * share) * share, SPAN.value)
    _sum_ranks[(min(triton.cdiv(size, span), CHANNELS),)](
        mine, bias, out, room.buffers, room.flags, room.buffers[room.rank], room.flags[room.rank], room.epochs,
        room.over, room.rank, rows, span // block, outputs, WORLD=world, BLOCK=block, TWICE=twice,
        **options(num_warps=warps, num_stages=1),
    )  # fmt: skip
    return out


class Symmetric(Nccl):
    """As :class:`Nccl`, for GPUs that :func:`reach_each_other`: sums are :func:`sum_ranks`."""

    def __init__(self, device: torch.device, folder: Path, rank: int, world: int, check: Callable[[], None]) -> None:
        super().__init__(device, folder, rank, world, check)
        from torch.distributed import _symmetric_memory as symmetric  # slow, and only needed here

        numbers, flags = CHANNELS * 2 * SPAN.value, CHANNELS * world
        memory = symmetric.empty(numbers + flags, dtype=torch.float32, device=device).zero_()
        torch.cuda.synchronize(device)  # before a peer can write
        self._handle = symmetric.rendezvous(memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self._memory = memory
        self._room = Room(
            rank,
            tuple(self._handle.get_buffer(peer, (numbers,), torch.float32) for peer in range(world)),
            tuple(self._handle.get_buffer(peer, (flags,), torch.int32, numbers) for peer in range(world)),
            torch.zeros(CHANNELS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._true = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._aside = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def sum(self, mine: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return sum_ranks(self._room, mine, bias, dtype)

    def abort(self) -> None:
        with torch.cuda.stream(self._aside):
            self._room.over.copy_(self._true, non_blocking=True)
        super().abort()


def reach_each_other(world: int) -> bool:
    """Whether each of the first ``world`` GPUs can read the memory of all others."""
    pairs = ((one, other) for one in range(world) for other in range(world) if one != other)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
