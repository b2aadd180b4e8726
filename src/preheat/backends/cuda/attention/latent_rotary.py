"""Rotary embedding of latent queries and entries, and writes of entries to the cache, in one CUDA kernel.

Contract. The turned numbers of each query and of the entry, behind its latent vector: product, product, sum, each
rounded to the dtype (:mod:`preheat.ops.rotary`). The entry goes into the cache. A number of a latent vector that is not
finite is stored as zero, and the turned numbers of its entry become NaN: a query that sees the entry gets NaN, and no
other query does. Nothing is stored in the pad block. A token's bits depend on its own numbers and position alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.attention.rotary import HEADS_PER_PROGRAM, _odd, _plus, _times
from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["max_blocks"])
def _turn_and_write(
    made, rope, slots, positions, table, cache, block_stride, max_blocks,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, PER_PROGRAM: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Process ``PER_PROGRAM`` heads of one token; the entry is the last one."""
    MIDDLE: tl.constexpr = ROPE // 2
    token = tl.program_id(0)
    head = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    dims, numbers = tl.arange(0, HALF), tl.arange(0, WIDTH)
    inside = dims < MIDDLE
    position = tl.load(positions + token)  # no kernel writes positions, slots or angles
    slot = tl.load(slots + token).to(tl.int64)
    block = tl.load(table + slot * max_blocks + position // BLOCK).to(tl.int64)
    angles = rope + position.to(tl.int64) * (2 * ROPE) + dims
    cos_left, cos_right = tl.load(angles, mask=inside, other=0.0), tl.load(angles + MIDDLE, mask=inside, other=0.0)
    sin_left = tl.load(angles + ROPE, mask=inside, other=0.0)
    sin_right = tl.load(angles + ROPE + MIDDLE, mask=inside, other=0.0)
    begin(overlap)

    mine = made + token.to(tl.int64) * ((HEADS + 1) * (RANK + ROPE))
    at = mine + (head * (RANK + ROPE))[:, None] + RANK + dims[None, :]
    real = (head <= HEADS)[:, None] & inside[None, :]
    left, right = tl.load(at, mask=real, other=0.0), tl.load(at + MIDDLE, mask=real, other=0.0)
    new_left = _plus(_times(left, cos_left[None, :]), _times(right, sin_left[None, :]))
    new_right = _plus(_times(right, cos_right[None, :]), _times(left, sin_right[None, :]))
    query = (head < HEADS)[:, None] & inside[None, :]
    tl.store(at, new_left, mask=query)
    tl.store(at + MIDDLE, new_right, mask=query)

    stored = ((tl.program_id(1) + 1) * PER_PROGRAM > HEADS) & (block != 0)
    own = (numbers < RANK) & stored
    latent = tl.load(mine + HEADS * (RANK + ROPE) + numbers, mask=own, other=0.0)
    odd = _odd(latent, False)
    told = tl.max(odd.to(tl.int32), 0) != 0
    lies = cache + block * block_stride + position % BLOCK * (RANK + ROPE)
    tl.store(lies + numbers, tl.where(odd, 0.0, latent.to(tl.float32)).to(latent.dtype), mask=own)
    nan = tl.full([1, 1], float("nan"), tl.float32).to(latent.dtype)
    entry = ((head == HEADS)[:, None] & inside[None, :]) & stored
    rest = lies + RANK + dims[None, :] + tl.zeros([PER_PROGRAM, 1], tl.int32)
    tl.store(rest, tl.where(told, nan, new_left), mask=entry)
    tl.store(rest + MIDDLE, tl.where(told, nan, new_right), mask=entry)


def turn_and_write(
    made: Tensor, rope: Tensor, slots: Tensor, positions: Tensor, table: Tensor, cache: Tensor, rank: int
) -> None:
    """Turn queries in place in ``made`` [tokens, heads + 1, entry], contiguous; write entries to ``cache``.

    The last head is the entry; in ``made`` it stays as it is. An entry is ``rank`` numbers and then the turned ones, at
    most 2**31 numbers for a token. ``rope`` [positions, 2, 1, turned numbers], ``slots`` and ``positions`` int32
    [tokens], ``table`` int32 [slots, max blocks], ``cache`` [blocks, 1, 1, block size, entry]. The host copies
    ``slots``, ``positions`` and ``table`` for each step, so no kernel may write them.
    """
    heads, entry = made.shape[1] - 1, made.shape[2]
    _turn_and_write[(len(made), cdiv(heads + 1, HEADS_PER_PROGRAM))](
        made, rope, slots, positions, table, cache, cache.stride(0), table.stride(0),
        HEADS=heads, RANK=rank, ROPE=entry - rank, WIDTH=next_power_of_2(rank),
        HALF=next_power_of_2((entry - rank) // 2), BLOCK=cache.shape[3], PER_PROGRAM=HEADS_PER_PROGRAM,
        enable_fp_fusion=False, **options(num_warps=2, num_stages=1),
    )  # fmt: skip
