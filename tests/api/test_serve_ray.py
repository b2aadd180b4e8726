"""Replicas of Ray Serve are hot before they get a request.

They compute the same bits, and are replaced when they die.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, SamplingParams
from preheat.errors import SettingsError
from preheat.model.files import BUNDLED_PATH
from preheat.settings import Settings

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install preheat[ray]")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install preheat[ray]")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray's own

URL = "http://127.0.0.1:8123"
SETTINGS = {
    "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 4, "max_model_len": 256,
    "skip_warmup": False,
}  # fmt: skip
PROMPT, TOKENS = "def add(a, b):", 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray with CPUs for two workers on this machine."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    yield
    serve.shutdown()
    ray.shutdown()


def run(model: str | Path, replicas: int, **more: Any) -> None:
    """Run ``replicas`` replicas of ``model``, without waiting for them."""
    from preheat.serve_ray import app

    deployment = {"num_replicas": replicas, "max_constructor_retry_count": 1, "ray_actor_options": {"num_cpus": 1}}
    serve.run(app({"model": str(model), "deployment": deployment, **SETTINGS, **more}))


def replicas() -> Any:
    """Return Ray Serve's status of the replicas."""
    return serve.status().applications["default"].deployments["preheat"]


def until(happens: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, replicas()
        time.sleep(0.2)


def post(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0} | fields).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def ready() -> dict[str, Any]:
    with urllib.request.urlopen(f"{URL}/ready", timeout=10) as answer:
        return json.loads(answer.read())


def test_two_replicas_answer_as_one_process_does(cluster: None) -> None:
    run("bundled", 2)
    until(lambda: replicas().replica_states == {"RUNNING": 2})
    llm = LLM(**SETTINGS)
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0), use_tqdm=False)[0].outputs[0].text
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(), range(16)))
    assert {answer["choices"][0]["text"] for answer in answers} == {expected}
    (digest,) = {ready()["digest"] for _ in range(8)}
    assert digest


def engines() -> list[int]:
    """Return the engines' processes that descend from this process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])

    def is_ours(pid: int) -> bool:
        while pid in parents:
            if (pid := parents[pid]) == os.getpid():
                return True
        return False

    def runs_engine(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return b"preheat.server.replicas.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    return [pid for pid in parents if runs_engine(pid) and is_ours(pid)]


def test_a_replica_with_another_digest_is_refused(cluster: None, tmp_path: Path) -> None:
    """A replica with another digest is refused.

    An engine is killed, and the weights change before it is replaced.
    """
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_PATH, model)
    run(model, 2)
    until(lambda: replicas().replica_states == {"RUNNING": 2} and len(engines()) == 2)
    first, text = ready()["digest"], post()["choices"][0]["text"]
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-4096:] = bytes(byte ^ 1 for byte in data[-4096:])
    weights.unlink()
    weights.write_bytes(data)
    os.kill(engines()[0], signal.SIGKILL)
    until(lambda: "computes other bits" in replicas().message)
    assert (
        f"the first one's {first}, so it" in replicas().message and f"its digest is {first}" not in replicas().message
    )
    assert replicas().replica_states["RUNNING"] == 1
    assert {post()["choices"][0]["text"] for _ in range(8)} == {text}


def test_a_replica_that_stops_finishes_its_requests(cluster: None) -> None:
    """A replica that is told to stop in the middle of a request finishes the request."""
    run("bundled", 1)
    until(lambda: replicas().replica_states == {"RUNNING": 1})
    tokens = 200
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, max_tokens=tokens, ignore_eos=True)
        time.sleep(0.1)
        assert not answer.done()
        serve.delete("default")
        assert answer.result()["usage"]["completion_tokens"] == tokens
    until(lambda: engines() == [])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"device": "auto"}, "set cpu or cuda"),
        ({"device": "cpu", "port": 9000}, "port configures a port, and Ray Serve opens the port"),
        ({"device": "cpu", "boot_check": "off"}, "leave boot_check on"),
        ({"device": "cpu", "skip_warmup": True}, "drop skip_warmup"),
        (
            {"device": "cpu", "skip_warmup": False, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "a replica runs its ranks",
        ),
    ],
)
def test_options_that_replicas_lack_are_refused(args: dict[str, Any], said: str) -> None:
    from preheat.serve_ray import app

    with pytest.raises(SettingsError, match=said):
        app(args)


def test_paths_are_checked_where_a_replica_runs() -> None:
    from preheat.serve_ray import _Server

    settings = Settings.load({"device": "cpu", "weights_root": "/nowhere"})
    with pytest.raises(SettingsError, match="weights_root /nowhere cannot be read"):
        asyncio.run(_Server._begin(None, settings))  # type: ignore[arg-type]  # before anything is kept
