"""The record of a boot names execution mode, processor and LLVM, and `preheat verify --digest` names a difference."""

from __future__ import annotations

import json

import pytest

from preheat.cli import main
from tests.cpu.test_llvm import checkpoint

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'preheat[llvm]'")

from preheat.backends.cpu.llvm import targets

FLAGS = """--device cpu --dtype float32 --skip-tokenizer-init --max-model-len 64 --max-num-seqs 2 --num-threads 1
--max-num-batched-tokens 32 --block-size 16 --num-gpu-blocks-override 20 --cache-dir off --no-skip-warmup""".split()


def test_a_digest_of_another_mode_or_processor_is_named(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path)
    path = tmp_path / "record.json"
    flags = ["--model", str(tmp_path), *FLAGS]
    assert main(["warm", "--json", *flags, "--execution-mode", "llvm"]) == 0
    path.write_text(capsys.readouterr().out)
    proof = json.loads(path.read_text())["proof"]
    assert proof["parts"]["mode"] == "llvm"
    assert proof["parts"]["device"][1].endswith(f", {targets.here().title}")
    asked = ["verify", "--digest", str(path), *flags, "--execution-mode"]
    assert main([*asked, "eager"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "mode: llvm -> eager" in told
    assert any(line.startswith("device[1]: ") for line in told)
    assert any(line.startswith(f"bits: {proof['digest']} -> ") for line in told)
    # Code for another processor: named, and with the same bits.
    other = targets.TARGETS["avx2" if targets.TARGETS["avx2"].runs_here else "neon"]
    monkeypatch.setattr(targets, "here", lambda: other)
    assert main([*asked, "llvm"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"The bits are equal: digest {proof['digest']}"
    assert any(line.startswith("device[1]: ") and line.endswith(other.title) for line in told)
