"""One server reads prompts, another decodes: python examples/prefill_decode_proxy.py

Starts a server of each role with the bundled model, and this proxy before them. Sends a long prompt through the proxy,
and compares the answer with the one of a server that does both, in a minute on two cores.

With --prefill HOST:PORT and --decode HOST:PORT (each may be repeated) it is only the proxy, on --port. A client, or
llm-d's scheduler, may choose the servers by the headers x-prefiller-host-port and x-data-parallel-host-port.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFILLER, DECODER = "x-prefiller-host-port", "x-data-parallel-host-port"
ONE_TOKEN = {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
ONLY_DECODE = "stream_options min_tokens max_completion_tokens best_of receipt logprobs top_logprobs".split()
MOST_BYTES = 1 << 24
PROMPT = "def add(a, b):\n    return a + b\n\n" * 24


@contextlib.contextmanager
def post(address: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """Send ``body`` to the server at ``address``, and yield its answer."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()


def prefilled(address: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Have the server at ``address`` read the prompt. Return the parameters to decode with, None if it fails."""
    asked = {name: value for name, value in body.items() if name not in ONLY_DECODE}
    try:
        with post(address, path, asked | ONE_TOKEN) as answer:
            found = json.load(answer) if answer.status == 200 else {}
    except (OSError, http.client.HTTPException, ValueError):
        return None  # the decoding server reads the prompt itself
    params: dict[str, Any] | None = found.get("kv_transfer_params")
    return params


class Proxy(ThreadingHTTPServer):
    """A proxy before ``prefill`` and ``decode`` servers, which take turns."""

    daemon_threads = True

    def __init__(self, port: int, prefill: Sequence[str], decode: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.servers = {PREFILLER: prefill, DECODER: decode}
        self._turns = {name: itertools.cycle(servers) for name, servers in self.servers.items()}

    def choose(self, name: str, asked: str | None) -> str | None:
        """Return the server that the header ``name`` asks for, else the next one; None for an unknown server."""
        return next(self._turns[name]) if asked is None else asked if asked in self.servers[name] else None


class Handler(BaseHTTPRequestHandler):
    """A request: the prompt goes to one server, the answer comes from another."""

    server: Proxy

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        prefiller, decoder = (self.server.choose(name, self.headers.get(name)) for name in (PREFILLER, DECODER))
        if not 0 < size <= MOST_BYTES or prefiller is None or decoder is None:
            self.send_error(400, f"send a body of at most {MOST_BYTES} bytes, and name known servers")
            return
        body = json.loads(self.rfile.read(size))
        params = prefilled(prefiller, self.path, body)
        more = {} if params is None else {"kv_transfer_params": params}
        with post(decoder, self.path, body | more) as answer:
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """Run a server with the bundled model, and yield its address once it is ready."""
    port = free_port()
    usual = [f"--port={port}", "--num-threads=1", "--block-size=64", "--log-level=warning"]
    server = subprocess.Popen([sys.executable, "-m", "preheat", "serve", "bundled", *usual, *options])
    try:
        while True:
            waiting = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.suppress(OSError), contextlib.closing(waiting):
                waiting.request("GET", "/ready")
                if waiting.getresponse().status == 200:
                    break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def proxying(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """Run a proxy in a thread, and yield its address."""
    proxy = Proxy(0, prefill, decode)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def demo() -> int:
    """Compare the answer of two servers with the answer of one."""
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    with serving("--role=prefill") as prefill, serving("--role=decode") as decode:
        print("--- one server reads the prompt and decodes")
        with post(prefill, "/v1/completions", body) as answer:
            alone = json.load(answer)["choices"][0]["text"]
        print(alone)
        with proxying([prefill], [decode]) as proxy:
            print("--- one server reads the prompt, another decodes")
            with post(proxy, "/v1/completions", body) as answer:
                found = json.load(answer)
        print(found["choices"][0]["text"])
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(f"--- {cached} of {found['usage']['prompt_tokens']} tokens of the prompt came from the other server")
    same = found["choices"][0]["text"] == alone
    print("--- equal, character by character" if same else "--- DIFFERENT")
    return int(not same or not cached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--decode", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=8192)
    asked = parser.parse_args()
    if not asked.prefill and not asked.decode:
        return demo()
    if not (asked.prefill and asked.decode):
        parser.error("give --prefill and --decode, or neither for the demo")
    with contextlib.suppress(KeyboardInterrupt):
        Proxy(asked.port, asked.prefill, asked.decode).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
