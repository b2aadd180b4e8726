"""``preheat generate`` from end to end, with the bundled model."""

import io
import json
import os
import subprocess
import sys

import pytest

from preheat.cli.main import main
from tests import shared_code


def generate(*args, **variables):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "preheat", "generate", *args],
        check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def records(capsys, monkeypatch):
    """Return a function that runs the command and returns its output, in this process, with torch imported already."""

    def run(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = main(["generate", "--json", *args])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        return [json.loads(line) for line in shown.out.splitlines()]

    return run


def test_one_object_for_each_prompt_and_choice(records):
    found = records("--prompt", "def f(", "--prompt", "import ", "--n", "2", "--max-tokens", "4", "--logprobs", "1")
    assert [(r["prompt"], r["choice"]) for r in found] == [("def f(", 0), ("def f(", 1), ("import ", 0), ("import ", 1)]
    for record in found:
        assert set(record) == {"prompt", "choice", "text", "token_ids", "finish_reason", "logprobs"}
        assert 1 <= len(record["token_ids"]) <= 4
        assert record["finish_reason"] in ("length", "stop")


def test_prompts_from_standard_input_and_files_agree(records, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def f(\nimport os\n")
    options = ("--temperature", "0", "--max-tokens", "4")
    piped = records(*options, stdin="def f(\nimport os\n")
    assert len(piped) == 2
    assert piped == records(*options, "--prompts", str(file))


def test_text_alone_on_standard_output(records, tmp_path_factory):
    cache = {"PREHEAT_CACHE_DIR": str(shared_code.folder_of(tmp_path_factory))}
    status, out, _ = generate("--prompt", "def add(a, b):", "--temperature", "0", "--max-tokens", "8", **cache)
    assert status == 0
    (record,) = records("--prompt", "def add(a, b):", "--temperature", "0", "--max-tokens", "8")
    assert out == record["text"] + "\n"


@pytest.mark.parametrize(
    "args", [("--prompt", "x", "--model", "no/such/folder"), ("--prompt", "x", "--max-logprobs", "-1")]
)
def test_errors_are_one_line(args):
    status, out, error = generate(*args)
    assert status in (1, 2)
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("preheat: error: ")
