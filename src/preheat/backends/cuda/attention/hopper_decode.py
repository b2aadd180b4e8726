"""Paged attention of decoding rows on Hopper, with a cache of eight bits.

The contract is the contract of :mod:`preheat.backends.cuda.attention.paged`: same operations, same order, same bits,
only faster.

The portable kernel widens codes in registers, writes the numbers to shared memory and reads them again in the layout of
the matrix unit. Here codes go from shared memory straight into the registers from which the matrix unit multiplies, and
are widened there. ``ldmatrix`` moves 16 bits at once, so it moves two neighboring codes like one number, and gives a
lane four codes: two pairs of numbers.

Values: the four codes belong to two neighboring keys and two neighboring dims. Even dims are one product, odd dims
another one; columns of a product do not meet.

Keys: the four codes are neighboring dims of one key. A step of the matrix unit adds up the products of 16 dims, in no
order: Hopper aligns all of them to the greatest and adds once. So each step has the same 16 dims as elsewhere, in other
places, and the query's dims take the same places.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from preheat.backends.cuda.attention.tile import claim
from preheat.backends.cuda.attention.values import LOG2_E, Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.device.hopper import barriers, descriptor, reads_pages, ring
from preheat.backends.cuda.device.launch import begin, options, processors

ROWS = gl.constexpr(16)
"""Query rows of a program: the heads of a group."""

TILE = gl.constexpr(64)
"""Keys of a tile, as in the contract."""

LOG2E = gl.constexpr(LOG2_E)


@gluon.constexpr_function
def _neighbors(E5, BF16):
    """Return the assembly that makes two pairs of numbers of four codes: the lower two, and the upper two."""
    kind = "e5m2x2" if E5 else "e4m3x2"
    lines = ["{ .reg .b16 l, h, a, b; .reg .b32 x; .reg .f32 p, q; mov.b32 {l, h}, $2;"]
    for at, half in enumerate(("l", "h")):
        if BF16:
            lines.append(f"cvt.rn.f16x2.{kind} x, {half}; mov.b32 {{a, b}}, x;")
            lines.append(f"cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.rn.bf16x2.f32 ${at}, q, p;")
        else:
            lines.append(f"cvt.rn.f16x2.{kind} ${at}, {half};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _halves(E5, BF16):
    """Return the assembly that makes two pairs of numbers of four codes: the even two, and the odd two."""
    text = _neighbors(E5, BF16)
    return text.replace("mov.b32 {l, h}, $2;", "prmt.b32 x, $2, 0, 0x3120; mov.b32 {l, h}, x;")


@gluon.constexpr_function
def _twice(dtype):
    return dtype, dtype


@gluon.jit
def _widen(codes, text: gl.constexpr, dtype: gl.constexpr):
    """Return the numbers of pairs of codes by the assembly ``text``, exactly: two tensors of one number a pair."""
    both: gl.constexpr = _twice(dtype)
    return gl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], dtype=both, is_pure=True, pack=2)


@gluon.jit
def _fill(cache, pages, kind: gl.constexpr, kv_head, key, end, place, full, ring, BLOCK: gl.constexpr):
    """Begin to load the keys (``kind`` 0) or values (1) of the tile from ``key`` on, if it is before ``end``."""
    if key < end:
        block = gl.load(pages + key // BLOCK)
        mbarrier.expect(full.index(place), cache.block_type.nbytes)
        at = [block, kind, kv_head, key % BLOCK, 0]
        tma.async_copy_global_to_shared(cache, at, full.index(place), ring.index(place))


@gluon.jit
def _query(q, token, kv_head, q_stride, head_stride, MMA: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """Return a group's query as the first operand, with its dims in the places of the keys' dims."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    row, dims = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = q + token.to(gl.int64) * q_stride + (kv_head * GROUP + row)[:, None] * head_stride + dims[None, :]
    query = gl.load(at, mask=(row < GROUP)[:, None], other=0.0)
    query = query.reshape([ROWS, DIM // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(query.reshape([ROWS, DIM]), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _forget(v, real):
    """Zero a tile of values behind its first ``real`` keys; memory there may hold anything."""
    HALF: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    v.store(gl.where((row < real)[:, None], v.load(layout), 0))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _absorb(
    top, total, even, odd, query, key, end, position, scale, cache, pages, kv_head, turn, keys, values, k_full, v_full,
    BLOCK: gl.constexpr, WINDOW: gl.constexpr, E5: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the online softmax, and begin to load the tile that takes its place."""
    STAGES: gl.constexpr = keys.shape[0]
    DIM: gl.constexpr = query.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    second: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    BF16: gl.constexpr = query.dtype == gl.bfloat16
    place, phase = ring(turn, STAGES)
    mbarrier.wait(k_full.index(place), phase)
    k = keys.index(place).reshape([TILE, DIM // 2])
    one, two = _widen(k.permute([1, 0]).load(second), _neighbors(E5, BF16), query.dtype)
    both = gl.join(one, two).reshape([DIM // 16, 8, TILE, 2]).permute([0, 3, 1, 2]).reshape([DIM, TILE])
    s = mma_v2(query, gl.convert_layout(both, second), gl.zeros([ROWS, TILE], gl.float32, MMA))
    tl.debug_barrier()  # all warps have read before the tile is overwritten
    _fill(cache, pages, 0, kv_head, key + STAGES * TILE, end, place, k_full, keys, BLOCK)
    mbarrier.wait(v_full.index(place), phase)
    v = values.index(place).reshape([TILE, DIM // 2])
    if (key + TILE > position + 1) | (key < position + 1 - WINDOW if WINDOW > 0 else False):
        at = key + gl.arange(0, TILE, gl.SliceLayout(0, MMA))
        seen = at <= position
        if WINDOW > 0:
            seen = seen & (at > position - WINDOW)
        s = gl.where(seen[None, :], s, -float("inf"))
        if key + TILE > position + 1:
            _forget(v, position + 1 - key)
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    p = gl.exp2(gl.fma(s, scale, -base[:, None])).to(query.dtype)
    fade = gl.exp2(top - base)[:, None]
    p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
    ones = gl.full([TILE, 8 * WARPS], 1.0, gl.float32, second).to(query.dtype)
    total = mma_v2(p, ones, total * fade)
    one, two = _widen(v.load(second), _halves(E5, BF16), query.dtype)
    even = mma_v2(p, one, even * fade)
    odd = mma_v2(p, two, odd * fade)
    tl.debug_barrier()  # as above
    _fill(cache, pages, 1, kv_head, key + STAGES * TILE, end, place, v_full, values, BLOCK)
    return new_top, total, even, odd


@gluon.jit
def _whole(even, odd, layout: gl.constexpr):
    """Return the dims of two halves in order."""
    both = gl.join(even, odd).reshape([even.shape[0], 2 * even.shape[1]])
    return gl.convert_layout(both, layout)


@gluon.jit
def _merge_parts(
    parts, tops, totals, at, count, dims, own, HEADS: gl.constexpr, DIM: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """Return the maximum, sum and output of ``count`` splits; the heads' first ones are at ``at``, int64 [rows]."""
    row: gl.constexpr = gl.SliceLayout(1, FLAT)
    peaks = gl.full([ROWS], -float("inf"), gl.float32, row)
    sums = gl.zeros([ROWS], gl.float32, row)
    acc = gl.zeros([ROWS, DIM], gl.float32, FLAT)
    for _ in range(count):
        top = gl.load(tops + at, mask=own, other=0.0, cache_modifier=".cg")
        total = gl.load(totals + at, mask=own, other=1.0, cache_modifier=".cg")
        one = gl.load(parts + at[:, None] * DIM + dims[None, :], mask=own[:, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(peaks, top)
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
        x, y = gl.exp2(peaks - base), gl.exp2(top - base)
        peaks, sums, acc = new_top, gl.fma(sums, x, total * y), gl.fma(acc, x[:, None], one * y[:, None])
        at += HEADS
    return peaks, sums, acc


@gluon.jit
def _finish(result, peaks, sums, acc, heads, own, sinks, value_scale):
    """Add the sink, divide, and store the rows in ``own``."""
    if sinks is not None:
        lasts = gl.load(sinks + heads, mask=own, other=0.0) * LOG2E
        new_top = gl.maximum(peaks, lasts)
        x, y = gl.exp2(peaks - new_top), gl.exp2(lasts - new_top)
        sums = gl.fma(sums, x, y)
        acc = acc * x[:, None]
    done = acc / sums[:, None]
    if value_scale is not None:
        done = done * value_scale
    gl.store(result, done.to(result.dtype.element_ty), mask=own[:, None])


@gluon.jit(do_not_specialize=["max_blocks"])
def _decode(
    q, cache, table, slots, positions, work, num_work, out, parts, tops, totals, arrived, claims, sinks,
    scale, value_scale, q_stride, head_stride, max_blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, E5: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Attend with one query and one kv head a unit, piece by piece, like the portable kernel."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [WARPS, 1], [1, 0])
    flat_row: gl.constexpr = gl.SliceLayout(1, FLAT)
    keys = gl.allocate_shared_memory(cache.dtype, [STAGES] + cache.block_shape, cache.layout)  # noqa: RUF005
    values = gl.allocate_shared_memory(cache.dtype, [STAGES] + cache.block_shape, cache.layout)  # noqa: RUF005
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    tl.debug_barrier()  # the barriers are made before a warp waits at one
    head = gl.arange(0, ROWS, flat_row)
    dims = gl.arange(0, DIM, gl.SliceLayout(0, FLAT))
    own = head < GROUP
    units, programs = gl.load(num_work) * KV_HEADS, gl.num_programs(0)
    unit = gl.program_id(0)
    turn = 0
    while unit < units:
        piece, kv_head = unit // KV_HEADS, unit % KV_HEADS
        token, split = gl.load(work + piece * 2), gl.load(work + piece * 2 + 1)
        position = gl.load(positions + token)
        pages = table + gl.load(slots + token).to(gl.int64) * max_blocks
        start, first = split * SPLIT, 0
        end = gl.minimum(start + SPLIT, position + 1)
        if WINDOW > 0:
            oldest = gl.maximum(position - (WINDOW - 1), 0)
            first = oldest // SPLIT
            start = gl.maximum(start, oldest // TILE * TILE)
        begin(overlap)  # late, so that the host's copies are read while earlier kernels end
        for ahead in gl.static_range(STAGES):
            place = (turn + ahead) % STAGES
            _fill(cache, pages, 0, kv_head, start + ahead * TILE, end, place, k_full, keys, BLOCK)
            _fill(cache, pages, 1, kv_head, start + ahead * TILE, end, place, v_full, values, BLOCK)
        query = _query(q, token, kv_head, q_stride, head_stride, MMA, GROUP, DIM, WARPS)
        top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, MMA))
        total = gl.zeros([ROWS, 8 * WARPS], gl.float32, MMA)
        even = gl.zeros([ROWS, DIM // 2], gl.float32, MMA)
        odd = gl.zeros([ROWS, DIM // 2], gl.float32, MMA)
        for key in range(start, end, TILE):
            top, total, even, odd = _absorb(
                top, total, even, odd, query, key, end, position, scale, cache, pages, kv_head, turn, keys, values,
                k_full, v_full, BLOCK, WINDOW, E5, MMA,
            )  # fmt: skip
            turn += 1
        count = position // SPLIT - first + 1
        acc = _whole(even, odd, FLAT)
        sums = gl.convert_layout(gl.max(total, 1), flat_row)
        peaks = gl.convert_layout(top, flat_row)
        heads = kv_head * GROUP + head
        result = out + ((token.to(gl.int64) * HEADS + heads) * DIM)[:, None] + dims[None, :]
        last = count == 1
        if not last:
            kept = piece.to(gl.int64) * HEADS + heads
            gl.store(parts + kept[:, None] * DIM + dims[None, :], acc, mask=own[:, None])
            gl.store(tops + kept, peaks, mask=own)
            gl.store(totals + kept, sums, mask=own)
            tl.debug_barrier()  # all warps have written before one of them counts the piece
            counter = arrived + token * KV_HEADS + kv_head
            last = gl.atomic_add(counter, 1, sem="acq_rel") == count - 1
            if last:
                tl.debug_barrier()
                gl.store(counter, 0)
                at = kept - (split - first).to(gl.int64) * HEADS
                peaks, sums, acc = _merge_parts(parts, tops, totals, at, count, dims, own, HEADS, DIM, FLAT)
        if last:
            _finish(result, peaks, sums, acc, heads, own, sinks, value_scale)
        unit = claim(claims, units, programs)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


WARPS, STAGES, PROGRAMS = 2, 2, 4
"""Warps of a program, tiles of keys loaded ahead, and programs of a multiprocessor; none of them changes a bit.

Measured on an H200, 32 heads that share 8 of 128 numbers: 256 rows of 1,000 tokens take 166 us where the portable
kernel takes 245, 64 such rows 47 (78), and 8 rows of 4,000 tokens 25 (38).
"""


def fits(q: Tensor, cache: Tensor, rows: Rows, scores: Scores) -> bool:
    """Return whether this kernel supports these arguments of :func:`decode_attention`."""
    return (
        reads_pages(q, cache, TILE.value)
        and cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        and rows.width == 1
        and scores.alibi is None
        and q.shape[1] // cache.shape[2] <= ROWS.value
    )


def decode_attention(
    q: Tensor, cache: Tensor, out: Tensor, places: Places, pieces: Pieces, workspace: Workspace, scores: Scores
) -> None:
    """Attention of decoding rows of one token, where :func:`fits`.

    The arguments are the arguments of :func:`preheat.backends.cuda.attention.paged.decode_attention`.
    """
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    programs = min(len(pieces.work) * kv_heads, PROGRAMS * processors(q.device))
    _decode[(programs,)](
        q, descriptor(cache.view(torch.int16), 1, 1, 1, TILE.value, dim // 2),
        places.table, places.slots, places.positions, pieces.work, pieces.used, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived, workspace.claims, scores.sinks,
        scores.scale * LOG2_E, scores.value_scale, *q.stride()[:2], places.table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=block, SPLIT=scores.split, WINDOW=scores.window or 0,
        STAGES=STAGES, E5=cache.dtype == torch.float8_e5m2,
        enable_fp_fusion=False, **options(num_warps=WARPS, num_stages=1),
    )  # fmt: skip
