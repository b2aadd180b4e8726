"""Requests at the limits of each endpoint, for the test and the benchmark that time /health meanwhile.

A row is one request as bytes, and the statuses that may answer it. To add a request, add a row to :data:`ROWS`.
``server`` names the row's server in :data:`SERVERS`. :mod:`tests.api.hostile_files` writes the files that servers read.
``python -m tests.api.abuse PORT`` times /health until its input ends.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import msgspec

from preheat.server.replicas.relay_wire import GENERATE, MEDIA
from tests.api import hostile_files
from tests.api.conftest import Server, serving

KEY = "operator"
ROOM = 2**10
"""Bytes for the fields around a value."""

SHORT = "tests.api.scripted:run_engine"
ROOMY = "tests.api.scripted:run_roomy_engine"

_COMMON: dict[str, Any] = {"model": "bundled", "api_key": [KEY], "server_dev_mode": True}
_SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_threads": 1, "engine": None}
_SMALL |= {"dtype": "float32", "skip_warmup": True}


def _of_images(folder: Path) -> dict[str, Any]:
    return {**_COMMON, "engine": SHORT, "model": hostile_files.seeing_model(folder / "model")}


def _of_adapters(folder: Path) -> dict[str, Any]:
    hostile_files.adapters(folder / "adapters")
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "allow_runtime_lora_updating": True}
    return {**_COMMON, **_SMALL, **lora, "lora_root": str(folder / "adapters")}


def _of_weights(folder: Path) -> dict[str, Any]:
    hostile_files.weights(folder / "weights", folder / "outside")
    return {**_COMMON, **_SMALL, "weights_root": str(folder / "weights")}


SERVERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda _: {**_COMMON, "engine": SHORT, "enable_prompt_embeds": True, "weights_root": "/tmp"},
    "roomy": lambda _: {**_COMMON, "engine": ROOMY},
    "pooling": lambda _: {**_COMMON, "engine": SHORT, "runner": "pooling"},
    "images": _of_images,
    "adapters": _of_adapters,
    "weights": _of_weights,
}
"""Options of each server.

Each function writes the server's files into an empty folder. A scripted engine answers, so that the server alone is
measured. The real engine reads adapters and weights.
"""


@contextlib.contextmanager
def abused(name: str, **more: Any) -> Iterator[Server]:
    """Run the server ``name`` of :data:`SERVERS`, with ``more`` options."""
    with tempfile.TemporaryDirectory(prefix="abused-") as folder:
        options = SERVERS[name](Path(folder)) | more
        with serving(options.pop("model"), **options) as server:
            yield server


@dataclass(frozen=True)
class Row:
    """Request at the limits of an endpoint.

    ``payload`` makes the bytes of a request to ``path``, given the largest size of its body. ``statuses`` may answer
    it.
    """

    path: str
    payload: Callable[[int], bytes]
    statuses: frozenset[int]
    server: str = "plain"


def http(path: str, data: bytes, media: str = "application/json") -> bytes:
    """Return the bytes of a POST request with this body."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {media}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _json(path: str, fields: Callable[[int], dict[str, Any]], *statuses: int, server: str = "plain") -> Row:
    def payload(limit: int) -> bytes:
        return http(path, json.dumps(fields(limit - ROOM), separators=(",", ":")).encode())

    return Row(path, payload, frozenset(statuses or (400,)), server)


def _relayed(fields: Callable[[int], Any]) -> Row:
    """Return a row of a body in a front's form."""

    def payload(limit: int) -> bytes:
        return http(GENERATE, msgspec.msgpack.encode(fields(limit - ROOM)), MEDIA)

    return Row(GENERATE, payload, frozenset((400,)))


def _many(path: str, before: str, item: str, after: str, *statuses: int, server: str = "plain") -> Row:
    """Return a row with a body of as many copies of ``item`` as fit."""

    def payload(limit: int) -> bytes:
        count = (limit - len(before) - len(after)) // (len(item) + 1)
        return http(path, (before + ",".join([item] * count) + after).encode())

    return Row(path, payload, frozenset(statuses or (400,)), server)


@cache
def text(length: int) -> str:
    """Return text of varied words, so that a tokenizer's cache does not help."""
    draw = random.Random(length)
    common = "the a def return if for in of to".split()
    words = " ".join(f"{draw.choice(common)} word{draw.randrange(10**6)}" for _ in range(5000))
    return (words * (length // len(words) + 1))[:length]


def _tensor_file(shape: bytes, before: bytes = b"", entries: int = 0) -> str:
    """Return a file of ``torch.save`` with these pickle bytes in place of the tensor's shape."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + before + shape
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a/data.pkl", pickle + b"(K\x01K\x01t\x89ccollections\nOrderedDict\n)RtR.")
        for number in range(entries):
            archive.writestr(f"a/{number}", b"")
    return base64.b64encode(made.getvalue()).decode()


def _embeds(**parts: Any) -> Row:
    return _json("/v1/completions", lambda _: {"prompt_embeds": _tensor_file(**parts)})


def _said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _calls(size: int) -> dict[str, Any]:
    """Return a conversation with a tool call.

    The call's arguments are many lists, as text.
    """
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":[' + "[1]," * (size // 5) + "1]}"},
    }
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, *_said("x")]}


def _pictures(urls: Callable[[int], list[str]], *statuses: int) -> Row:
    """Return a row whose conversation holds images.

    ``urls`` makes the URLs, given their size.
    """

    def fields(size: int) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls(size)]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}

    return _json(CHAT, fields, *statuses, server="images")


def _adapter(name: str) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": name, "load_inplace": True}


COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, EMBEDDINGS = "/v1/messages/count_tokens", "/tokenize", "/v1/embeddings"

LOAD = "/v1/load_lora_adapter"
WIDEST = hostile_files.WIDEST

REFUSED, TAKEN = (400,), (200,)
ADAPTERS = dict.fromkeys((*hostile_files.CONFIGS, "fifo", "endless", "names"), REFUSED) | {"whole": TAKEN}
ADAPTERS |= {"huge": TAKEN, "layers": TAKEN, "patterns": (200, 400)}
WEIGHTS = dict.fromkeys(("link", "fifo", "endless", "index", "index_long", "names", "cut"), REFUSED) | {"whole": TAKEN}
"""Statuses that answer a request to load each folder of :mod:`tests.api.hostile_files`."""

ROWS: dict[str, Row] = {
    # texts
    "completions_text": _json(COMPLETIONS, lambda size: {"prompt": text(size)}),
    "completions_cut": _json(COMPLETIONS, lambda size: {"prompt": text(size), "truncate_prompt_tokens": 5}),
    "completions_fits": _json(COMPLETIONS, lambda _: {"prompt": text(10**6), "max_tokens": 1}, 200, server="roomy"),
    "chat_text": _json(CHAT, lambda size: {"messages": _said(text(size))}),
    "batch_text": _json(f"{CHAT}/batch", lambda size: {"messages": [_said(text(size))]}),
    "batch_many": _json(f"{CHAT}/batch", lambda size: {"messages": [_said("x")] * (size // 40)}),
    "responses_text": _json(RESPONSES, lambda size: {"input": text(size)}),
    "messages_text": _json(MESSAGES, lambda size: {"max_tokens": 1, "messages": _said(text(size))}),
    "count_tokens_text": _json(COUNT, lambda size: {"messages": _said(text(size))}),
    "count_tokens_fits": _json(COUNT, lambda _: {"messages": _said(text(600_000))}, 200),
    "tokenize_text": _json(TOKENIZE, lambda size: {"prompt": text(size)}),
    "tokenize_spaces": _json(TOKENIZE, lambda size: {"prompt": " " * size}, 200, 400),
    "tokenize_fits": _json(TOKENIZE, lambda _: {"prompt": text(600_000), "return_token_strs": True}, 200),
    "embeddings_text": _json(EMBEDDINGS, lambda size: {"input": text(size)}, server="pooling"),
    "embeddings_cut": _json(
        EMBEDDINGS, lambda size: {"input": text(size), "truncate_prompt_tokens": -1}, server="pooling"
    ),
    "embeddings_texts": _json(EMBEDDINGS, lambda _: {"input": [text(7_000)] * 300}, 200, server="pooling"),
    "score_texts": _json("/score", lambda _: {"text_1": "x", "text_2": [text(500)] * 5_000}, server="pooling"),
    "rerank_texts": _json("/rerank", lambda _: {"query": "x", "documents": [text(500)] * 5_000}, server="pooling"),
    "lists_of_prompts": _json(
        COMPLETIONS, lambda _: {"prompt": [text(8_000)] * 200, "max_tokens": 1}, 200, server="roomy"
    ),
    "stop": _json(COMPLETIONS, lambda size: {"prompt": "x", "stop": [text(size)]}),
    "bad_words": _json(COMPLETIONS, lambda size: {"prompt": "x", "bad_words": [text(size)]}),
    "bad_words_many": _json(
        COMPLETIONS,
        lambda _: {"prompt": [[1, 2]] * 200, "bad_words": [f"word{n}" for n in range(1_000)], "max_tokens": 1},
        200,
    ),
    "field_name": _json(COMPLETIONS, lambda size: {"prompt": "x", text(size): 1, "max_tokens": 1}, 200),
    "model_name": _json(COMPLETIONS, lambda size: {"prompt": "x", "model": text(size)}),
    "weights_path": _json("/update_weights", lambda size: {"path": text(size)}),
    # many values
    "prompts_of_one_id": _many(COMPLETIONS, '{"prompt":[', "[1]", "]}"),
    "ids": _many(COMPLETIONS, '{"prompt":[', "7", "]}"),
    "ids_generated": _many(GENERATE, '{"token_ids":[', "7", "]}"),
    "relayed_bytes": _relayed(lambda size: b"x" * size),
    "relayed_lists": _relayed(lambda size: [[]] * (size // 2)),
    "ids_cut": _json(COMPLETIONS, lambda _: {"prompt": [7] * 10**6, "truncate_prompt_tokens": 5, "max_tokens": 1}, 200),
    "ids_allowed": _json(COMPLETIONS, lambda _: {"prompt": [1, 2], "allowed_token_ids": [7] * 10**6}),
    "long_integers": _many(COMPLETIONS, '{"prompt":[', "9" * 600, "]}"),
    "logit_bias": _json(COMPLETIONS, lambda _: {"prompt": "x", "logit_bias": dict.fromkeys(range(300_000), 1)}),
    "inputs": _many(EMBEDDINGS, '{"input":[', "[1]", "]}", server="pooling"),
    "documents": _many("/rerank", '{"query":"x","documents":[', '""', "]}", server="pooling"),
    "classified": _many("/classify", '{"input":[', '""', "]}", server="pooling"),
    "embedded": _many("/embed", '{"inputs":[', '""', "]}", server="pooling"),
    "embedded tokens": _many("/embed_all", '{"inputs":[', '""', "]}", server="pooling"),
    "embedded sparsely": _many("/embed_sparse", '{"inputs":[', '""', "]}", server="pooling"),
    "compared": _many("/similarity", '{"inputs":{"source_sentence":"a","sentences":[', '""', "]}}", server="pooling"),
    "decoded": _many("/decode", '{"ids":[', "1", "]}", server="pooling"),
    "embedded at the root": _many("/", '{"inputs":[', '""', "]}", server="pooling"),
    "predicted": _many("/predict", '{"inputs":[', '""', "]}", server="pooling"),
    "texts": _many("/score", '{"text_1":"x","text_2":[', '""', "]}", server="pooling"),
    "chat_messages": _many(CHAT, '{"messages":[', '{"role":"user","content":"x"}', "]}"),
    "chat_messages_fit": _json(CHAT, lambda _: {"messages": _said("x") * 60_000}),
    "chat_fits": _json(CHAT, lambda _: {"messages": _said("x") * 20_000, "max_tokens": 1}, 200, server="roomy"),
    "chat_nulls": _json(
        CHAT, lambda _: {"x": None, "messages": [{"role": "user", "content": "x", "y": None}] * 60_000}
    ),
    "chat_parts": _many(CHAT, '{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"),
    "chat_tools": _json(CHAT, lambda _: {"messages": _said("x"), "tools": [{"a": [[1]] * 60_000}]}),
    "chat_arguments": _json(CHAT, _calls),
    "chat_variables": _json(
        CHAT, lambda _: {"messages": _said("x"), "chat_template_kwargs": {"a": [1] * 250_000}}, 200
    ),
    "responses_items": _many(RESPONSES, '{"input":[', '{"role":"user","content":"x"}', "]}"),
    "responses_items_fit": _json(RESPONSES, lambda _: {"input": _said("x") * 60_000}),
    "messages_blocks": _many(
        COUNT, '{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"
    ),
    "detokenize": _json("/detokenize", lambda _: {"tokens": [7] * 250_000}, 200),
    "detokenize_many": _many("/detokenize", '{"tokens":[', "7", "]}"),
    "weights_names": _many(
        "/update_weights", '{"update_info":{"dtype_names":[],"shapes":[],"names":[', '"a"', "]}}"
    ),
    "weights_shape": _json(
        "/update_weights",
        lambda _: {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2**62] * 100_000]}},
    ),
    "depth": Row(CHAT, lambda size: http(CHAT, b'{"messages":[],"tools":' + b"[" * (size - ROOM)), frozenset({400})),
    # files
    "embeds_pairs": _embeds(shape=b")", before=b")" + b"q\0h\0\x86" * 40),
    "embeds_shape": _embeds(shape=b"(\x8a\xff" + b"\x7f" * 255 + b"q\x05" + b"h\x05" * 2_000 + b"t"),
    "embeds_entries": _embeds(shape=b")", entries=5_000),
    "image_of_scans": _pictures(lambda _: [hostile_files.jpeg(10_000)]),
    "image_of_most_scans": _pictures(lambda _: [hostile_files.jpeg(60)], 200, 400),
    "image_of_most_pixels": _pictures(lambda _: [hostile_files.png(WIDEST, WIDEST)], 200),
    "image_of_more_pixels": _pictures(lambda _: [hostile_files.png(WIDEST, 2**31 - 1)]),
    "image_that_is_long": _pictures(lambda _: [hostile_files.png(2**24, 1)]),
    "image_with_text": _pictures(lambda _: [hostile_files.png(8, 8, text=2**26)], 200, 400),
    "image_of_noise": _pictures(lambda size: [hostile_files.noise(size)], 200),
    "image_of_no_bytes": _pictures(lambda size: ["data:image/png;base64," + "?" * size]),
    "image_of_zeros": _pictures(lambda size: ["data:image/png;base64," + "A" * (size // 4 * 4 - 100)]),
    "images_that_fit": _pictures(lambda _: [hostile_files.png(number + 1, 8) for number in range(200)], 200),
    "images_of_most_pixels": _pictures(lambda _: [hostile_files.png(WIDEST, WIDEST - each) for each in range(3)], 200),
    "images": _pictures(lambda size: [hostile_files.png(1, 1)] * (size // 200)),
    **{
        f"adapter_{name}": _json(LOAD, lambda _, name=name: _adapter(name), *statuses, server="adapters")
        for name, statuses in ADAPTERS.items()
    },
    **{
        f"weights_in_{name}": _json("/update_weights", lambda _, name=name: {"path": name}, *statuses, server="weights")
        for name, statuses in WEIGHTS.items()
    },
    # a server without --batch-dir stores no files
    "files": Row("/v1/files", lambda limit: http("/v1/files", b"a" * (limit - ROOM)), frozenset({404})),
    "batches": _json("/v1/batches", lambda size: {"input_file_id": text(size)}, 404),
    # many sequences, long answers
    "sequences": _json(COMPLETIONS, lambda _: {"prompt": [[1, 2]] * 156, "n": 128, "max_tokens": 1}, 200),
    "sequences_long": _json(
        COMPLETIONS, lambda _: {"prompt": [7] * 200_000, "n": 128, "max_tokens": 1}, 200, server="roomy"
    ),
    "sequences_masked": _json(
        COMPLETIONS, lambda _: {"prompt": [[1, 2]] * 40, "n": 128, "allowed_token_ids": [*range(900)]}, 200, 429
    ),
    "prompt_logprobs": _json(
        COMPLETIONS, lambda _: {"prompt": [7] * 30_000, "prompt_logprobs": 3, "max_tokens": 1}, 200, server="roomy"
    ),
    "echo": _json(
        COMPLETIONS,
        lambda _: {"prompt": [7] * 30_000, "echo": True, "logprobs": 3, "n": 8, "stream": True, "max_tokens": 1},
        200,
        server="roomy",
    ),
    "bad_words_sent": _json(
        COMPLETIONS, lambda _: {"prompt": [[1, 2]] * 100, "n": 128, "bad_words": ["xyz " * 15_000]}, 400, 429
    ),
    # HTTP itself
    "pipelined": Row("/nothing", lambda _: b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000, frozenset({401, 404})),
    "tiny_chunks": Row(
        TOKENIZE,
        lambda _: (
            f"POST {TOKENIZE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        ).encode()
        + b"1\r\nx\r\n" * 200_000
        + b"0\r\n\r\n",
        frozenset({400}),
    ),
    "header": Row(
        "/health", lambda size: b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * size + b"\r\n\r\n", frozenset({431})
    ),
    "headers": Row(
        "/v1/models",
        lambda _: f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n".encode() + b"a:b\r\n" * 9_000 + b"\r\n",
        frozenset({200}),
    ),
    "url": Row(
        "/warmup",
        lambda _: b"GET /warmup?" + b"a=b&" * 15_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        frozenset({200}),
    ),
}  # fmt: skip


PAUSE_SECONDS = 0.01
PATIENCE_SECONDS = 60.0


def health(port: int) -> float:
    """Return the milliseconds that one answer of /health takes, over a new connection."""
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as answer:
            status = answer.readline()
            answer.read()
    assert status.startswith(b"HTTP/1.1 200"), status
    return (time.perf_counter() - started) * 1e3


class HealthProbe:
    """Times /health of a server from another process, so that work in this process delays nothing.

    ``times`` are milliseconds, ascending; they are there after the context.
    """

    def __init__(self, port: int) -> None:
        self._command = [sys.executable, "-m", "tests.api.abuse", str(port)]
        self.times: list[float] = []

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self.times.append(float(self._process.stdout.readline()))  # the first time has arrived: probing has begun
        return self

    def __exit__(self, *_: object) -> None:
        said = self._process.communicate()[0]  # closes its input; it waits for the answer that is under way
        self.times = sorted([*self.times, *map(float, said.split())])

    def at(self, share: float) -> float:
        """Return the longest time in this share of the fastest answers."""
        return self.times[min(len(self.times) - 1, int(len(self.times) * share))]

    def figures(self) -> dict[str, float]:
        found = {"health_p50_ms": self.at(0.5), "health_p99_ms": self.at(0.99), "health_max_ms": self.times[-1]}
        return {name: round(value, 1) for name, value in found.items()} | {"health_answers": len(self.times)}


if __name__ == "__main__":
    print(health(int(sys.argv[1])), flush=True)
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        print(health(int(sys.argv[1])), flush=True)
