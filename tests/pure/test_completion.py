"""Completion in shells: the scripts are valid, and complete all options of the command line."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from preheat.cli.main import main
from preheat.settings import OPTIONS
from preheat.utils.completion import SHELLS


@pytest.fixture
def scripts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    found = {}
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        found[shell] = capsys.readouterr().out
    return found


def completed(script: str, *words: str) -> set[str]:
    """Return bash's completions of the last of ``words``."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_preheat; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_choices(scripts: dict[str, str]) -> None:
    script = scripts["bash"]
    assert completed(script, "preheat", "ser") == {"serve"}
    assert completed(script, "preheat", "completion", "") >= set(SHELLS)
    assert completed(script, "preheat", "serve", "--") >= {opt.flag for opt in OPTIONS.values() if opt.later is None}
    assert completed(script, "preheat", "serve", "--otlp-traces-p") == {"--otlp-traces-protocol"}
    assert completed(script, "preheat", "plan", "--port") == set()  # no server's options


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_can_read_its_script(scripts: dict[str, str], shell: str) -> None:
    for name in ("serve", "generate", "max-num-seqs", "served-model-name"):
        assert name in scripts[shell]
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], check=False, input=scripts[shell], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'preheat[completion]'" in capsys.readouterr().err
