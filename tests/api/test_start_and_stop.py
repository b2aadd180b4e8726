"""A failed start, and a start ended by Ctrl-C.

Each gives one line that says how to go on and the right status, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.model.files import BUNDLED_PATH
from tests.api.conftest import FORKS
from tests.forked import Forked, Forks

ENV = os.environ | {"PREHEAT_SKIP_WARMUP": "0", "PREHEAT_BOOT_CHECK": "off"}

# Says that Python is up, then runs the command line as `python -m preheat` does.
COMMAND = """
import sys
import preheat.__main__ as command

listen = command._leave_from_a_thread

def listen_and_say_so():
    listen()
    print("up", flush=True)  # a signal that comes before is Python's own to handle

command._leave_from_a_thread = listen_and_say_so
sys.exit(command.main())
"""


def variant(folder: Path, **files: object) -> Path:
    """Write the bundled model with other files, or with other fields in its JSON files."""
    for path in BUNDLED_PATH.iterdir():
        (folder / path.name).symlink_to(path)
    for name, content in files.items():
        path = folder / name.replace("_json", ".json").replace("_jinja", ".jinja")
        text = json.dumps(json.loads(path.read_text()) | content) if isinstance(content, dict) else str(content)
        path.unlink(missing_ok=True)
        path.write_text(text)
    return folder


def preheat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preheat", *words]
    return subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=ENV, timeout=120
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[dict[str, Forks[Forked]]]:
    """Return what forks the process of each command. Imports take ``generate`` longer than a failed start."""
    engine = Forks("preheat.llm", "preheat.boot.engine", "preheat.backends.cpu.backend", process=Forked)
    yield {"serve": FORKS, "generate": engine}
    engine.close()


def forked(forks: Forks[Forked], folder: Path, *words: str) -> tuple[int | None, str, str]:
    """Return the status, the output and the errors of a command in a forked process."""
    code = "import sys; from preheat.__main__ import main; sys.exit(main())"
    if not forks.fit(ENV):
        done = preheat(*words)
        return done.returncode, done.stdout, done.stderr
    with (folder / "out").open("w") as out, (folder / "errors").open("w") as errors:
        started = forks.run(code, *words, environment=ENV, out=out.fileno(), errors=errors.fileno())
    try:
        status = started.wait(120)
    finally:
        started.kill()
    return status, (folder / "out").read_text(), (folder / "errors").read_text()


BROKEN = {
    "7 attention heads cannot share 2": {"config_json": {"num_attention_heads": 7}},
    "rope_scaling must be an object": {"config_json": {"rope_scaling": "yes"}},
    "the chat template is broken: line 1": {"chat_template_jinja": "{% for x %}"},
    "the chat template fails on a single message": {"chat_template_jinja": "{{ messages[0].content.nothing() }}"},
    "temperature: Expected `float`, got `str`": {"generation_config_json": {"temperature": "hot"}},
    "top_p must be between 0 and 1": {"generation_config_json": {"top_p": 7}},
    "generation_config.json: eos_token_id must be": {"generation_config_json": {"eos_token_id": "x"}},
    "tokenizer.json cannot be read": {"tokenizer_json": "{}"},
}


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_model_fails_the_start_in_one_line(
    command: str, message: str, tmp_path: Path, forks: dict[str, Forks[Forked]]
) -> None:
    (tmp_path / "model").mkdir()
    model = str(variant(tmp_path / "model", **BROKEN[message]))
    words = ["--port", "0"] if command == "serve" else ["--prompt", "x"]
    status, out, errors = forked(forks[command], tmp_path, command, "--model", model, *words, "--log-level", "warning")
    assert status == 1 and out == ""
    (line,) = errors.splitlines()
    assert line.startswith("preheat: error: ") and message in line


def test_the_log_at_debug_has_the_traceback(tmp_path: Path) -> None:
    model = str(variant(tmp_path, config_json={"num_attention_heads": 7}))
    done = preheat("serve", model, "--port", "0", "--log-level", "debug")
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1].startswith("preheat: error: 7 attention")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_all_commands_report_a_wrong_setting_alike(
    command: str, tmp_path: Path, forks: dict[str, Forks[Forked]]
) -> None:
    """A wrong setting is found before a list of a billion blocks is made.

    The engine finds it, in a process of its own too.
    """
    words = ["--port", "0"] if command == "serve" else ["--prompt", "x"]
    words += ["--num-gpu-blocks-override", "1000000000", "--log-level", "warning"]
    status, _, errors = forked(forks[command], tmp_path, command, *words)
    assert status == 2
    (line,) = errors.splitlines()
    assert line.startswith("preheat: error: num_gpu_blocks_override 1000000000 takes ")


def interrupted(words: list[str], until: str, wait: float = 0.0) -> tuple[int, str]:
    """Return the status of a command that gets Ctrl-C, and the text on standard error after it."""
    command = [sys.executable, "-c", COMMAND, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENV, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if until in line:
                break
        time.sleep(wait)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
        return process.returncode, rest


def assert_cut_short(said: str) -> None:
    """Assert that the boot, of several seconds, did not go on to its end. A time would depend on the machine."""
    assert "ready after" not in said and "Warmup finished" not in said


@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["generate", "--prompt", "x"]], ids=lambda words: words[0])
@pytest.mark.parametrize("wait", [0.0, 0.3, 0.8])
def test_ctrl_c_in_the_first_second(words: list[str], wait: float) -> None:
    status, said = interrupted(words, "up", wait)
    assert status == 130 and "Traceback" not in said and "Exception" not in said
    assert_cut_short(said)


@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["generate", "--prompt", "x"]], ids=lambda words: words[0])
def test_ctrl_c_during_warm_up(words: list[str]) -> None:
    options = ["--max-num-seqs", "256", "--cache-dir", "off"]
    status, said = interrupted([*words, *options], "Generated", 0.5)
    assert status == 130 and "Traceback" not in said and "Exception" not in said
    assert_cut_short(said)
