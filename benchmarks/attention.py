"""Paged attention on a GPU, decoding and reading prompts.

    python -m benchmarks attention [--heads 32] [--kv-heads 8] [--dim 128] [--block-size 64] [--kv-cache-dtype auto]

Decoding is measured beside the bytes of its keys and values, reading prompts beside its operations. Figures are median
microseconds of one layer, from a CUDA graph that walks the caches of several layers, more than the L2 cache holds.
Decoding: ROWSxCONTEXT, or ROWSxragged with contexts of 100 to 2,047 tokens; +N: with N drafts in every row. Reading:
PROMPTSxTOKENS, causal.
``by_block_us``: with another layout of the cache, the layers of a block side by side in place of a layer's blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.report import parser, save
from preheat.backends.cuda.attention.paged import (
    decode_attention,
    prefill_attention,
    prefill_config,
    query_tile,
    verify_queries,
)
from preheat.backends.cuda.attention.values import Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.attention.work import SPLIT, decode_work, prefill_tiles, query_tiles
from preheat.backends.cuda.matmul.bench import COPIED_BYTES, graph_microseconds
from preheat.backends.registry import pick_backend
from preheat.settings import Settings

DECODING = ("1x128", "32x128", "256x128", "256x1000", "64xragged", "256xragged", "32x8192", "4x32768")
DRAFTED = ("1x1000+4", "32x1000+4", "256x1000+1", "256x1000+4", "1x8192+4", "32x8192+4", "4x32768+7")
STORED = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
READING = ("1x2048", "4x2048", "8x1024", "1x16384")


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer, in bfloat16, with a cache of ``kv_cache_dtype``."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    kv_cache_dtype: str = "auto"

    @property
    def stored(self) -> torch.dtype:
        return STORED[self.kv_cache_dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.kv_heads * self.dim * self.stored.itemsize

    @property
    def value_scale(self) -> float | None:
        return None if self.stored.itemsize == 2 else 1.0

    def queries(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.heads, self.dim, dtype=torch.bfloat16, device="cuda")


class Pages:
    """Random keys and values of sequences of ``lengths`` in shuffled blocks, of several ``layers``.

    With ``by_block`` the layers of a block lie side by side, else the blocks of a layer.
    """

    def __init__(self, lengths: Sequence[int], heads: AttentionSizes, by_block: bool) -> None:
        counts = [-(-length // heads.block_size) for length in lengths]
        copies = 1 + COPIED_BYTES // (sum(counts) * heads.block_size * heads.token_bytes)
        outer = (sum(counts), copies) if by_block else (copies, sum(counts))
        inner = (2, heads.kv_heads, heads.block_size, heads.dim)
        numbers = torch.randn(*outer, *inner, dtype=torch.bfloat16, device="cuda").to(heads.stored)
        self.layers = numbers.unbind(int(by_block))
        blocks = torch.split(torch.randperm(sum(counts), dtype=torch.int32), counts)
        self.table = pad_sequence(list(blocks), batch_first=True).cuda()


def whole_numbers(values: Any) -> Tensor:
    """Return ``values`` as int32 on the device."""
    return torch.as_tensor(np.asarray(values, np.int32), device="cuda")


def decoding(lengths: Sequence[int], drafts: int, heads: AttentionSizes, by_block: bool) -> float:
    """Return microseconds of a decoding layer.

    Every sequence has one token and ``drafts`` drafts.
    """
    rows, width, pages = len(lengths), 1 + drafts, Pages(lengths, heads, by_block)
    first, extend = np.asarray(lengths) - width, np.full(rows, width)
    tile = verify_queries(heads.heads, heads.kv_heads, width, heads.dim, torch.bfloat16)
    starts, begin, count = query_tiles(extend.cumsum(), extend, first, tile if drafts else 1)
    work = decode_work(starts, begin, SPLIT, None, queries=count if drafts else None)
    positions = (first[:, None] + np.arange(width)).reshape(-1)
    numbers = np.arange(rows).repeat(width), positions, work, [len(work)]
    slots, at, *listed = map(whole_numbers, numbers)
    places, pieces = Places(slots, at, pages.table), Pieces(*listed)
    q = heads.queries(rows * width)
    out, space = torch.empty_like(q), Workspace(len(work) * tile, rows * width, heads.heads, heads.dim, q.device)
    scores = Scores(heads.dim**-0.5, value_scale=heads.value_scale)

    def step() -> None:
        for cache in pages.layers:
            decode_attention(q, cache, out, places, pieces, space, scores, Rows(rows, width))

    step()
    return graph_microseconds(step, 9) / len(pages.layers)


def reading(prompts: int, length: int, heads: AttentionSizes, by_block: bool) -> float:
    """Return microseconds of a layer that reads whole prompts."""
    pages, tile = Pages([length] * prompts, heads, by_block), prefill_config(heads.dim, torch.bfloat16)
    first, lengths = np.arange(prompts) * length, np.full(prompts, length)
    tiles = prefill_tiles(first, lengths, np.zeros(prompts, int), query_tile(heads.heads, heads.kv_heads, tile))
    rows, positions = np.repeat(np.arange(prompts), length), np.tile(np.arange(length), prompts)
    slots, at, *listed = map(whole_numbers, (rows, positions, tiles, [len(tiles)]))
    places, pieces = Places(slots, at, pages.table), Pieces(*listed)
    q = heads.queries(prompts * length)
    out, scores = torch.empty_like(q), Scores(heads.dim**-0.5, value_scale=heads.value_scale)

    def step() -> None:
        for cache in pages.layers:
            prefill_attention(q, cache, out, places, pieces, scores)

    step()
    return graph_microseconds(step, 9) / len(pages.layers)


def measure(heads: AttentionSizes) -> list[dict[str, Any]]:
    chance, lines = np.random.default_rng(0), []
    cases: list[tuple[str, str, Callable[[bool], float], float]] = []
    for name in (*DECODING, *DRAFTED):
        rows, context, drafts = *name.partition("+")[0].split("x", 1), int(name.partition("+")[2] or 0)
        lengths = chance.integers(100, 2048, int(rows)) if context == "ragged" else [int(context)] * int(rows)
        size = sum(int(each) for each in lengths) * heads.token_bytes
        cases.append((name, "tb_s", partial(decoding, list(lengths), drafts, heads), size))
    for name in READING:
        prompts, length = map(int, name.split("x"))
        operations = 2 * prompts * heads.heads * heads.dim * length**2
        cases.append((name, "tflop_s", partial(reading, prompts, length, heads), operations))
    for name, unit, run, work in cases:
        taken = run(False)
        found = {"us": round(taken, 1), unit: round(work / taken / 1e6, 2), "by_block_us": round(run(True), 1)}
        lines.append({"case": name, **found})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--heads", type=int, default=32)
    flags.add_argument("--kv-heads", type=int, default=8)
    flags.add_argument("--dim", type=int, default=128)
    flags.add_argument("--block-size", type=int, default=64)
    flags.add_argument("--kv-cache-dtype", choices=STORED, default="auto")
    heads = AttentionSizes(**vars(flags.parse_args(words)))
    pick_backend("cuda").prepare(Settings(), "eager", None)
    save("attention", {"sizes": asdict(heads), "cases": measure(heads)})
