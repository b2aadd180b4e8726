"""Tokens a second against transformers' generate.

    python -m benchmarks vs_transformers [--runs 5] [--dtype bfloat16] [--threads 2] [--loads batch_1]

Both have the same model, dtype, threads and machine, in one run. Greedy, end-of-sequence ignored, so that both sides
generate exactly the tokens asked for. Loads: one sequence; 32 of equal lengths; 32 of ragged lengths, 16-256 in and
16-256 out; and 128 such, at most 32 at a time. transformers takes batches of up to 32 as they come, pads the prompts on
the left and runs until the longest output is done; only the tokens asked for count. The two take turns; medians are
reported, by the clock and by the processor time of the process. Processor time says more while others use the machine.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.report import parser, save
from preheat import LLM, SamplingParams
from preheat.model.files import find_checkpoint

FLOORS = {"batch_1": 1.5, "32_equal": 1.5, "32_ragged": 2.5, "128_ragged_32_at_a_time": 3.0}
SEATS = 32


@dataclass(frozen=True)
class TokenLoad:
    """``prompts[i]`` is to be continued by ``outputs[i]`` tokens."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.outputs)


Run = Callable[[TokenLoad], None]


def make_loads(vocab_size: int) -> dict[str, TokenLoad]:
    draw = random.Random(0)

    def load(lengths: list[tuple[int, int]]) -> TokenLoad:
        prompts = [[draw.randrange(vocab_size // 2, vocab_size) for _ in range(inputs)] for inputs, _ in lengths]
        return TokenLoad(prompts, [outputs for _, outputs in lengths])

    return {
        "batch_1": load([(64, 128)]),
        "32_equal": load([(128, 128)] * 32),
        "32_ragged": load([(draw.randint(16, 256), draw.randint(16, 256)) for _ in range(SEATS)]),
        "128_ragged_32_at_a_time": load([(draw.randint(16, 256), draw.randint(16, 256)) for _ in range(4 * SEATS)]),
    }


def make_preheat(model: str, dtype: str, threads: int, options: dict[str, Any]) -> Run:
    """Return a run of preheat.

    With prefix caching, every run but the first would find its prompts in the cache.
    """
    asked = {"enable_prefix_caching": False, "max_num_seqs": SEATS} | options
    llm = LLM(model, dtype=dtype, num_threads=threads, **asked)

    def run(load: TokenLoad) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in load.outputs]
        results = llm.generate(load.prompts, params, use_tqdm=False)
        assert [len(result.outputs[0].token_ids) for result in results] == load.outputs

    return run


def make_transformers(model: str, dtype: str) -> tuple[Run, int]:
    hf = AutoModelForCausalLM.from_pretrained(find_checkpoint(model, None), dtype=getattr(torch, dtype)).eval()  # type: ignore[no-untyped-call]
    hf.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(load: TokenLoad) -> None:
        for at in range(0, len(load.prompts), SEATS):
            prompts, steps = load.prompts[at : at + SEATS], max(load.outputs[at : at + SEATS])
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            out = hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
            assert out.shape == (len(ids), longest + steps)

    return run, hf.config.vocab_size


def seconds(run: Run, load: TokenLoad) -> tuple[float, float]:
    """Return the seconds by the clock, and of processor time."""
    start, busy = time.perf_counter(), time.process_time()
    run(load)
    return time.perf_counter() - start, time.process_time() - busy


def compare(ours: Run, theirs: Run, load: TokenLoad, runs: int) -> dict[str, object]:
    for run in (ours, theirs):
        run(load)
    times = [(seconds(ours, load), seconds(theirs, load)) for _ in range(runs)]
    mine, other = (load.tokens / statistics.median(wall for wall, _ in column) for column in zip(*times, strict=True))
    busy, their_busy = (statistics.median(cpu for _, cpu in column) for column in zip(*times, strict=True))
    return {
        "preheat_tokens_per_s": round(mine, 1),
        "transformers_tokens_per_s": round(other, 1),
        "ratio": round(mine / other, 2),
        "processor_time_ratio": round(their_busy / busy, 2),
        "preheat_seconds": [round(a, 4) for (a, _), _ in times],
        "transformers_seconds": [round(b, 4) for _, (b, _) in times],
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--runs", type=int, default=5)
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--model", default="bundled")
    flags.add_argument("--options", type=json.loads, default={}, help="more of preheat's, as JSON")
    flags.add_argument("--loads", nargs="+", choices=FLOORS, default=list(FLOORS))
    flags.add_argument("--name", default="", help="added to the name of the result's file")
    args = flags.parse_args(words)
    theirs, vocab_size = make_transformers(args.model, args.dtype)
    ours = make_preheat(args.model, args.dtype, args.threads, args.options)
    torch.set_num_threads(args.threads)
    figures: dict[str, object] = vars(args).copy()
    loads = make_loads(vocab_size)
    for name in args.loads:
        load = loads[name]
        figures[name] = result = {**compare(ours, theirs, load, args.runs), "floor": FLOORS[name]}
        print(name, json.dumps(result))
    print(save(f"vs_transformers_{args.dtype}{args.name}", figures))
