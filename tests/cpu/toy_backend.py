"""The least code of a new platform: a backend in plain torch that attends token by token.

It is right, and slow.
"""

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

from preheat.backends import cold, layer
from preheat.backends.base import attention as paged
from preheat.backends.base.backend import K, R
from preheat.backends.base.device import GraphDriver, HostEvent, StepCounter
from preheat.backends.base.facts import Facts, Machine, Mode, Modes
from preheat.backends.base.layers import ALONE, Layer, LayerWeights, Region
from preheat.backends.base.sampling import SampledRows, Sampler
from preheat.core import Level, TokenLogprobs
from preheat.limits import Limits
from preheat.ops import digest, embedding, logprobs, moe, norm, pooling, rotary, sampler, sampling, values
from preheat.warmup.cold_sources import ORIGINS


def nothing(*args: Any, **more: Any) -> None:
    """Do nothing: a step has ended when its call returns."""


class ToyAttention:
    """Attention where each token looks up the blocks of its sequence."""

    def __init__(self, layers: Sequence[paged.AttentionLayer]) -> None:
        self.layers, self.tables = layers, dict[int, np.ndarray]()

    clear = nothing

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        return ()

    def plan(self, step: paged.StepRows, tables: paged.BlockTables) -> paged.AttentionWork:
        return paged.AttentionWork([], -1, -1)

    def write(self, turn: int, tables: paged.BlockTables) -> None:
        self.tables[turn] = np.pad(tables.block_table, ((0, 1), (0, 0)))  # the last row is padding's

    def send(self, turn: int, work: paged.AttentionWork, inputs: paged.StepInputs) -> None:
        self.table = torch.from_numpy(self.tables[turn])

    def attend(self, inputs: paged.StepInputs, out: Tensor) -> paged.Attend:
        places = list(zip(inputs.slots.tolist(), inputs.positions.tolist(), strict=True))

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = self.layers[index]
            heads, kv, size = layer.num_heads, layer.num_kv_heads, layer.cache.shape[3]
            turned = qkv[:, : heads + kv]
            if layer.qk_norm is not None:
                turned.copy_(layer.qk_norm(turned))
            if layer.rope is not None:
                rotary.apply_rope_(turned, *layer.rope[inputs.positions].unbind(1))
            for token, (slot, at) in enumerate(places):
                layer.cache[self.table[slot, at // size], :, :, at % size] = qkv[token, heads:].view(2, kv, -1)
            for token, (slot, at) in enumerate(places):
                begin = max(at + 1 - layer.window, 0) if layer.window else 0
                pages = layer.cache[self.table[slot, : at // size + 1]].permute(1, 2, 0, 3, 4).flatten(2, 3)
                keys, values = pages[:, :, begin : at + 1]
                bias = 0 if layer.alibi is None else layer.alibi.view(kv, -1, 1) * (torch.arange(begin, at + 1) - at)
                weights = (qkv[token, :heads].view(kv, heads // kv, -1) @ keys.mT * layer.scale + bias).softmax(-1)
                out[token] = (weights @ values).flatten()
            return out

        return attend


class ToySampler:
    """The reference sampler, a step at a time."""

    clear = compile = fetch = report = nothing

    def __init__(self, slots: int, vocab: int, duplicates: bool) -> None:
        self.host, self.tokens = sampler.HostSampler(slots, vocab, duplicates), np.empty(0, np.int64)
        self.last_token, self.forget = torch.zeros(slots + 1, dtype=torch.int32), self.host.forget
        self.words = np.zeros((slots, sampling.words_of(vocab)), np.int32)

    def describe(self, turn: int, step: sampling.SamplingInput, slots: np.ndarray) -> None:
        self.step = step

    def masks(self, turn: int) -> np.ndarray:
        return self.words

    def sample(self, level: Level, logits: Tensor) -> None:
        self.raw = logits[: self.step.size]
        self.tokens = self.host.sample(self.raw, self.step, self.words).numpy()

    def read(self, turn: int, rows: int, reporting: np.ndarray, alternatives: np.ndarray) -> SampledRows:
        tokens, some = self.tokens[:rows], self.tokens[reporting]
        return tokens, logprobs.token_logprobs(self.raw[reporting], some, alternatives) if len(some) else []

    def logprobs(self, logits: Tensor, tokens: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
        return logprobs.token_logprobs(logits[: len(tokens)], tokens, np.full(len(tokens), alternatives))


class ToyProduct(list[Tensor]):
    """A weight and a bias."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, *self)

    weights = list.copy


@dataclass
class ToyGraphs(Generic[K, R]):
    """No graphs."""

    body: Callable[[K], R]
    capture = forget = nothing

    def __contains__(self, key: K) -> bool:
        return False

    def run(self, key: K, *, eager: bool = False) -> R:
        return self.body(key)


class ToyBackend:
    """Backend of float32 on the host."""

    prepare = synchronize = compiling = select_kernels = nothing
    sharing = None
    adapters = None
    facts = Facts(
        name="toy", split=16, machine=Machine(flops=1e9, bandwidth=1e9, step_overhead=1e-2, call_overhead=1e-3),
        modes=Modes(default="eager", runs={"eager": "one operation after the other"}, rejected={}),
        lacks=dict.fromkeys([("tensor_parallel",), ("pipeline",), ("adapters",)], "it is a toy"),
    )  # fmt: skip
    device, fingerprint, peak_memory = torch.device("cpu"), "toy", staticmethod(lambda run: run() or 0)
    cold_sources = staticmethod(lambda: dict.fromkeys(ORIGINS, cold.Watched("none", "it is a toy")))
    free_memory = kv_cache_memory = lambda self: 1 << 28
    used_memory = supports_bfloat16 = lambda self: False
    supports = staticmethod(lambda value: values.Ok())
    activation_dtype = staticmethod(lambda dtype: dtype)
    sleep_memory = functions = lambda *_: None

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        return nullcontext(lambda source, out: np.copyto(out.numpy(), source.float().numpy()))

    def regions(self, mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
        return lambda region: region

    def programs(self, body: Callable[[K], R], attention: paged.Attention | None = None) -> GraphDriver[K, R]:
        return ToyGraphs(body)

    def attention(self, layers: Sequence[paged.AttentionLayer], limits: Limits, *, contiguous: bool) -> paged.Attention:
        return ToyAttention(layers)

    def sampler(self, limits: Limits, vocab: int, **options: Any) -> Sampler:
        return ToySampler(limits.max_num_seqs, vocab, options["handle_topk_duplicates"])

    def layer(self, value: values.Matmul, weights: LayerWeights, context: Any = ALONE) -> Layer:
        product = ToyProduct(each for each in weights[:2] if isinstance(each, Tensor))
        return layer.Layer(value, weights, layer.Tiles([product]))

    def embed(self, inputs: paged.StepInputs, last_token: Tensor, table: Tensor, out: Tensor, **more: Any) -> None:
        embedding.embed(inputs.tokens, table, **more, at=inputs.positions, out=out)

    def step_counters(self) -> dict[str, StepCounter]:
        return {}

    take_rows, add_shared = staticmethod(lambda x, index: x[index]), staticmethod(moe.add_shared)
    sum_rows = staticmethod(pooling.sum_rows)
    norm, row_digests, host_copy = map(staticmethod, (norm.make_norm, digest.row_digests, torch.zeros_like))
    event = staticmethod(HostEvent)
