"""Norm and rotary embedding of queries and keys, and writes to the KV cache, in one CUDA kernel.

Contract. Queries and keys: if there are weights, each head's RMS norm as in
:mod:`preheat.backends.cuda.pointwise.norm`. Then, if there are angles, rotary embedding as in
:mod:`preheat.ops.rotary`: product, product, sum, each rounded to the dtype. A rotated query may be multiplied by a
factor of its position; the product is rounded. Rotated keys, and values as they are, go into the cache. A cache of
eight bits stores a key or value divided by a scale; the quotient is rounded correctly, then to the cache's dtype
(:mod:`preheat.ops.float8`). Only finite values are stored, as :mod:`preheat.ops.finite` says. A head's bits depend on
its own numbers and position alone, a key's also on whether its value is finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base.layers import Norm
from preheat.backends.cuda.attention.values import Places
from preheat.backends.cuda.device.launch import COMPILED, begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.pointwise.norm import inverse_rms
from preheat.backends.cuda.pointwise.quantize import divided

HEADS_PER_PROGRAM = 8


def heads_of_program(dim: int) -> int:
    """Return the heads of a program: two warps hold so many halves of wide heads at once. Changes no bits."""
    half = next_power_of_2(dim // 2)
    return max(1, min(HEADS_PER_PROGRAM, 512 // half))


@triton.jit
def _times(a, b):
    """Return the product, rounded to the dtype."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _plus(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def _stored(x, scale, MOST: tl.constexpr, dtype: tl.constexpr):
    """Return ``x`` as stored in a cache of eight bits; NaN stays NaN."""
    wide = x.to(tl.float32)
    if COMPILED:
        most = scale * (2 * MOST)  # beyond this everything is bounded, infinity too
        wide = tl.minimum(tl.maximum(wide, -most, tl.PropagateNan.ALL), most, tl.PropagateNan.ALL)
        quotient = divided(wide, scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    else:
        quotient = tl.div_rn(wide, scale)
    bounded = tl.minimum(tl.maximum(quotient, -MOST, tl.PropagateNan.ALL), MOST, tl.PropagateNan.ALL)
    return bounded.to(dtype)


@triton.jit
def _odd(x, BOUNDED: tl.constexpr):
    """Return where numbers are not finite or, if ``BOUNDED``, where they are NaN."""
    wide = x.to(tl.float32)
    return ~(wide == wide if BOUNDED else tl.abs(wide) < float("inf"))


@triton.jit(do_not_specialize=["max_blocks"])
def _rope_and_write(
    qkv, rope, growth, slots, positions, table, cache, weight, eps, key_scale, value_scale,
    block_stride, value_stride, kv_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PER_PROGRAM: tl.constexpr, KIND: tl.constexpr, MOST: tl.constexpr, BY_TOKEN: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Process ``PER_PROGRAM`` heads of one token.

    A head is two halves of ``HALF`` numbers, the least power of two that holds a half.
    """
    MIDDLE: tl.constexpr = DIM // 2
    token = tl.program_id(0)
    head = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    dims = tl.arange(0, HALF)
    inside = dims < MIDDLE
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    turned = (head < HEADS + KV_HEADS)[:, None] & inside[None, :]
    position = tl.load(positions + token)  # no kernel writes positions, slots, weights or angles
    slot = tl.load(slots + token).to(tl.int64)
    block = tl.load(table + slot * max_blocks + position // BLOCK).to(tl.int64)
    if rope is not None:
        row = token if BY_TOKEN else position
        angles = rope + row.to(tl.int64) * (2 * DIM) + dims
        cos_left, cos_right = tl.load(angles, mask=inside, other=0.0), tl.load(angles + MIDDLE, mask=inside, other=0.0)
        sin_left, sin_right = (
            tl.load(angles + DIM, mask=inside, other=0.0),
            tl.load(angles + DIM + MIDDLE, mask=inside, other=0.0),
        )
    begin(overlap)

    heads_at = qkv + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + dims[None, :]
    left = tl.load(heads_at, mask=real, other=0.0)
    right = tl.load(heads_at + MIDDLE, mask=real, other=0.0)
    if weight is not None:
        scales_at = weight + head[:, None] * DIM + dims[None, :]
        wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
        total = tl.sum(wide_left * wide_left + wide_right * wide_right, 1)
        inverse = inverse_rms(total, 1.0 / DIM, eps)[:, None]
        if KIND == "rms_plus_one" or KIND == "rms_once":
            scales_left = tl.load(scales_at, mask=turned, other=0.0).to(tl.float32)
            scales_right = tl.load(scales_at + MIDDLE, mask=turned, other=0.0).to(tl.float32)
            if KIND == "rms_plus_one":
                scales_left, scales_right = 1.0 + scales_left, 1.0 + scales_right
            normed_left = (wide_left * inverse * scales_left).to(left.dtype)
            normed_right = (wide_right * inverse * scales_right).to(left.dtype)
        else:
            normed_left = _times((wide_left * inverse).to(left.dtype), tl.load(scales_at, mask=turned, other=0.0))
            normed_right = _times(
                (wide_right * inverse).to(left.dtype), tl.load(scales_at + MIDDLE, mask=turned, other=0.0)
            )
    else:
        normed_left, normed_right = left, right
    if rope is not None:
        new_left = _plus(_times(normed_left, cos_left[None, :]), _times(normed_right, sin_left[None, :]))
        new_right = _plus(_times(normed_right, cos_right[None, :]), _times(normed_left, sin_right[None, :]))
    else:
        new_left, new_right = normed_left, normed_right

    query = (head < HEADS)[:, None] & inside[None, :]
    if growth is not None:
        factor = tl.load(growth + position)
        tl.store(heads_at, _times(new_left, factor), mask=query)
        tl.store(heads_at + MIDDLE, _times(new_right, factor), mask=query)
    else:
        tl.store(heads_at, new_left, mask=query)
        tl.store(heads_at + MIDDLE, new_right, mask=query)
    is_value = head >= HEADS + KV_HEADS
    kv_head = head - tl.where(is_value, HEADS + KV_HEADS, HEADS)
    lies = block * block_stride + tl.where(is_value, value_stride, 0) + kv_head * kv_stride + position % BLOCK * DIM
    cached = real & (head >= HEADS)[:, None]
    cache_at = cache + lies[:, None] + dims[None, :]
    BOUNDED: tl.constexpr = key_scale is not None
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & inside[None, :]
    beside = heads_at + KV_HEADS * DIM  # the value beside each key
    odd_left = _odd(tl.load(beside, mask=is_key, other=0.0), BOUNDED)
    odd_right = _odd(tl.load(beside + MIDDLE, mask=is_key, other=0.0), BOUNDED)
    told = (tl.max((odd_left | odd_right).to(tl.int32), 1) != 0)[:, None]
    zero, nan = tl.zeros([1, 1], tl.float32).to(left.dtype), tl.full([1, 1], float("nan"), tl.float32).to(left.dtype)
    stored_left = tl.where(is_value[:, None], tl.where(_odd(left, BOUNDED), zero, left), new_left)
    stored_right = tl.where(is_value[:, None], tl.where(_odd(right, BOUNDED), zero, right), new_right)
    stored_left, stored_right = tl.where(told, nan, stored_left), tl.where(told, nan, stored_right)
    if key_scale is not None:
        scale = tl.where(is_value, value_scale, key_scale)[:, None].to(tl.float32)
        stored_left = _stored(stored_left, scale, MOST, cache.dtype.element_ty)
        stored_right = _stored(stored_right, scale, MOST, cache.dtype.element_ty)
    tl.store(cache_at, stored_left, mask=cached)
    tl.store(cache_at + MIDDLE, stored_right, mask=cached)


def rope_and_write(
    qkv: Tensor,
    cache: Tensor,
    places: Places,
    rope: Tensor | None = None,
    norm: Norm | None = None,
    *,
    scales: tuple[float, float] | None = None,
    growth: Tensor | None = None,
    by_token: bool = False,
    own: bool = True,
) -> None:
    """Apply the norm, if any, and rotary embedding to queries and keys; write keys and values to ``cache``.

    Queries change in place in ``qkv`` [tokens, heads + 2 * kv heads, dim], contiguous: queries, keys, values. The keys
    in ``qkv`` stay as they are. ``rope`` [positions, 2, dim], or with a 1 before dim, comes from
    :func:`preheat.model.rope.rope_table`. A token's place in ``cache`` [blocks, 2, kv heads, block size, dim] (any
    strides but the last two) is block ``table[slot, position // block size]`` of ``places``. ``norm`` is a
    root-mean-square norm with weights [heads + kv heads, dim]. ``growth`` [positions] are factors of rotated queries.
    ``scales`` of keys and of values are for a ``cache`` of eight bits. ``by_token``: ``rope`` is [tokens, 2, dim], a
    row for each token. An earlier kernel of the step writes it, and a kernel that waits for its end lies between them.
    Without ``own`` keys, ``qkv`` has queries alone, and nothing is written to the cache.
    """
    weight, eps, kind = (None, 0.0, "rms") if norm is None else (norm.weight, norm.eps, norm.kind)
    assert kind != "layer", "heads have root-mean-square norms"
    key_scale, value_scale = (None, None) if scales is None else scales
    block, dim = cache.shape[3:]
    kv_heads = cache.shape[2] if own else 0
    heads = qkv.shape[1] - 2 * kv_heads
    each = heads_of_program(dim)
    programs = (len(qkv), cdiv(heads + 2 * kv_heads, each))
    _rope_and_write[programs](
        qkv, rope, growth, places.slots, places.positions, places.table, cache, weight, eps, key_scale, value_scale,
        *cache.stride()[:3], places.table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=next_power_of_2(dim // 2), BLOCK=block,
        PER_PROGRAM=each, KIND=kind,
        MOST=torch.finfo(cache.dtype).max if scales else 0.0, BY_TOKEN=by_token,
        enable_fp_fusion=False, **options(num_warps=2, num_stages=1),
    )  # fmt: skip
