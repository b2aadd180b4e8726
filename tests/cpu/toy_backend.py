"""The least that a new platform has to write: a backend in plain torch that attends token by token. Right, and slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends import base, cold
from preheat.backends.base import AttentionLayer, K, R, StepInputs
from preheat.core import Level, TokenLogprobs
from preheat.limits import Limits
from preheat.ops import activation, digest, logprobs, norm, rotary, sampler, sampling
from preheat.warmup.cold_sources import ORIGINS


def nothing(*args: Any, **more: Any) -> None:
    """There is nothing to do: a step has ended when its call returns."""


class ToyAttention:
    """Each token looks up the blocks of its sequence."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.layers, self.tables = layers, dict[int, np.ndarray]()

    clear = nothing

    def list_sizes(self, tokens: int, rows: int, *, decode: bool) -> tuple[int, ...]:
        return ()

    def plan(self, step: base.StepRows, tables: base.BlockTables) -> base.AttentionWork:
        return base.AttentionWork([], -1)

    def write(self, turn: int, tables: base.BlockTables) -> None:
        self.tables[turn] = np.pad(tables.block_table, ((0, 1), (0, 0)))  # the last row is that of padding

    def send(self, turn: int, work: base.AttentionWork, inputs: StepInputs) -> None:
        self.table = torch.from_numpy(self.tables[turn])

    def attend(self, inputs: StepInputs, out: Tensor) -> base.Attend:
        places = list(zip(inputs.slots.tolist(), inputs.positions.tolist(), strict=True))

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = self.layers[index]
            heads, kv, size = layer.num_heads, layer.num_kv_heads, layer.cache.shape[3]
            turned = qkv[:, : heads + kv]
            if layer.qk_norm is not None:
                turned.copy_(layer.qk_norm(turned))
            rotary.apply_rope_(turned, *layer.rope[inputs.positions].unbind(1))
            for token, (slot, at) in enumerate(places):
                layer.cache[self.table[slot, at // size], :, :, at % size] = qkv[token, heads:].view(2, kv, -1)
            for token, (slot, at) in enumerate(places):
                begin = max(at + 1 - layer.window, 0) if layer.window else 0
                pages = layer.cache[self.table[slot, : at // size + 1]].permute(1, 2, 0, 3, 4).flatten(2, 3)
                keys, values = pages[:, :, begin : at + 1]
                query = qkv[token, :heads].view(kv, heads // kv, -1)
                weights = (query @ keys.mT * layer.scale).softmax(-1)
                out[token] = (weights @ values).flatten()
            return out

        return attend


class ToySampler:
    """The reference sampler, a step at a time."""

    clear = compile = fetch = report = nothing

    def __init__(self, slots: int, vocab: int, duplicates: bool) -> None:
        self.host, self.tokens = sampler.HostSampler(slots, vocab, duplicates), np.empty(0, np.int64)
        self.last_token, self.forget = torch.zeros(slots + 1, dtype=torch.int32), self.host.forget

    def describe(self, turn: int, step: sampling.SamplingInput, slots: np.ndarray) -> None:
        self.step = step

    def sample(self, level: Level, logits: Tensor) -> None:
        self.raw = logits[: self.step.size]
        self.tokens = self.host.sample(self.raw, self.step).numpy()

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> base.SampledRows:
        tokens, some = self.tokens[:rows], self.tokens[reporting]
        return tokens, logprobs.token_logprobs(self.raw[reporting], some, alternatives) if len(some) else []

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        return logprobs.token_logprobs(logits[: len(tokens)], tokens, np.full(len(tokens), alternatives))


@dataclass
class ToyGraphs(Generic[K, R]):
    """There are none."""

    body: Callable[[K], R]
    capture = forget = nothing

    def __contains__(self, key: K) -> bool:
        return False

    def run(self, key: K, *, eager: bool = False) -> R:
        return self.body(key)


class ToyBackend:
    """Float32 on the host."""

    prepare = synchronize = compiling = settle = nothing
    facts = base.Facts(
        name="toy", split=16, machine=base.Machine(flops=1e9, bandwidth=1e9, step_overhead=1e-2, call_overhead=1e-3),
        modes=base.Modes(default="eager", runs={"eager": "one operation after the other"}, rejected={}),
    )  # fmt: skip
    device, fingerprint = torch.device("cpu"), "toy"

    cold_sources = staticmethod(lambda: dict.fromkeys(ORIGINS, cold.Watched("none", "it is a toy")))
    free_memory = kv_cache_memory = lambda self: 1 << 28
    used_memory = supports_bfloat16 = lambda self: False

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        return nullcontext(lambda source, out: np.copyto(out.numpy(), source.float().numpy()))

    def regions(self, mode: base.Mode, cache: Path | None) -> Callable[[base.Region], base.Region]:
        return lambda region: region

    def programs(self, body: Callable[[K], R]) -> base.GraphDriver[K, R]:
        return ToyGraphs(body)

    def attention(self, layers: Sequence[AttentionLayer], limits: Limits, *, contiguous: bool) -> base.Attention:
        return ToyAttention(layers)

    def sampler(self, limits: Limits, vocab: int, *, max_logprobs: int, handle_topk_duplicates: bool) -> base.Sampler:
        return ToySampler(limits.max_num_seqs, vocab, handle_topk_duplicates)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> base.Linear:
        last = activation.silu_and_mul if gated else torch.Tensor.contiguous
        return lambda x, out=None: last(F.linear(x, weight, bias))

    def embed(self, inputs: StepInputs, last_token: Tensor, table: Tensor, out: Tensor) -> None:
        out.copy_(table[inputs.tokens])

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    norm, row_digests, host_copy = norm.RMSNorm, staticmethod(digest.row_digests), staticmethod(torch.zeros_like)
