"""The recurrence of a layer with states on a GPU, in each configuration of its kernel.

    python -m benchmarks recurrence [--case 256 8x1024] [--quick] [--bandwidth 4800] [--clock 1980]

A case is ROWS that decode, or PROMPTSxTOKENS. Figures are median microseconds of one layer of Qwen3.5-35B-A3B, from a
CUDA graph that walks the states of several layers, more than the L2 cache holds. ``limit_us`` is the larger one of two
times: the bytes at --bandwidth (GB/s), and the operations at --clock (MHz), one a lane and a cycle. ``same_bits``
compares answers and states with the first configuration's. ``layer_us`` is the configuration in use, with the kernels
before and behind the recurrence. ``--quick`` leaves out all configurations but the one in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from benchmarks.common.report import parser, save
from preheat.backends.base.backend import Backend
from preheat.backends.cuda.matmul.bench import COPIED_BYTES, graph_microseconds
from preheat.backends.cuda.recurrence import delta
from preheat.backends.cuda.recurrence.delta import Config, CudaRecurrences, TapedStates
from preheat.backends.cuda.recurrence.kernels import SCALARS, TAPE
from preheat.backends.registry import pick_backend
from preheat.core import StepStates
from preheat.limits import Limits
from preheat.ops.delta import DeltaStates, DeltaWeights
from preheat.ops.values import Recurrence
from preheat.settings import Settings

VALUE = Recurrence(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
CASES = ("1", "32", "256", "1x2048", "8x1024", "1x8192")
ROWS = 256
"""The most rows of a step, as programs for prompts are launched."""

OPERATIONS = 7
"""Of a number of a state and a token: a product with the decay, two products and two sums, a product and an addition.
They are rounded one by one, so none of them is fused."""

DECODING = tuple(
    Config(columns, warps, 0, rows, ahead=ahead)
    for columns, warps in ((32, 4), (64, 4), (64, 8), (16, 4), (128, 16), (32, 8))
    for rows in (2, 3, 4, 6, 8)
    for ahead in (1, 2, 3)
)
PROMPTS = (
    *(Config(*each, 0, 32) for each in ((4, 1), (8, 1), (16, 4), (32, 4))),
    *(Config(*each, 16, 32) for each in ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8),
                                         (64, 4), (64, 8), (128, 8))),
    *(Config(32, 4, chunk, 32) for chunk in (4, 8, 32)), Config(16, 4, 8, 32), Config(16, 4, 32, 32),
    Config(32, 4, 16, 8), Config(32, 4, 16, ROWS),
)  # fmt: skip


def lengths_of(case: str) -> list[int]:
    """Return the tokens of each row of ``case``."""
    rows, _, tokens = case.partition("x")
    return [int(tokens or 1)] * int(rows)


def token_bytes() -> int:
    """Return the bytes that the recurrence reads and writes for a token."""
    return 4 * (2 * VALUE.key_size + 2 * VALUE.value_size + VALUE.value_heads * int(SCALARS.value))


def limit_us(lengths: Sequence[int], bandwidth: float, clock: float) -> float:
    """Return the microseconds that the recurrence needs at least: the larger one of bytes' and operations' times."""
    state, tokens = VALUE.value_size * VALUE.key_dim, sum(lengths)
    written = 1 / TAPE.value if max(lengths) == 1 else 1
    moved = (1 + written) * len(lengths) * VALUE.state_bytes(2) + tokens * token_bytes()
    lanes = 128 * torch.cuda.get_device_properties("cuda").multi_processor_count
    return float(max(moved / bandwidth / 1e3, tokens * OPERATIONS * state / lanes / clock))


class Step:
    """A step of rows of ``lengths`` tokens, with random inputs, for the states of several layers."""

    def __init__(self, lengths: Sequence[int], backend: Backend) -> None:
        rows, self.tokens = np.arange(len(lengths)), sum(lengths)
        decode, size = max(lengths) == 1, VALUE.state_bytes(2) * len(lengths) + token_bytes() * self.tokens
        limits = Limits(
            max_model_len=max(lengths), max_num_seqs=ROWS, max_num_batched_tokens=self.tokens,
            max_num_prefill_seqs=None, block_size=64, num_blocks=9, states=ROWS,
        )  # fmt: skip
        self.kernels = CudaRecurrences(limits, backend)
        slots, layers = 1 + len(lengths), 1 + COPIED_BYTES // size
        self.layers = [self.kernels.states(VALUE, slots, torch.bfloat16) for _ in range(layers)]
        step: Any = SimpleNamespace(tokens=self.tokens)
        states = StepStates(rows, np.asarray(lengths), 1 + rows, 1 + rows)
        self.kernels.send(0, self.kernels.plan(step, states))
        at = [np.arange(length) + TAPE.value * decode for length in lengths]  # a row that decodes reads its state
        positions = torch.from_numpy(np.concatenate(at).astype(np.int32)).to(backend.device)
        slots_of = torch.arange(len(lengths), dtype=torch.int32, device=backend.device)
        slots_of = slots_of.repeat_interleave(torch.tensor(lengths, device=backend.device))
        self.inputs: Any = SimpleNamespace(
            positions=positions, slots=slots_of, rows=len(lengths) if decode else ROWS, width=int(decode)
        )
        draw, heads = partial(torch.randn, device=backend.device), VALUE.value_heads
        self.x, taps = draw(self.tokens, VALUE.inputs).bfloat16(), draw(VALUE.channels, VALUE.taps)
        self.weights = DeltaWeights(VALUE, taps, -draw(heads).exp(), draw(heads), draw(VALUE.value_dim), 1e-6)
        self.made = [
            draw(self.tokens, VALUE.key_heads, 2 * VALUE.key_dim) * 0.1,
            draw(self.tokens, heads, VALUE.value_dim),
            draw(self.tokens, heads, SCALARS.value).sigmoid(),
        ]
        self.answers, self.out = torch.empty_like(self.made[1]), self.x.new_empty(self.tokens, VALUE.value_size)

    def recur(self, layers: Sequence[DeltaStates]) -> None:
        """Launch the recurrence of each layer."""
        for states in layers:
            made = states.tape if self.inputs.width and isinstance(states, TapedStates) else self.made
            self.kernels.recur(self.inputs, self.x, VALUE, states, [*made, self.answers])

    def recurrence_us(self) -> float:
        """Return microseconds of the recurrence of a layer."""
        return graph_microseconds(lambda: self.recur(self.layers), 9) / len(self.layers)

    def layer_us(self) -> float:
        """Return microseconds of a layer, with its convolution and its norm."""
        given = self.inputs, self.x, self.weights
        work = [(*given, states, self.out) for states in self.layers]
        return graph_microseconds(lambda: [self.kernels.run(*each) for each in work], 9) / len(self.layers)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return answers and states behind a step on states of one half."""
        states = self.layers[0]
        states.matrix.fill_(0.5)
        if self.inputs.width and isinstance(states, TapedStates):
            draw = torch.Generator(self.x.device).manual_seed(3)
            for each in states.tape:
                each.uniform_(0.1, 0.9, generator=draw)
        self.recur([states])
        return self.answers.clone(), states.matrix.clone()


@contextmanager
def used(config: Config) -> Iterator[None]:
    """Let ``config`` be the configuration of each step."""
    with mock.patch.multiple(delta, ONE=config, PROMPTS=config, DECODING=config, TOKENS=config):
        yield


def measure(case: str, quick: bool, bandwidth: float, clock: float, backend: Backend) -> list[dict[str, Any]]:
    """Return a line for each configuration of ``case``, the fastest one first; the first line is the layer's."""
    lengths = lengths_of(case)
    step, decode, limit = Step(lengths, backend), max(lengths) == 1, limit_us(lengths, bandwidth, clock)
    own, lines, right = delta.TOKENS if decode else delta.ONE if len(lengths) == 1 else delta.PROMPTS, [], None
    for config in [own] if quick else dict.fromkeys((own, *(DECODING if decode else PROMPTS))):
        line = {"case": case, **config._asdict(), "in_use": config == own, "limit_us": round(limit, 1)}
        try:
            with used(config):
                found = step.results()
                right = right or found
                line |= {"us": round(step.recurrence_us(), 1), "same_bits": all(map(torch.equal, found, right))}
        except (TritonError, RuntimeError) as error:
            line |= {"us": None, "failed": str(error).splitlines()[0]}
        lines.append(line)
        print(json.dumps(line), flush=True)
    whole = {"case": case, "layer_us": round(step.layer_us(), 1)}
    print(json.dumps(whole), flush=True)
    return [whole, *sorted(lines, key=lambda line: line["us"] or math.inf)]


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--case", nargs="+", default=CASES)
    flags.add_argument("--quick", action="store_true")
    flags.add_argument("--bandwidth", type=float, default=4800, help="of the device's memory, in GB/s")
    flags.add_argument("--clock", type=float, default=1980, help="of the multiprocessors, in MHz")
    args = flags.parse_args(words)
    backend = pick_backend("cuda")
    backend.prepare(Settings(), "eager", None)
    lines = [line for case in args.case for line in measure(case, args.quick, args.bandwidth, args.clock, backend)]
    save("recurrence", {"sizes": asdict(VALUE), "cases": lines})
