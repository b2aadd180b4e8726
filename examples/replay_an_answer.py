"""An answer is given again from its receipt, on another boot: python examples/replay_an_answer.py

Starts a server with the bundled model, and asks for a sampled answer with a receipt. Ends the server. `preheat replay`
gives the answer again and compares every logit. Then the seed in the receipt is changed, and the replay names the first
token that differs, in a minute on two cores.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ASKED = {"prompt": "class Stack:\n", "max_tokens": 40, "temperature": 0.8, "receipt": True}
OPTIONS = ["--num-threads=1", "--skip-warmup", "--boot-check=off", "--log-level=error"]
PREHEAT = [sys.executable, "-m", "preheat"]


def ask(port: int) -> dict[str, Any]:
    """Return the server's answer, once it is ready."""
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(ASKED))
            answer = connection.getresponse()
            if answer.status == 200:
                return dict(json.load(answer))
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def replay(receipt: dict[str, Any], path: Path) -> int:
    """Replay a receipt on a boot of its own; the status is 0 if every logit is equal."""
    path.write_text(json.dumps(receipt))
    return subprocess.run([*PREHEAT, "replay", "bundled", f"--receipt={path}", *OPTIONS], check=False).returncode


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*PREHEAT, "serve", "bundled", f"--port={port}", *OPTIONS])
    try:
        choice = ask(port)["choices"][0]
    finally:
        server.terminate()
        server.wait()
    print("--- an answer, sampled without a seed\n" + choice["text"])
    receipt = choice["receipt"]
    print(f"--- its receipt ends with the chain {receipt['chain']}\n--- replayed on another boot")
    with tempfile.TemporaryDirectory() as folder:
        equal = replay(receipt, Path(folder) / "receipt.json")
        receipt["request"]["seed"] += 1
        print("--- replayed with another seed")
        other = replay(receipt, Path(folder) / "receipt.json")
    return int(equal != 0 or other == 0)


if __name__ == "__main__":
    sys.exit(main())
