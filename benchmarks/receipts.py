"""Receipts: answers replayed on another boot and with other ranks, and the cost of digests.

    python -m benchmarks receipts [--answers 1000] [--tokens 16] [--rows 1 256] [--seed 0]

A server with ``--receipts-log`` answers requests of all kinds of ``benchmarks chaos``. ``preheat replay`` gives each
answer again on a boot of its own with one rank, and on one with two. A server with two ranks then answers, and one rank
replays. The cost is the time of a batch with receipts over the time without, in turns, the least of each.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos import mixed, normal, together
from benchmarks.common.process import environment, flags, serving
from benchmarks.common.report import parser, save

AT_ONCE, TURNS = 32, 15
ENGINE: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64, "tp_invariant": True,
    "execution_mode": "eager", "skip_warmup": True, "boot_check": "off", "log_level": "error",
    "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip


def answered(log: Path, answers: int, tokens: int, seed: int, ranks: int) -> None:
    """Answer requests with receipts by a server with ``ranks``, into ``log``."""
    options = ENGINE | {"model": "bundled", "receipts_log": str(log), "receipts": True, "tensor_parallel_size": ranks}
    asked = mixed(answers, seed, None, tokens)
    with serving(options, env=environment(), stderr=subprocess.DEVNULL) as server:
        server.wait_for("/ready")
        for start in range(0, answers, AT_ONCE):
            found = asyncio.run(together(server.port, asked[start : start + AT_ONCE]))
            assert {normal(each)["status"] for each in found} == {"200"}


def replayed(log: Path, ranks: int) -> dict[str, Any]:
    """Return how many receipts of ``log`` an engine with ``ranks`` gives again."""
    words = [*flags(ENGINE | {"receipts_log": str(log), "tensor_parallel_size": ranks})]
    words = [word for word in words if "tool" not in word]
    began = time.monotonic()
    command = [sys.executable, "-m", "preheat", "replay", "bundled", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    equal = sum(line["position"] is None for line in lines)
    differing = [line for line in lines if line["position"] is not None][:10]
    return {"receipts": len(lines), "equal": equal, "tokens": sum(line["positions"] for line in lines),
            "seconds": round(time.monotonic() - began, 1), "differing": differing}  # fmt: skip


def cost(rows: int, tokens: int = 64) -> dict[str, Any]:
    """Return the time of a batch of ``rows`` with receipts and without, in turns."""
    from preheat import LLM, SamplingParams

    llm = LLM("bundled", num_threads=1, max_num_seqs=rows, max_model_len=256, boot_check="off", skip_warmup=True)
    prompts: list[Any] = [{"prompt_token_ids": [5 + row % 200, 7]} for row in range(rows)]
    best = dict.fromkeys((False, True), float("inf"))
    for turn in range(2 * TURNS):
        receipt = turn % 2 == 1
        params = SamplingParams(temperature=1, seed=1, max_tokens=tokens, ignore_eos=True, receipt=receipt)
        began = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        best[receipt] = min(best[receipt], time.process_time() - began)
    plain, receipts = (best[each] * 1e3 / tokens for each in (False, True))
    percent = round((receipts / plain - 1) * 100, 2)
    return {"rows": rows, "plain_ms": round(plain, 3), "receipt_ms": round(receipts, 3), "percent": percent}


def main(words: Sequence[str]) -> None:
    flag = parser(__doc__, __name__)
    flag.add_argument("--answers", type=int, default=1000)
    flag.add_argument("--tokens", type=int, default=16)
    flag.add_argument("--rows", type=int, nargs="*", default=[1, 256])
    flag.add_argument("--seed", type=int, default=0)
    args = flag.parse_args(words)
    figures: dict[str, Any] = {"answers": args.answers, "tokens": args.tokens, "seed": args.seed, "replays": {}}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, others in ((1, (1, 2)), (2, (1,))):
            if args.answers:
                log = Path(folder) / f"of_{ranks}"
                answered(log, args.answers, args.tokens, args.seed, ranks)
                for other in others:
                    figures["replays"][f"{ranks} to {other}"] = found = replayed(log, other)
                    print(f"answers of {ranks} ranks by {other}:", found, flush=True)
    figures["cost"] = [cost(rows) for rows in args.rows]
    print(json.dumps(figures))
    print(save("receipts", figures))
    if any(each["equal"] < each["receipts"] or not each["receipts"] for each in figures["replays"].values()):
        sys.exit(1)
