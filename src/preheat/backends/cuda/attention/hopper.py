"""Paged causal attention of runs of tokens on Hopper.

The contract is the contract of :mod:`preheat.backends.cuda.attention.paged`: same operations, same order, same bits,
only faster.

A persistent program has three parts that run at once. One warp loads queries, keys and values into rings in shared
memory (TMA). Two groups of four warps attend, each with half of the rows of a tile. While the matrix unit multiplies
the values of one tile of keys, a group computes the exponentials of the next tile. Each group uses the hardware units
left idle by the other group.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from preheat.backends.cuda.attention.values import LOG2_E, Pieces, Places, Scores
from preheat.backends.cuda.device.hopper import barriers, descriptor, reads_pages, ring
from preheat.backends.cuda.device.launch import begin, options, processors
from preheat.backends.cuda.device.sizes import next_power_of_2

ROWS = gl.constexpr(64)
"""Query rows of one of the two groups of warps."""

TILE = gl.constexpr(64)
"""Keys of a tile, as in the contract."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
LOG2E = gl.constexpr(LOG2_E)
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
"""Layout of the rows of a tile, the same for scores, sums and outputs."""


@gluon.jit
def _place(turn):
    """Return this program's place in a turn.

    Units are sorted by duration, so the order of programs alternates between turns.
    """
    there, programs = gl.program_id(0), gl.num_programs(0)
    return gl.where(turn % 2 == 0, there, programs - 1 - there)


@gluon.jit
def _turns(num_tiles, KV_HEADS: gl.constexpr):
    """Return the number of this program's units; each turn has one."""
    units = gl.load(num_tiles) * KV_HEADS
    whole = units // gl.num_programs(0)
    return whole + (_place(whole) < units % gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _unit(turn, turns, tiles, KV_HEADS: gl.constexpr):
    """Return a unit's first token, number of tokens and kv head; meaningless from ``turns`` on."""
    unit = turn * gl.num_programs(0) + _place(turn)
    tile = tiles + unit // KV_HEADS * 2
    real = turn < turns
    return gl.load(tile, mask=real, other=0), gl.load(tile + 1, mask=real, other=0), unit % KV_HEADS


@gluon.jit
def _start(position, WINDOW: gl.constexpr):
    """Return the start of the first tile of keys seen by a token at ``position``."""
    return gl.maximum(position + 1 - WINDOW, 0) // TILE * TILE if WINDOW > 0 else 0


@gluon.jit
def _load(
    q, cache, table, slots, positions, tiles, num_tiles, max_blocks, queries, keys, values, full, empty,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Keep the rings full."""
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    TOKENS: gl.constexpr = q.block_shape[0]
    at = 0
    turns = _turns(num_tiles, KV_HEADS)
    for turn in range(turns):
        token, count, kv_head = _unit(turn, turns, tiles, KV_HEADS)
        position = gl.load(positions + token)
        start = _start(position, WINDOW)
        pages = table + gl.load(slots + token).to(gl.int64) * max_blocks
        block = gl.load(pages + start // BLOCK)
        place, phase = ring(turn, 2)
        mbarrier.wait(q_empty.index(place), phase ^ 1)
        mbarrier.expect(q_full.index(place), 2 * q.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q, [token + half * TOKENS, kv_head * GROUP, 0], q_full.index(place), queries.index(place * 2 + half)
            )
        end = position + count
        for key in range(start, end, TILE):
            place, phase = ring(at, keys.shape[0])
            mbarrier.wait(k_empty.index(place), phase ^ 1)
            mbarrier.expect(k_full.index(place), cache.block_type.nbytes)
            inside = key % BLOCK
            tma.async_copy_global_to_shared(
                cache, [block, 0, kv_head, inside, 0], k_full.index(place), keys.index(place)
            )
            mbarrier.wait(v_empty.index(place), phase ^ 1)
            mbarrier.expect(v_full.index(place), cache.block_type.nbytes)
            tma.async_copy_global_to_shared(
                cache, [block, 1, kv_head, inside, 0], v_full.index(place), values.index(place)
            )
            block = gl.load(pages + (key + TILE) // BLOCK, mask=key + TILE < end, other=0)
            at += 1


@gluon.jit
def _widen(
    positions, tiles, num_tiles, held, full, empty, wide, wide_full, wide_empty,
    KV_HEADS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Widen keys and values of eight bits to the queries' dtype, exactly.

    They are read from the rings filled by TMA and written to the rings read by the matrix unit.
    """
    at = 0
    turns = _turns(num_tiles, KV_HEADS)
    for turn in range(turns):
        token, count, _head = _unit(turn, turns, tiles, KV_HEADS)
        position = gl.load(positions + token)
        for _key in range(_start(position, WINDOW), position + count, TILE):
            for each in gl.static_range(2):  # keys, values
                _widen_tile(at, held[each], full[each], empty[each], wide[each], wide_full[each], wide_empty[each])
            at += 1


@gluon.jit
def _widen_tile(at, raw, full, empty, wide, wide_full, wide_empty):
    DIM: gl.constexpr = raw.shape[5]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // DIM, DIM // 16], [4, 1], [1, 0])
    place, phase = ring(at, raw.shape[0])
    mbarrier.wait(full.index(place), phase)
    numbers = raw.index(place).reshape([TILE, DIM]).load(layout).to(gl.float32).to(wide.dtype)  # as `launch.widened`
    to, phase = ring(at, wide.shape[0])
    mbarrier.wait(wide_empty.index(to), phase ^ 1)
    wide.index(to).reshape([TILE, DIM]).store(numbers)
    fence_async_shared()
    tl.debug_barrier()  # all warps have read and written before one of them signals the barriers
    mbarrier.arrive(empty.index(place))
    mbarrier.arrive(wide_full.index(to))


@gluon.jit
def _softmax(s, top, key, seen_to, masked, scale, dtype: gl.constexpr, WINDOW: gl.constexpr):
    """Return the greatest score so far, the weights of a tile, and the fade of earlier tiles."""
    if masked:
        keys = (key + gl.arange(0, TILE, gl.SliceLayout(0, SCORES)))[None, :]
        seen = keys < seen_to[:, None]
        if WINDOW > 0:
            seen = seen & (keys >= seen_to[:, None] - WINDOW)
        s = gl.where(seen, s, -float("inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    p = gl.exp2(gl.fma(s, scale, -base[:, None])).to(dtype)
    return new_top, p, gl.exp2(top - base)


@gluon.jit
def _add(total, p, fade):
    """Return ``total`` times ``fade`` plus the sum of each row of ``p``, equal in all columns."""
    faded = total * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    ones = gl.full([TILE, 8], 1.0, gl.float32, gl.DotOperandLayout(1, SUMS, 2)).to(p.dtype)
    return mma_v2(gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2)), ones, faded)


@gluon.jit
def _merge(tops, totals, accs, top, total, acc):
    """Merge the next split into the splits so far."""
    sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    outs: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    new_top = gl.maximum(tops, top)
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    x, y = gl.exp2(tops - base), gl.exp2(top - base)
    totals = gl.fma(totals, gl.convert_layout(x, sums)[:, None], total * gl.convert_layout(y, sums)[:, None])
    accs = gl.fma(accs, gl.convert_layout(x, outs)[:, None], acc * gl.convert_layout(y, outs)[:, None])
    return new_top, totals, accs


@gluon.jit
def _add_sinks(tops, totals, accs, sinks, kv_head, MEMBERS: gl.constexpr, GROUP: gl.constexpr):
    """Return sums and outputs with the ``sinks`` of the heads behind the last split."""
    sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    outs: gl.constexpr = gl.SliceLayout(1, accs.type.layout)
    of_group = gl.arange(0, ROWS, ROW) % MEMBERS
    lasts = gl.load(sinks + kv_head * GROUP + of_group, mask=of_group < GROUP, other=0.0) * LOG2E
    new_top = gl.maximum(tops, lasts)
    x, y = gl.exp2(tops - new_top), gl.exp2(lasts - new_top)
    more = totals * 0.0 + gl.convert_layout(y, sums)[:, None]
    totals = gl.fma(totals, gl.convert_layout(x, sums)[:, None], more)
    return totals, accs * gl.convert_layout(x, outs)[:, None]


@gluon.jit
def _forget(values, real):
    """Zero a tile of values behind its first ``real`` keys; memory there may hold anything."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    v = values.load(layout)
    values.store(gl.where(row[:, None] < real, v, 0.0))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _store(out, result, query, token, count, kv_head, half: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Write a unit's real rows to ``out``.

    The rows pass through the query's shared memory, so that each store writes a whole row.
    """
    TOKENS: gl.constexpr = query.shape[0]
    MEMBERS: gl.constexpr = query.shape[1]
    DIM: gl.constexpr = query.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    memory = query.reshape([ROWS, DIM])
    tl.debug_barrier()
    memory.store(result)
    tl.debug_barrier()
    result = memory.load(layout)
    fence_async_shared()  # before the next query is loaded into this memory
    row, dims = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, DIM, gl.SliceLayout(0, layout))
    nth, of_group = half * TOKENS + row // MEMBERS, row % MEMBERS
    to = ((token.to(gl.int64) + nth) * HEADS + kv_head * GROUP + of_group) * DIM
    real = (nth < count) & (of_group < GROUP)
    gl.store(out + to[:, None] + dims[None, :], result, mask=real[:, None])


@gluon.jit
def _score(query, keys, full, at):
    """Begin to multiply the query with the ``at``-th tile of keys, after the tile has arrived."""
    place, phase = ring(at, keys.shape[0])
    mbarrier.wait(full.index(place), phase)
    k = keys.index(place).reshape([TILE, query.shape[1]]).permute([1, 0])
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    return warpgroup_mma(query, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _attend_unit(
    query, start, end, first, at, scale, keys, values, full, empty, sinks, kv_head, SPLIT: gl.constexpr,
    WINDOW: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Return the attention of half a query tile, not yet rounded, and the next tile's number.

    ``first`` is the position of the first row. The keys go from ``start`` to ``end``, and start at the ``at``-th tile
    of the rings.
    """
    _, k_full, v_full = full
    _, k_empty, v_empty = empty
    STAGES: gl.constexpr = keys.shape[0]
    TOKENS: gl.constexpr = query.shape[0]
    DIM: gl.constexpr = query.shape[2]
    MEMBERS: gl.constexpr = query.shape[1]
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    columns: gl.constexpr = gl.SliceLayout(1, OUT)
    seen_to = first + gl.arange(0, ROWS, ROW) // query.shape[1] + 1
    full_from = gl.maximum(first + TOKENS - WINDOW, 0) if WINDOW > 0 else 0
    query = query.reshape([ROWS, DIM])
    tops = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    totals = gl.zeros([ROWS, 8], gl.float32, SUMS)
    accs = gl.zeros([ROWS, DIM], gl.float32, OUT)
    acc = gl.zeros([ROWS, DIM], gl.float32, OUT)

    s = warpgroup_mma_wait(0, [_score(query, keys, k_full, at)])
    place, phase = ring(at, STAGES)
    mbarrier.arrive(k_empty.index(place))
    top, p, fade = _softmax(s, tops, start, seen_to, True, scale, values.dtype, WINDOW)
    p = gl.convert_layout(p, weights)
    total = _add(totals, p, fade)
    mbarrier.wait(v_full.index(place), phase)
    for key in range(start + TILE, end, TILE):
        before = place
        at += 1
        place, phase = ring(at, STAGES)
        s = _score(query, keys, k_full, at)
        acc = warpgroup_mma(p, values.index(before).reshape([TILE, DIM]), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k_empty.index(place))
        masked = (key + TILE > first + 1) | (key < full_from)
        fresh = key % SPLIT == 0
        old_top, old_total = top, total
        top = gl.where(fresh, -float("inf"), top)
        top, new_p, fade = _softmax(s, top, key, seen_to, masked, scale, values.dtype, WINDOW)
        new_p = gl.convert_layout(new_p, weights)
        total = _add(total, new_p, fade)
        mbarrier.wait(v_full.index(place), phase)  # here, because the compiler moves no earlier work behind this wait
        acc, p = warpgroup_mma_wait(0, [acc, p])
        mbarrier.arrive(v_empty.index(before))
        if fresh:
            tops, totals, accs = _merge(tops, totals, accs, old_top, old_total, acc)
            acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
        acc = acc * gl.convert_layout(fade, columns)[:, None]
        p = new_p
    v = values.index(place).reshape([TILE, DIM])
    if end % TILE != 0:
        _forget(v, end % TILE)
    acc = warpgroup_mma(p, v, acc)
    mbarrier.arrive(v_empty.index(place))
    tops, totals, accs = _merge(tops, totals, accs, top, total, acc)
    if sinks is not None:
        totals, accs = _add_sinks(tops, totals, accs, sinks, kv_head, MEMBERS, GROUP)
    return accs / gl.convert_layout(gl.max(totals, 1), columns)[:, None], at + 1


@gluon.jit
def _attend(
    half: gl.constexpr, out, positions, tiles, num_tiles, scale, value_scale, sinks, queries, keys, values, full, empty,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, SPLIT: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Attend with one half of the rows of each unit."""
    at = 0
    turns = _turns(num_tiles, KV_HEADS)
    token, count, kv_head = _unit(0, turns, tiles, KV_HEADS)
    position = gl.load(positions + token)
    for turn in range(turns):
        next_token, next_count, next_head = _unit(turn + 1, turns, tiles, KV_HEADS)  # read long before its use
        place, phase = ring(turn, 2)
        query = queries.index(place * 2 + half)
        mbarrier.wait(full[0].index(place), phase)
        result, at = _attend_unit(
            query, _start(position, WINDOW), position + count, position + half * query.shape[0], at, scale,
            keys, values, full, empty, sinks, kv_head, SPLIT, WINDOW, HEADS // KV_HEADS,
        )  # fmt: skip
        if value_scale is not None:
            result *= value_scale
        position = gl.load(positions + next_token)
        _store(out, result.to(query.dtype), query, token, count, kv_head, half, HEADS, HEADS // KV_HEADS)
        mbarrier.arrive(empty[0].index(place))
        token, count, kv_head = next_token, next_count, next_head


@gluon.jit
def _buffers(PLACES: gl.constexpr, source):
    shape: gl.constexpr = [PLACES] + source.block_shape  # noqa: RUF005  # all that the language can do
    return gl.allocate_shared_memory(source.dtype, shape, source.layout)


@gluon.jit(do_not_specialize=["max_blocks"])
def _prefill(
    q, cache, table, slots, positions, tiles, num_tiles, out, scale, value_scale, sinks, max_blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    queries = _buffers(4, q)
    keys = _buffers(STAGES, cache)
    values = _buffers(STAGES, cache)
    full = (barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    empty = (barriers(2, 2), barriers(STAGES, 2), barriers(STAGES, 2))
    begin(overlap)
    gl.warp_specialize(
        [
            (_attend, (0, out, positions, tiles, num_tiles, scale, value_scale, sinks, queries, keys, values, full,
                       empty, HEADS, KV_HEADS, SPLIT, WINDOW)),
            (_attend, (1, out, positions, tiles, num_tiles, scale, value_scale, sinks, queries, keys, values, full,
                       empty, HEADS, KV_HEADS, SPLIT, WINDOW)),
            (_load, (q, cache, table, slots, positions, tiles, num_tiles, max_blocks, queries, keys, values,
                     full, empty, KV_HEADS, HEADS // KV_HEADS, BLOCK, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["max_blocks"])
def _prefill_narrow(
    q, cache, table, slots, positions, tiles, num_tiles, out, scale, value_scale, sinks, max_blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Attend to a cache of eight bits, like :func:`_prefill`; a fourth part widens the loaded tiles."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    queries = _buffers(4, q)
    held = (_buffers(STAGES, cache), _buffers(STAGES, cache))
    keys = gl.allocate_shared_memory(q.dtype, [2] + cache.block_shape, WIDE)  # noqa: RUF005
    values = gl.allocate_shared_memory(q.dtype, [2] + cache.block_shape, WIDE)  # noqa: RUF005
    q_full, q_empty = barriers(2, 1), barriers(2, 2)
    raw_full = (q_full, barriers(STAGES, 1), barriers(STAGES, 1))
    raw_empty = (q_empty, barriers(STAGES, 1), barriers(STAGES, 1))
    full = (q_full, barriers(2, 1), barriers(2, 1))
    empty = (q_empty, barriers(2, 2), barriers(2, 2))
    begin(overlap)
    gl.warp_specialize(
        [
            (_attend, (0, out, positions, tiles, num_tiles, scale, value_scale, sinks, queries, keys, values, full,
                       empty, HEADS, KV_HEADS, SPLIT, WINDOW)),
            (_attend, (1, out, positions, tiles, num_tiles, scale, value_scale, sinks, queries, keys, values, full,
                       empty, HEADS, KV_HEADS, SPLIT, WINDOW)),
            (_widen, (positions, tiles, num_tiles, held, (raw_full[1], raw_full[2]), (raw_empty[1], raw_empty[2]),
                      (keys, values), (full[1], full[2]), (empty[1], empty[2]), KV_HEADS, WINDOW)),
            (_load, (q, cache, table, slots, positions, tiles, num_tiles, max_blocks, queries, held[0], held[1],
                     raw_full, raw_empty, KV_HEADS, HEADS // KV_HEADS, BLOCK, WINDOW)),
        ],
        [4, 4, 1],
        [208, 64, 24],
    )  # fmt: skip


STAGES = 4
"""Tiles of keys, and of values, loaded ahead: as many as fit beside two tiles of queries."""


def fits(q: Tensor, cache: Tensor) -> bool:
    """Whether this kernel supports these arguments of :func:`prefill_attention`."""
    heads, kv_heads = q.shape[1], cache.shape[2]
    return (
        reads_pages(q, cache, TILE.value)
        and (cache.dtype == q.dtype or cache.element_size() == 1)
        and next_power_of_2(heads // kv_heads) <= min(ROWS.value, heads)  # a token's rows fit one tile
        and all(stride * q.element_size() % 16 == 0 for stride in q.stride()[:2])  # the copy engine reads queries, too
    )


def prefill_attention(q: Tensor, cache: Tensor, out: Tensor, places: Places, pieces: Pieces, scores: Scores) -> None:
    """Attention of runs of tokens, where :func:`fits`.

    The arguments are the arguments of :func:`preheat.backends.cuda.attention.paged.prefill_attention`. Tiles have 128
    rows. The grid has at most one program for each multiprocessor.
    """
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    members = next_power_of_2(heads // kv_heads)
    narrow = cache.element_size() == 1
    kernel = _prefill_narrow if narrow else _prefill
    kernel[(min(len(pieces.work) * kv_heads, processors(q.device)),)](
        descriptor(q, ROWS.value // members, members, dim), descriptor(cache, 1, 1, 1, TILE.value, dim),
        places.table, places.slots, places.positions, pieces.work, pieces.used, out,
        scores.scale * LOG2_E, scores.value_scale, scores.sinks, places.table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, BLOCK=block, SPLIT=scores.split, WINDOW=scores.window or 0, STAGES=STAGES,
        enable_fp_fusion=False, **options(num_warps=4, num_stages=1, maxnreg=128 if narrow else 168),
    )  # fmt: skip
