"""The memory of a served model, and the processor time of a server without requests.

    python -m benchmarks idle_server [--shape qwen3-0.6b] [--seconds 10] [--cache-mib 512] [--options JSON]

A checkpoint of random weights is written and served. After one request of 300 + 32 tokens the resident sets of the
server's processes are read, and their processor time over some seconds: the percent of one core. ``rest`` is the memory
of the engine's process beside weights and cache; memory that several processes share counts in each.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.process import ServerProcess, environment, serving
from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES, SHAPES
from preheat.model.files import BUNDLED_PATH

MIB = 2**20
PROC = Path("/proc")
PROMPT, ANSWER = 300, 32
MAX_MODEL_LEN = 2048
"""Tokens of the longest sequence; the model's own maximum needs a larger cache."""


def family(process: int) -> Iterator[int]:
    """Yield a process and all processes below it."""
    yield process
    for task in (PROC / str(process) / "task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def resident(process: int) -> int:
    """Return the bytes of a process's resident set."""
    return int((PROC / str(process) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    fields = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Return resident sets in MiB, the largest first, and the percent of a core that an idle server takes."""
    processes = list(family(server.process.pid))
    sets = sorted((resident(each) for each in processes), reverse=True)
    before = sum(map(processor_seconds, processes))
    time.sleep(seconds)
    busy = sum(map(processor_seconds, processes)) - before
    return {
        "resident_mib": [round(each / MIB) for each in sets],
        "idle_percent_of_a_core": round(busy / seconds * 100, 2),
    }


def ask(port: int) -> None:
    """Send one request and read its answer."""
    body = json.dumps({"prompt": [5] * PROMPT, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == ANSWER


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="qwen3-0.6b")
    flags.add_argument("--seconds", type=float, default=10.0)
    flags.add_argument("--cache-mib", type=int, default=512)
    flags.add_argument("--options", type=json.loads, default={}, help="of the server, as JSON")
    args = flags.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {"kv_cache_memory_bytes": args.cache_mib * MIB, "log_level": "error", "dtype": "bfloat16"}
        options["max_model_len"] = MAX_MODEL_LEN
        if args.shape in SHAPES:
            (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
            weights = write_checkpoint(SHAPES[args.shape], folder)
            options |= {"model": str(folder), "skip_tokenizer_init": True}
        else:
            weights = (BUNDLED_PATH / "model.safetensors").stat().st_size
        with serving(options | args.options, env=environment()) as server:
            ready = server.wait_for("/ready")
            ask(server.port)
            figures = {"shape": args.shape, "options": args.options, "ready_s": round(ready, 1)}
            figures |= measure(server, args.seconds)
    figures |= {"weights_mib": round(weights / MIB), "cache_mib": args.cache_mib}
    figures["rest_mib"] = figures["resident_mib"][0] - figures["weights_mib"] - args.cache_mib
    print(json.dumps(figures))
    print(save("idle_server", figures))
