"""Seconds from the command to the open port and to ready.

    python -m benchmarks start [--runs 3] [--options '{"max_num_seqs": 16}']

Without warm-up (the cost of the engine itself) and with it; the first boot of each is left out, as it leaves the others
its store. `preheat generate` of one token is compared with importing torch alone. One more boot lists the imports of
both processes: nothing may import transformers, and torch belongs to one process alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common.process import environment, serving
from benchmarks.common.report import parser, save


def boot(options: dict[str, Any], *, imports: bool = False) -> dict[str, Any]:
    """Serve once and time the start.

    Returns seconds until anything answers and until ready, and counts of imported modules.
    """
    env = os.environ | ({"PYTHONPROFILEIMPORTTIME": "1"} if imports else {})
    with tempfile.TemporaryFile() as log:
        with serving(options | {"log_level": "error"}, stderr=log, env=env) as server:
            answers, ready = server.wait_for("/health"), server.wait_for("/ready")
        log.seek(0)
        modules = [line.rsplit("|", 1)[-1].strip() for line in log.read().decode().splitlines() if "|" in line]
    found: dict[str, Any] = {"answers_s": round(answers, 2), "ready_s": round(ready, 2)}
    if imports:
        found["imports_of"] = {name: modules.count(name) for name in ("torch", "transformers", "starlette")}
    return found


def seconds(command: list[str]) -> float:
    """Return the seconds of ``command`` in a Python process of its own."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], env=environment(), capture_output=True, check=True)
    return round(time.perf_counter() - began, 2)


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--runs", type=int, default=3)
    flags.add_argument("--options", type=json.loads, default={})
    args = flags.parse_args(words)
    figures: dict[str, Any] = {"options": args.options}
    for name, more in (("without_warm_up", {"skip_warmup": True}), ("with_warm_up", {})):
        runs = [boot(args.options | more) for _ in range(1 + args.runs)][1:]
        figures[name] = {key: statistics.median(run[key] for run in runs) for key in ("answers_s", "ready_s")}
    generate = ["-m", "preheat", "generate", "--prompt", "def", "--max-tokens", "1"]
    figures["one_token_s"], figures["import_torch_s"] = (
        statistics.median(seconds(command) for _ in range(args.runs)) for command in (generate, ["-c", "import torch"])
    )
    figures["imports_of"] = boot(args.options | {"skip_warmup": True}, imports=True)["imports_of"]
    print(json.dumps(figures))
    print(save("start", figures))
