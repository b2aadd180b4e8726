"""One server reads prompts and another decodes: every answer must equal the answer of one server.

    python -m benchmarks roles [--requests 60] [--prefill-ranks 1] [--decode-ranks 1] [--seed 0] [--options JSON]

Two servers of the bundled model run on this machine alone. Requests of all kinds of ``benchmarks chaos``, with longer
prompts, are answered by the first server as a whole. Then the first server reads each prompt again, and the second
server pulls its blocks and answers. Text, tokens, log-probabilities, arguments, ends, ids and usage are compared. Each
prompt begins with a number of its own, so no block is found in the cache of the second server.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.adapter import write_adapter
from benchmarks.common.crowd import ADAPTER, CHAT, Asked, metric, mixed, normal, together
from benchmarks.common.process import environment, serving
from benchmarks.common.report import parser, save
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config

AT_ONCE = 16
_TEXT = "def add(a, b):\n    return a + b\n\n"
_NOT_READ = ("stream", "stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs")


def longer(asked: Asked, number: int) -> Asked:
    """Return a request with a prompt of a few hundred tokens, which begins with ``number``."""
    text, body = f"# {number}\n" + _TEXT * (3 + number % 11), dict(asked.body)
    if asked.path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text + body["prompt"]
    return replace(asked, body=body)


def reading(asked: Asked) -> Asked:
    """Return the request that has a prompt read for another server."""
    body = {name: value for name, value in asked.body.items() if name not in _NOT_READ}
    more = {"max_tokens": 1, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
    return replace(asked, body=body | more)


def transferred(first: int, second: int, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return the answers of the server at ``second``, which pulls blocks from the one at ``first``."""
    told = asyncio.run(together(first, [reading(each) for each in asked]))
    params = [json.loads(each.raw.partition(b"\r\n\r\n")[2])["kv_transfer_params"] for each in told]
    pulling = [
        replace(each, body=each.body | {"kv_transfer_params": one}) for each, one in zip(asked, params, strict=True)
    ]
    return list(map(normal, asyncio.run(together(second, pulling))))


def compared(first: int, second: int, asked: Sequence[Asked]) -> dict[str, Any]:
    """Return the figures of all requests, in groups of :data:`AT_ONCE`."""
    differing, began = list[dict[str, Any]](), time.monotonic()
    for start in range(0, len(asked), AT_ONCE):
        group = asked[start : start + AT_ONCE]
        expected = list(map(normal, asyncio.run(together(first, group))))
        found = transferred(first, second, group)
        for at, (each, want, got) in enumerate(zip(group, expected, found, strict=True), start):
            if want != got or want["status"] != "200":
                differing.append({"request": at, "kind": each.kind, "expected": want, "got": got})
    names = ("pulls", "received_blocks", "received_bytes", "pull_seconds", "failures")
    figures = {name: metric(second, f"kv_transfer_{name}_total") for name in names}
    return {"requests": len(asked), "seconds": time.monotonic() - began, **figures, "differing": differing}


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--requests", type=int, default=60)
    flags.add_argument("--prefill-ranks", type=int, default=1)
    flags.add_argument("--decode-ranks", type=int, default=1)
    flags.add_argument("--tokens", type=int, default=24)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--options", type=json.loads, default={}, help="of both servers, as JSON")
    args = flags.parse_args(words)
    asked = [longer(each, at) for at, each in enumerate(mixed(args.requests, args.seed, ADAPTER, args.tokens))]
    shared = {
        "model": "bundled", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64, "block_size": 16,
        "tp_invariant": True, "log_level": "error", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
        "execution_mode": "eager", "kv_offloading_size": 0.1, "enable_lora": True, **args.options,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        modules = adapted_modules(read_spec(read_config(BUNDLED_PATH)))
        write_adapter(
            Path(folder), {name: size for name, size in modules.items() if name.endswith(("q_proj", "v_proj"))}
        )
        shared |= {"lora_modules": [f"{ADAPTER}={folder}"]}
        one, other = (
            shared | {"role": role, "tensor_parallel_size": ranks}
            for role, ranks in (("prefill", args.prefill_ranks), ("decode", args.decode_ranks))
        )
        quiet = partial(serving, env=environment(), stderr=subprocess.DEVNULL)
        with quiet(one) as first, quiet(other) as second:
            for server in (first, second):
                server.wait_for("/ready")
            figures = compared(first.port, second.port, asked)
    ranks = {"prefill": args.prefill_ranks, "decode": args.decode_ranks}
    print(
        f"{figures['requests']} requests, {ranks['prefill']} to {ranks['decode']} ranks: "
        f"{figures['received_blocks']:.0f} blocks pulled, {figures['failures']:.0f} pulls failed, "
        f"{len(figures['differing'])} answers differ"
    )
    print(save(f"roles_{ranks['prefill']}_to_{ranks['decode']}", figures | {"ranks": ranks, "seed": args.seed}))
    if figures["differing"] or figures["failures"] or not figures["pulls"]:
        sys.exit(1)
