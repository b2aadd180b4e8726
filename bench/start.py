"""Seconds from the command to the open port and to ready, and what is imported on the way.

    python bench/start.py [--runs 3] [--options '{"max_num_seqs": 16}']

Without warm-up (what the engine itself costs) and with it. One more boot lists the imports of both processes: nothing
may import transformers, and torch belongs to one process alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from _common import report


def boot(options: dict[str, Any], *, imports: bool = False) -> dict[str, Any]:
    """Serve once; seconds until anything answers and until ready, and the modules imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags = [flag if not flag.endswith("=True") else flag.removesuffix("=True") for flag in flags]
    command = [sys.executable, "-m", "preheat", "serve", "--port", str(port), "--log-level", "error", *flags]
    env = os.environ | ({"PYTHONPROFILEIMPORTTIME": "1"} if imports else {})
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        server = subprocess.Popen(command, stderr=log, env=env)
        answers = until(port, start, "/health")
        ready = until(port, start, "/ready")
        server.terminate()
        server.wait()
        log.seek(0)
        modules = [line.rsplit("|", 1)[-1].strip() for line in log.read().decode().splitlines() if "|" in line]
    found: dict[str, Any] = {"answers_s": round(answers, 2), "ready_s": round(ready, 2)}
    if imports:
        found["imports_of"] = {name: modules.count(name) for name in ("torch", "transformers", "starlette")}
    return found


def until(port: int, start: float, path: str) -> float:
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter() - start
        except OSError:
            pass
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={"max_num_seqs": 16, "max_num_batched_tokens": 1024})
    args = parser.parse_args()
    figures: dict[str, Any] = {"options": args.options}
    for name, more in (("without_warm_up", {"skip_warmup": True}), ("with_warm_up", {})):
        runs = [boot(args.options | more) for _ in range(args.runs)]
        figures[name] = {key: statistics.median(run[key] for run in runs) for key in ("answers_s", "ready_s")}
    figures["imports_of"] = boot(args.options | {"skip_warmup": True}, imports=True)["imports_of"]
    print(json.dumps(figures))
    print(report("start", figures))


if __name__ == "__main__":
    main()
