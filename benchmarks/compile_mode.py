"""Execution mode `compile` against `eager` on this CPU.

    python -m benchmarks compile_mode [--dtype float32 bfloat16] [--steps 100] [--threads 1]

Decode steps of the bundled model, whole and without the sampler: medians in microseconds at 1, 8 and 32 rows. The modes
take turns step by step, so that other work of the machine disturbs both alike. Also the seconds and the number of
compilations of the first steps.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.report import parser, save
from preheat import LLM, SamplingParams
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.utils.dynamo import compilations, compile_seconds

ROWS = (1, 8, 32)
CONTEXT = 64


def decode_batch(llm: LLM, rows: int) -> InputBatch:
    """Return a real step of ``rows`` decoding sequences.

    It is caught on its way to the executor.
    """
    packed: list[InputBatch] = []
    pack = llm.loop.packer.pack

    def keep(schedule: Any) -> InputBatch:
        batch: InputBatch = pack(schedule)
        packed.append(batch)
        return batch

    llm.loop.packer.pack = keep  # type: ignore[method-assign]
    prompts = [[5 + row] * CONTEXT for row in range(rows)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.loop.packer.pack = pack  # type: ignore[method-assign]
    return next(
        batch for batch in reversed(packed) if batch.bucket.phase == "decode" and len(batch.sampled_rows) == rows
    )


def measure(executors: dict[str, Executor], batches: dict[str, InputBatch], steps: int) -> dict[str, dict[str, float]]:
    """Return the median microseconds of a step by mode.

    The forward pass is also timed alone.
    """
    spent: dict[str, dict[str, list[float]]] = {mode: {"step": [], "forward": []} for mode in executors}
    for _ in range(steps):
        for mode, executor in executors.items():
            batch = batches[mode]
            begin = time.perf_counter()
            executor.execute(batch)
            spent[mode]["step"].append(time.perf_counter() - begin)
            with torch.inference_mode():
                begin = time.perf_counter()
                executor.forward(batch)
                spent[mode]["forward"].append(time.perf_counter() - begin)
    return {
        mode: {part: round(statistics.median(times) * 1e6) for part, times in parts.items()}
        for mode, parts in spent.items()
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--threads", type=int, default=1)
    args = flags.parse_args(words)
    figures: dict[str, Any] = {"steps": args.steps, "rows": {}}
    for dtype in args.dtype:
        llms = {
            mode: LLM(execution_mode=mode, dtype=dtype, num_threads=args.threads, max_num_seqs=max(ROWS))
            for mode in ("eager", "compile")
        }
        for rows in ROWS:
            count, seconds = compilations(), compile_seconds()
            batches = {mode: decode_batch(llm, rows) for mode, llm in llms.items()}
            executors: dict[str, Any] = {mode: llm.loop.executor for mode, llm in llms.items()}
            for mode, executor in executors.items():
                executor.execute(batches[mode])
            built = {"compilations": compilations() - count, "compile_seconds": round(compile_seconds() - seconds, 2)}
            figures["rows"][f"{dtype} {rows}"] = {**measure(executors, batches, args.steps), **built}
            print(dtype, rows, json.dumps(figures["rows"][f"{dtype} {rows}"]), flush=True)
    save("compile_mode", figures)
