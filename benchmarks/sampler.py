"""The cost of sampling a step, in microseconds.

    python -m benchmarks sampler [--device cuda] [--rows 1 32 256] [--vocab 4096 128256] [--repeats 9]

Times are by rows, vocabulary and kind of request, packing and drawing apart. Logits are normal with a standard
deviation of 3; prompts have 500 tokens. "logprobs" asks for 5 alternatives. Medians; copying the logits, which the
sampler may overwrite, is not counted. On a GPU: the kernels of a step, one after another in a graph, on bfloat16
logits.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.common.report import parser, save
from preheat.core import Request, SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops.logprobs import token_logprobs
from preheat.ops.philox import gumbel_rows
from preheat.ops.sampler import HostSampler
from preheat.schedule.slots import Slots

KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "0.7/0.9/top-k 50": SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
    "0.8/0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k 50": SamplingParams(top_k=50),
    "3.0/0.99": SamplingParams(temperature=3.0, top_p=0.99),
    "greedy, penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
}
PROMPT = 500
STEPS = 50  # of a GPU, in one graph


def median(prepare: Callable[[], None], run: Callable[[], object], repeats: int) -> float:
    """Return the median microseconds of ``run`` after ``prepare``, the first time left out."""
    spent = []
    for _ in range(repeats + 1):
        prepare()
        begin = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begin)
    return round(statistics.median(spent[1:]) * 1e6, 1)


def filled(rows: int, vocab: int, params: SamplingParams) -> Slots:
    """Return slots with ``rows`` sequences sampled under ``params``."""
    rng, slots = np.random.default_rng(0), Slots(rows, 1024, 64)
    for number in range(rows):
        prompt = rng.integers(0, min(vocab, 4096), PROMPT)
        slots.take(Request(number, prompt.tolist(), params, number, 100), prompt)
    return slots


def measure(rows: int, vocab: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of sampling.

    A step has all rows of one kind.
    """
    rng, places = np.random.default_rng(0), np.arange(rows)
    fresh = torch.from_numpy((rng.standard_normal((rows, vocab)) * 3).astype(np.float32))
    logits, figures = fresh.clone(), {}

    def nothing() -> None:
        pass

    def renew() -> None:
        logits.copy_(fresh)

    for name, params in KINDS.items():
        slots, sampler = filled(rows, vocab, params), HostSampler(rows, vocab)
        batch = sampling_input(slots, places)
        figures[name] = {
            "pack": median(nothing, lambda slots=slots: sampling_input(slots, places), repeats),  # type: ignore[misc]
            "draw": median(renew, lambda s=sampler, b=batch: s.sample(logits, b), repeats),  # type: ignore[misc]
        }
    zeros, five = np.zeros(rows, np.int64), np.full(rows, 5)
    figures["logprobs"] = {"compute": median(nothing, lambda: token_logprobs(fresh, zeros, five), repeats)}
    seeds = places.astype(np.uint64)
    figures["noise of whole rows"] = {
        "compute": median(nothing, lambda: gumbel_rows(seeds, zeros, zeros, vocab), repeats)
    }
    return figures


def on_gpu(rows: int, vocab: int, repeats: int) -> dict[str, float]:
    """Return the microseconds of the kernels of each kind's step."""
    from preheat.backends.cuda.backend import CudaBackend
    from preheat.backends.cuda.sampling.sampler import CudaSampler

    backend = CudaBackend()

    chance, places = torch.Generator("cuda").manual_seed(0), np.arange(rows)
    logits = (torch.randn(rows, vocab, generator=chance, device="cuda") * 3).bfloat16()
    figures = {}
    for name, params in KINDS.items():
        batch = sampling_input(filled(rows, vocab, params), places)
        sampler = CudaSampler(rows, vocab, backend, rows)
        sampler.describe(0, batch, places)
        sampler.sample(batch.level, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                sampler.sample(batch.level, logits)

        def replay(graph: torch.cuda.CUDAGraph = graph) -> None:
            graph.replay()
            torch.cuda.synchronize()

        figures[name] = round(median(torch.cuda.synchronize, replay, repeats) / STEPS, 1)
    return figures


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    flags.add_argument("--vocab", type=int, nargs="+", default=[4096, 128_256])
    flags.add_argument("--repeats", type=int, default=9)
    args = flags.parse_args(words)
    torch.set_num_threads(1)
    time_of = on_gpu if args.device == "cuda" else measure
    figures = {f"{rows} x {vocab}": time_of(rows, vocab, args.repeats) for vocab in args.vocab for rows in args.rows}
    print(json.dumps({"microseconds": figures}, indent=1))
    save("sampler" if args.device == "cpu" else "sampler_gpu", {"microseconds": figures})
