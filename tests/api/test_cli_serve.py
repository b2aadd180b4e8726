"""``preheat serve``: everything that it prints is true when it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", ["preheat serve", "preheat.entrypoints.openai.api_server"])
def test_the_curl_line_is_printed_once_the_port_answers(program: str, code_folder: Path) -> None:
    command = [sys.executable, "-m", *program.split(), "--port", "0", "--num-threads", "1", "--log-level", "warning"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    environment = os.environ | {"PREHEAT_CACHE_DIR": str(code_folder)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            assert any(line == "Ready. Try:\n" for line in lines)
            found = next(match for line in lines if (match := re.search(r"curl (http://\S+)/v1/completions", line)))
            with urllib.request.urlopen(f"{found[1]}/ready", timeout=30) as answer:
                assert answer.status == 200
        finally:
            server.terminate()
    assert server.returncode == 0


def test_other_names_of_modules_are_no_programs() -> None:
    for module, said in (("preheat.outputs", ""), ("preheat.entrypoints.openai.run_batch", "run-batch")):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
        assert (f"usage: preheat {said}" in done.stdout) == bool(said) and bool(done.stdout) == bool(said)
