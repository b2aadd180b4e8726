"""Unmodified clients do text, a stream, tools and JSON against one server.

Each client is a program in a process of its own. `scripts/install clients` puts the clients' packages beside the
packages of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Server, serving

HERE = Path(__file__).parent
STEPS = ["text", "stream", "tools", "json"]
ENVIRONMENTS = {
    "haystack": "clients",
    "instructor": "clients-openai-2",
    "langchain": "clients",
    "litellm": "clients",
    "llama_index": "clients-openai-2",
    "openai_agents": "clients",
    "pydantic_ai": "clients",
}


def steps_of(command: list[str | Path], url: str, **options: Any) -> list[str]:
    """Run a client and return the names of the steps that it did.

    The client must succeed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, url], check=False, env=environment, capture_output=True, text=True, timeout=240, **options
    )
    assert done.returncode == 0, f"after {done.stdout.split()}: {done.stderr[-3000:]}"
    return done.stdout.split()


def test_every_program_is_run() -> None:
    assert {path.stem for path in HERE.glob("use_*.py")} == {f"use_{name}" for name in (*ENVIRONMENTS, "embeddings")}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_clients_in_python(name: str, talker: Server) -> None:
    python = Path(sys.prefix, ENVIRONMENTS[name], "bin", "python")
    if not python.exists():
        pytest.skip("the clients are not installed: scripts/install clients")
    assert steps_of([python, HERE / f"use_{name}.py"], talker.url) == STEPS


def test_clients_of_embeddings() -> None:
    """LangChain, huggingface_hub, Haystack, LlamaIndex and Cohere get the vectors and rankings of the server."""
    packages = next(Path(sys.prefix, "clients").glob("lib/python3*/site-packages"), Path("none"))
    if not (packages / "langchain_cohere").is_dir():
        pytest.skip("the clients of embeddings are not installed: scripts/install clients")
    options = {"runner": "pooling", "num_threads": 1, "max_model_len": 256, "dtype": "float32"}
    with serving("bundled", engine=None, served_model_name=["m"], **options) as server:
        steps = steps_of([Path(sys.prefix, "clients", "bin", "python"), HERE / "use_embeddings.py"], server.url)
    assert steps == ["langchain", "hugging_face", "haystack", "llama_index", "cohere"]


def test_the_sdk_of_vercel(talker: Server) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    packages = Path(sys.prefix, "clients-npm")
    if not (packages / "node_modules").is_dir():
        pytest.skip("the clients are not installed: scripts/install clients")
    with (HERE / "use_vercel.mjs").open() as program:  # read from there, it finds the packages of the working directory
        steps = steps_of([node, "--input-type=module", "-"], talker.url, stdin=program, cwd=packages)
    assert steps == STEPS
