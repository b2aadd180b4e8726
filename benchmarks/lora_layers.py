"""The time that adapters add to single layers on a GPU.

    python -m benchmarks lora_layers [--shape llama-3.1-8b] [--rows 1 32 128 2048] [--adapters 8] [--rank 16]
        [--replays 30]

The plain layer and layers with adapters take turns. A graph walks copies of a layer, with adapters of their own, each
behind a kernel that writes its inputs; the weights of all are larger than the L2 cache. Medians, in microseconds a
layer: plain, with one adapter for all rows, and with all adapters. Below 512 rows each row then has the next adapter,
as where many requests decode. From 512 rows on the rows of an adapter follow each other, as the rows of prompts do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES, config_of
from preheat.backends.base.layers import LayerContext, LayerWeights
from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.matmul.kernels import KernelConfigs, kernel_configs
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.matmul.lora.blocks import MANY_ROWS, CudaAdapterRows
from preheat.backends.registry import pick_backend
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import Finish, LowRank, Matmul, WeightFormat
from preheat.settings import Settings

COPIED_BYTES = 200 << 20
"""Bytes of weights that a graph walks, about."""


def layers_of(shape: str) -> dict[str, tuple[int, tuple[int, ...], bool]]:
    """Return the sizes of each linear layer of a decoder layer.

    They are inputs, outputs of its parts, and whether it is gated.
    """
    config = config_of(shape)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config.get("num_key_value_heads", heads) * size
    return {
        "qkv": (hidden, (queries, keys, keys), False), "o": (queries, (hidden,), False),
        "gate_up": (hidden, (inner, inner), True), "down": (inner, (hidden,), False),
    }  # fmt: skip


class Layers:
    """Copies of one layer, with adapters in all slots."""

    def __init__(self, configs: KernelConfigs, inputs: int, outputs: tuple[int, ...], gated: bool, args: Any) -> None:
        self.inputs, device = inputs, torch.device("cuda")
        self.rows = CudaAdapterRows(max(args.rows), args.adapters, device)
        self.made: list[Layer] = []
        value = Matmul(
            outputs=sum(outputs),
            inputs=inputs,
            weight=WeightFormat("bfloat16"),
            terms=(LowRank(outputs, args.adapters, args.rank, "bfloat16"),),
            finish=Finish(activation="silu_and_mul" if gated else None),
        )
        for _ in range(max(COPIED_BYTES // (2 * sum(outputs) * inputs), 2)):
            weights = LayerWeights(random(sum(outputs), inputs).to(device))
            made = Layer(value, weights, configs, device, LayerContext(rows=self.rows))
            assert made.slots is not None
            for place in range(args.adapters):
                a = random(args.rank, inputs)
                parts = {part: LowRankPair(a, random(size, args.rank), 0.5) for part, size in enumerate(outputs)}
                made.slots.write(place, made.slots.pack(parts))
            self.made.append(made)

    def graph(self, rows: int, adapters: int) -> Any:
        """Return a graph of all copies, with ``adapters`` adapters in turn, or without any."""
        source = random(rows, self.inputs).cuda()
        x = torch.empty_like(source)
        self.describe(rows, adapters)

        def work() -> None:
            for made in self.made:
                made(torch.add(source, 0, out=x))

        work()  # compiles; a graph cannot
        return capture(work)

    def describe(self, rows: int, adapters: int) -> None:
        count, row = max(adapters, 1), np.arange(rows)
        places = row % count if rows < MANY_ROWS else row * count // rows
        self.rows.describe(0, "tokens", places.astype(np.int32))
        self.rows.use("tokens" if adapters else None)
        torch.cuda.synchronize()


def random(*shape: int) -> torch.Tensor:
    found: torch.Tensor = torch.randn(*shape, dtype=torch.float32, device="cuda") / shape[-1] ** 0.5
    return found.bfloat16().cpu()


def microseconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def measure(layers: Layers, rows: int, kinds: dict[str, int], replays: int) -> dict[str, float]:
    """Return microseconds a layer for each kind of rows."""
    graphs = {kind: layers.graph(rows, adapters) for kind, adapters in kinds.items()}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(replays):
        for kind, adapters in kinds.items():
            layers.describe(rows, adapters)
            graphs[kind].replay()  # fills the L2 cache and raises the clock
            found[kind].append(microseconds(graphs[kind].replay))
    return {kind: round(statistics.median(each) / len(layers.made), 2) for kind, each in found.items()}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 2048])
    flags.add_argument("--adapters", type=int, default=8)
    flags.add_argument("--rank", type=int, default=16)
    flags.add_argument("--replays", type=int, default=30)
    args = flags.parse_args(words)
    pick_backend("cuda").prepare(Settings(), "eager", None)
    configs = kernel_configs(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), None)
    kinds = {"plain": 0, "one": 1, "mixed": args.adapters}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, (inputs, outputs, gated) in layers_of(args.shape).items():
        layers = Layers(configs, inputs, outputs, gated, args)
        for rows in args.rows:
            found = measure(layers, rows, kinds, args.replays)
            figures.setdefault(name, {})[str(rows)] = found
            more = ", ".join(f"{kind} {found[kind] - found['plain']:+.1f}" for kind in list(kinds)[1:])
            print(f"{name:<8} {rows:>5} rows: plain {found['plain']:.1f} us, {more}", flush=True)
        del layers
        torch.cuda.empty_cache()
    print(save(f"lora_layers_{args.shape}", {"options": vars(args), "us": figures}))
