"""A server in its own process, with its engine in another process.

The engine is the real one, or one that follows a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from benchmarks.common.ports import free_port
from tests import shared_code
from tests.api import forked_engines
from tests.forked import Forked, Forks
from tests.tokenizers import byte_level

SERVE = """
import importlib, json, sys
from preheat.server.http import body
from preheat.server.app import run_server
from preheat.settings import Settings
from tests.api import loop_watch

body.BODY_SECONDS = 2.0
if sys.argv[2:]:
    importlib.import_module(sys.argv[2].partition(":")[0])  # for the error classes of a scripted engine
sys.exit(run_server(Settings.load(json.loads(sys.argv[1])), *sys.argv[2:]))
"""
SCRIPTED = "tests.api.scripted:run_engine"
ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error, after a check that it has OpenAI's shape."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return dict(self.json["error"])


@dataclass
class Server:
    process: subprocess.Popen[bytes] | Forked
    port: int
    model: str
    log: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        return self.engine_pids[0]

    @property
    def engine_pids(self) -> list[int]:
        """The processes of the engines, the oldest first."""
        return forked_engines.engines_of(self.process.pid)

    def wait_for_engines(self, count: int, seconds: float = 120) -> None:
        """Wait until ``count`` engines take requests."""
        end = time.monotonic() + seconds
        while (ready := self.get("/ready")).status != 200 or ready.json["engines"] != count:
            assert time.monotonic() < end, ready.body
            time.sleep(0.05)

    def get(self, path: str, **headers: str) -> Answer:
        return self._open(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: object, method: str = "POST", **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, data, headers, method=method))

    def _open(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), dict(error.headers))

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric of /metrics."""
        for line in self.get("/metrics").body.decode().splitlines():
            wanted = all(f'{label}="{value}"' in line for label, value in labels.items())
            if line.startswith(f"preheat:{name}{{") and wanted:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"/metrics has no {name}")

    def wait_until_open(self, seconds: float = 120) -> None:
        """Wait until the port is open."""
        self._wait_for("/live", seconds)

    def wait_until_ready(self, seconds: float = 120) -> None:
        """Wait until the server takes requests."""
        self._wait_for("/ready", seconds)

    def _wait_for(self, path: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                said = self.log.read_text(errors="replace")[-2000:] if self.log else ""
                raise AssertionError(f"the server left with {self.process.returncode}: {said}")
            with contextlib.suppress(OSError):
                if self.get(path).status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{path} did not become well")


ENGINES: dict[str, str] = {}
"""Options of real engines: a cache folder with the machine code, so that each source is compiled once a run."""


@pytest.fixture(scope="session", autouse=True)
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of machine code that the servers of all processes of a run share."""
    folder = shared_code.folder_of(tmp_path_factory)
    ENGINES["cache_dir"] = str(folder)
    return folder


FORKS = Forks("preheat.server.app", "tests.api.scripted", "tests.api.forked_engines", process=Forked)
"""Forks the processes of servers."""

ENGINE_FORKS = Forks(*forked_engines.IMPORTED, process=Forked)
"""Forks the processes of their engines."""

FORKS_ENGINES = not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/accel"))
"""Whether engines may be forked: an engine of a GPU sets variables that torch reads while it is imported."""

LENT = """
import sys
from tests.api import forked_engines

forked_engines.install(int(sys.argv.pop()))
"""
"""The beginning of a server whose last argument is the descriptor that ``ENGINE_FORKS`` lends."""


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    yield
    FORKS.close()
    ENGINE_FORKS.close()


def start(
    command: list[str], environment: dict[str, str], errors: int | None, *, forks_engines: bool
) -> subprocess.Popen[bytes] | Forked:
    """Start ``python -c`` with ``command``: fork it from a process that has imported the server."""
    if not FORKS.fit(environment):
        return subprocess.Popen([sys.executable, "-c", *command], env=environment, stderr=errors)
    more = [ENGINE_FORKS.lend()] if forks_engines and FORKS_ENGINES and ENGINE_FORKS.fit(environment) else []
    code, *arguments = command
    return FORKS.run(
        (LENT if more else "") + code, *arguments, environment=environment, errors=2 if errors is None else errors,
        more=more,
    )  # fmt: skip


@contextlib.contextmanager
def serving(
    model: str,
    *,
    engine: str | None = SCRIPTED,
    wait: bool = True,
    log: Path | None = None,
    descriptors: int | None = None,
    watch: Path | None = None,
    forks_engines: bool = True,
    **options: Any,
) -> Iterator[Server]:
    """Run a server for ``model``; ``engine`` None runs the real engine.

    ``log`` is the file for the server's messages, instead of standard error. ``descriptors`` is the number of files
    that the server may open, and an engine of its own, too. ``watch`` is the file for the notes of
    :mod:`tests.api.loop_watch`. Without ``forks_engines`` the server starts its engines as in production.
    """
    port = options.get("port") or free_port()
    settings = {"model": model, "port": port, "log_level": "warning", **({} if engine else ENGINES), **options}
    command = [SERVE, json.dumps(settings), *([engine] if engine else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    if watch is not None:
        environment["LOOP_WATCH"] = str(watch)
    if descriptors is not None:
        command[0] = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, 2 * ({descriptors},))\n{SERVE}"
    with contextlib.ExitStack() as opened:
        errors = opened.enter_context(log.open("wb")).fileno() if log else None
        process = start(command, environment, errors, forks_engines=forks_engines and descriptors is None)
    server = Server(process, port, model, log, settings)
    try:
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGKILL)
        server.process.wait()


def write_model(folder: Path) -> Path:
    """Write a tokenizer with a chat template, and no weights."""
    backend = byte_level()
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size() + 2}))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def scripted(folder: Path) -> Iterator[Server]:
    """Run a server with a scripted engine: a test can tell each token of its answers by hand."""
    with serving(str(folder), served_model_name=["tiny", "alias"], max_body_bytes=2**20) as server:
        yield server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Run the real engine with the bundled model."""
    with serving("bundled", engine=None, num_threads=1) as server:
        yield server


TALKER = (
    "<s>{{ messages[-1].content }}</s>"
    "{% for m in messages[:-1] %}({{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.reasoning_content }}{{ m.tool_call_id }}){% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if thinking %}<think>\n{% endif %}"
)


def write_tools_model(folder: Path) -> Path:
    """Write a model whose tokenizer has marks for reasoning and for tool calls.

    The marks of reasoning are ordinary tokens; the marks of tool calls are special tokens.
    """
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    backend.add_special_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
    backend.post_processor = None
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TALKER}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size() + 2}))
    return folder


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tools_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def talker(tools_folder: Path) -> Iterator[Server]:
    """Run a server that repeats the last message, with tool and reasoning parsers, and a store."""
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    options |= {"reasoning_parser": "qwen3", "enable_responses_store": True}
    with serving(str(tools_folder), served_model_name=["m"], **options) as running:
        yield running
