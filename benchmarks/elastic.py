"""Changes in a running engine: weights, offloaded blocks, sleep.

    python -m benchmarks elastic [--shape llama-3.1-8b] [--device cuda] [--parts update,offload,sleep] [--save] [--tiny]

``update``: all weights, from tensors in host memory that is not pinned, as a trainer's would be. The digest must equal
the digest of an engine that booted with them. ``offload``: the time to the first token of a long prompt that was
evicted to the host, against computing it again; the token and its log-probability must be equal. ``sleep``: seconds of
level 1 down and up, and the first request after it against later ones; it is left out, with a note, where the device
cannot sleep.

Weights are random; speed does not depend on them. Tiny engines are for a smoke test: their figures mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.report import RESULTS, parser, save
from benchmarks.common.shapes import CHOICES, engine_options
from preheat import LLM, SamplingParams
from preheat.backends.registry import facts_of
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.files import BUNDLED
from preheat.model.formats import expected_tensors

PARTS = ("update", "offload", "sleep")
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
REPEATS = 3


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of ``run``, which ends with an answer of the device."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def new_weights(llm: LLM, seed: int) -> dict[str, Tensor]:
    """Return the dummy weights of ``seed`` on the host.

    They equal the weights of an engine on the device of ``llm``.
    """
    decoder, backend, source = llm.loop.executor.decoder, llm.loop.executor.backend, DummyTensors(seed)
    dtype = llm.loop.executor.cache.data.dtype
    found = {}
    for name, shape in expected_tensors(decoder.spec).items():
        tensor = torch.empty(shape, dtype=dtype, device=backend.device)
        source.fill(name, tensor)
        found[name] = tensor.cpu()
    return found


def measure_update(boot: Callable[..., LLM]) -> dict[str, Any]:
    """Return the seconds of an update of all weights.

    Its digest must equal a fresh boot's with these weights.
    """
    fresh = boot(seed=1)
    digest, tensors = fresh.state.digest, new_weights(fresh, 1)
    del fresh
    llm = boot(seed=0)
    before, took = llm.state.digest, []
    if not digest or before == digest:
        raise AssertionError(f"the engines' digests say nothing: {before!r} and {digest!r}")
    for _ in range(REPEATS):
        took.append(seconds(lambda: llm.update_weights(tensors.items())))
        if llm.state.digest != digest:
            raise AssertionError(f"after the update the digest is {llm.state.digest}, of a fresh boot it is {digest}")
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    return {
        "gigabytes": round(size / 1e9, 3), "first_s": round(took[0], 3), "median_s": round(median(took), 3),
        "gigabytes_per_s": round(size / 1e9 / median(took), 2), "digest_equal": True,
    }  # fmt: skip


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, object]:
    """Return the seconds to the first token of ``prompt``.

    Also return the token with its log-probabilities.
    """
    outputs = []
    took = seconds(lambda: outputs.extend(llm.generate([prompt], FIRST, use_tqdm=False)))
    return took, outputs[0].outputs[0]


def measure_offload(boot: Callable[..., LLM], length: int, block_size: int) -> dict[str, Any]:
    """Measure two prompts in a cache with room for one.

    Each evicts the other to the host.
    """
    blocks = length // block_size
    size = 4.0 if length > 1000 else 0.02  # GiB on the host: both prompts
    llm = boot(num_gpu_blocks_override=blocks + 3, kv_offloading_size=size, enable_prefix_caching=True)
    prompts = [[(31 * i + 7 * number) % 400 + 1 for i in range(length)] for number in (1, 2)]
    computed, returned = list[float](), list[float]()
    answers = list[object]()
    for _ in range(REPEATS):
        for prompt in prompts:
            llm.reset_prefix_cache()
            took, answer = first_token(llm, prompt)
            computed.append(took)
            answers.append(answer)
    llm.reset_prefix_cache()
    for prompt in prompts * 2:  # both are on the host then
        first_token(llm, prompt)
    llm.loop.scheduler.forget()
    for number in range(2 * REPEATS):
        took, answer = first_token(llm, prompts[number % 2])
        returned.append(took)
        if answer != answers[number % 2]:
            raise AssertionError("blocks that came back from the host changed an answer")
    hits = llm.loop.scheduler.stats().external_hits
    if hits < 2 * REPEATS * (length - 4 * block_size):  # some blocks of the other prompt stay on the device
        raise AssertionError(f"only {hits:,} tokens came back from the host")
    return {
        "tokens": length, "computed_ms": round(1e3 * median(computed), 2),
        "returned_ms": round(1e3 * median(returned), 2), "speed_up": round(median(computed) / median(returned), 2),
        "tokens_from_host": hits, "answers_equal": True,
    }  # fmt: skip


def measure_sleep(boot: Callable[..., LLM], length: int) -> dict[str, Any]:
    """Measure level 1 down and up, and requests after it.

    The engine proves its digest before it is awake.
    """
    llm = boot(enable_sleep_mode=True)
    prompt = [i % 400 + 1 for i in range(length)]
    _, answer = first_token(llm, prompt)
    used = llm.loop.executor.backend.used_memory
    awake, downs, ups, firsts, later = used(), list[float](), list[float](), list[float](), list[float]()
    for _ in range(REPEATS):
        downs.append(seconds(lambda: llm.sleep(1)))
        asleep = used()
        ups.append(seconds(llm.wake_up))
        took, again = first_token(llm, prompt)
        firsts.append(took)
        if again != answer:
            raise AssertionError("the sleep changed an answer")
        for _ in range(5):
            llm.reset_prefix_cache()
            later.append(first_token(llm, prompt)[0])
    return {
        "down_s": round(median(downs), 3), "up_s": round(median(ups), 3), "worst_up_s": round(max(ups), 3),
        "first_ms": round(1e3 * max(firsts), 2), "steady_ms": round(1e3 * median(later), 2),
        "first_to_steady": round(max(firsts) / median(later), 3),
        "gigabytes_given_back": round((awake - asleep) / 1e9, 2),
    }  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--parts", default=",".join(PARTS))
    flags.add_argument("--tiny", action="store_true", help="the bundled model on a CPU, with short prompts")
    flags.add_argument("--output", type=Path, default=RESULTS, help="the folder of what --save keeps")
    flags.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    args = flags.parse_args(words)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        flags.error(f"--parts are {', '.join(PARTS)}, not {min(unknown)}")
    if args.tiny:
        args.shape, args.device = BUNDLED, "cpu"
    figures = measure(args)
    for part, found in figures.items():
        print(part)
        for name, value in found.items():
            print(f"  {name:<20}{value:>12}" if not isinstance(value, str) else f"  {name}: {value}")
    if args.save:
        save(f"elastic_{args.shape}", figures, args.output)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of the parts in ``args.parts``."""
    facts, length = facts_of(args.device), 128 if args.tiny else 8192
    block_size = 16 if args.tiny else facts.block_size
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "device": args.device, "load_format": "dummy", "max_model_len": length + 2 * block_size,
            "block_size": block_size, "num_gpu_blocks_override": 3 * length // block_size, "max_num_seqs": 4,
            "skip_warmup": False, "boot_check": "quick",
        }  # fmt: skip

        def boot(**more: Any) -> LLM:
            return LLM(**engine_options(args.shape, given | more, Path(folder), tiny=args.tiny))

        figures = dict[str, dict[str, Any]]()
        for part in args.parts.split(","):
            if part == "update":
                figures[part] = measure_update(boot)
            elif part == "offload":
                figures[part] = measure_offload(boot, length, block_size)
            elif why := facts.rejected.get("enable_sleep_mode"):
                figures[part] = {"left out": why}
            else:
                figures[part] = measure_sleep(boot, length)
    return figures
