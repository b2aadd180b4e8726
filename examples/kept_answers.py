"""An equal request costs no step: python examples/kept_answers.py

Starts a server with the bundled model that keeps answers, and sends a long sampled request with a seed again and again.
Each second answer is computed live and compared, in a minute on two cores.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from typing import Any

ASKED = {"prompt": "class Stack:\n", "max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True}
OPTIONS = ["--num-threads=1", "--skip-warmup", "--boot-check=off", "--log-level=error"]
OPTIONS += ["--answer-cache-size=0.1", "--answer-cache-check-every=2"]


def ask(port: int, path: str = "/v1/completions", body: object = ASKED) -> bytes:
    """Return the body of an answer, empty while the server starts."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else b""
    except OSError:
        return b""


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "preheat", "serve", "bundled", f"--port={port}", *OPTIONS])
    answers: list[dict[str, Any]] = []
    try:
        while not ask(port, "/ready", None):
            time.sleep(0.1)
        for _ in range(6):
            began = time.monotonic()
            answers.append(json.loads(ask(port)))
            kept = answers[-1]["usage"].get("cached_answer", False)
            print(f"{'kept' if kept else 'live'}  {(time.monotonic() - began) * 1e3:8.1f} ms", flush=True)
        lines = ask(port, "/metrics", None).decode().splitlines()
        print("\n".join(line for line in lines if line.startswith("preheat:answer_cache_")))
    finally:
        server.terminate()
        server.wait()
    equal = all(each["choices"] == answers[0]["choices"] for each in answers)
    print("--- all answers are equal" if equal else "--- DIFFERENT")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
